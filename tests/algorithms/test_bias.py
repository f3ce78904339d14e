"""Which gradient estimators are right: their means over many groups against the exact gradient of a small problem.

The problem: an agent may call a tool up to four times and may stop at any turn, which is an episode of 1 to 4 turns.
Each call finds what is needed with a chance of 0.6, and then goes on to find it. What turns earn is made by the real
process rules: a new call earns 0.3, one that finds something 0.4 more, one after it was found costs 0.1; all of it is
capped at 0.8, and an episode that never stops gives it back on its last turn. Stopping with what is needed is worth as
many points as there were calls. The policy has a parameter for each action in each of the states, so that all episodes
can be listed, and with them the gradient of the mean reward.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

from TrainingFactory.algorithms.advantages import Credit, compute_advantages
from TrainingFactory.rewards.process_reward import CAPPED_PART, CLAWED_BACK_PART, calculate_process_reward
from TrainingFactory.types import (
    Completion,
    Message,
    Reward,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
)

TURNS, MEMBERS, GROUPS = 4, 3, 200_000
CALL, STOP = 0, 1
CHANCE = 0.6
STATES = TURNS * 2  # turn x whether it has been found
PARAMETERS = np.random.default_rng(7).normal((0.7, 0.0), 0.8, (STATES, 2))
NOT_PLAYED, MISSED, FOUND, STOPPED = range(4)  # how a turn went; what was found before is found again
STEP_REWARDS = {"no_repeated_call": 0.3, "correct_tool": 0.4, "needless": -0.1}


class Episodes(NamedTuple):
    """Some axes of episodes. [..., TURNS]: what comes after the last turn is zero."""

    states: np.ndarray
    actions: np.ndarray
    alive: np.ndarray  # whether the turn was played
    steps: np.ndarray
    outcomes: np.ndarray  # [...]
    clawed: np.ndarray  # [...] whether it gave back what it was paid
    capped: np.ndarray  # [...] whether it was paid less than its turns earned


def needless(trajectory: Trajectory, turn: int) -> bool:
    """A rule of one's own: a call although an earlier one has found it."""
    calls = bool(trajectory.turns[turn].message.tool_calls)
    return calls and any(result.ok for one in trajectory.turns[:turn] for result in one.tool_results)


def paid(went: tuple[int, ...]) -> Reward:
    """The reward of an episode whose turns went like this, by the code that pays them in a run."""
    turns: list[Turn] = []
    for number, how in enumerate(went):
        calls = [] if how == STOPPED else [ToolCall("look", {"page": number})]
        results = [ToolResult("", how == FOUND or FOUND in went[:number]) for _ in calls]
        message = Message("assistant", "" if calls else "It is this.", calls)
        turns.append(Turn([], Completion([1], [0.0], "stop"), message, tool_results=results))
    done = went[-1] == STOPPED
    trajectory = Trajectory(
        Task("t", "?"), "g", turns=turns, tools=[ToolSpec("look")], status="done" if done else "max_turns"
    )
    outcome = float(len(went) - 1) if done and FOUND in went else 0.0
    return calculate_process_reward(
        trajectory, STEP_REWARDS, outcome=outcome, pay="per_turn", cap=0.8, rules={"needless": needless}
    )


def table() -> tuple[np.ndarray, np.ndarray]:
    """Of every way in which turns can go, by `number_of`: steps [256, 4]; outcome, clawed back, capped [256, 3]."""
    steps, rest = np.full((4**TURNS, TURNS), np.nan), np.full((4**TURNS, 3), np.nan)
    for size in range(1, TURNS + 1):
        for went in product((MISSED, FOUND, STOPPED), repeat=size):
            reward = paid(went)
            number = number_of(np.array(went + (NOT_PLAYED,) * (TURNS - size)))
            steps[number] = reward.steps + [0.0] * (TURNS - size)
            rest[number] = reward.outcome, reward.parts[CLAWED_BACK_PART] < 0, reward.parts[CAPPED_PART] < 0
    return steps, rest


def number_of(went: np.ndarray) -> np.ndarray:
    return went @ (4 ** np.arange(TURNS))


def policy() -> np.ndarray:
    """[STATES, 2]"""
    weights = np.exp(PARAMETERS)
    return weights / weights.sum(1, keepdims=True)


STEPS, REST = table()


def play(draws: np.ndarray, luck: np.ndarray) -> Episodes:
    """From random numbers in [0, 1). [..., TURNS]"""
    shape, probs = draws.shape, policy()
    states, actions, went = np.zeros(shape, int), np.full(shape, STOP), np.full(shape, NOT_PLAYED)
    going, found = np.ones(shape[:-1], bool), np.zeros(shape[:-1], bool)
    for turn in range(TURNS):
        state = turn * 2 + found
        calls = draws[..., turn] < probs[state, CALL]
        states[..., turn], actions[..., turn] = state, np.where(calls, CALL, STOP)
        # what the last call finds helps nobody any more
        hit = calls & ~found & (luck[..., turn] < CHANCE) & (turn < TURNS - 1)
        went[..., turn] = going * np.where(calls, np.where(hit, FOUND, MISSED), STOPPED)
        found, going = found | (going & hit), going & calls
    numbers = number_of(went)
    outcomes, clawed, capped = np.moveaxis(REST[numbers], -1, 0)
    return Episodes(states, actions, went != NOT_PLAYED, STEPS[numbers], outcomes, clawed, capped)


def scores(episodes: Episodes) -> np.ndarray:
    """Gradient of the log-prob of each turn's action. [..., TURNS, STATES, 2]"""
    slope = np.eye(2)[episodes.actions] - policy()[episodes.states]
    slope = slope * episodes.alive[..., None]
    return np.eye(STATES)[episodes.states][..., None] * slope[..., None, :]


class Listed(NamedTuple):
    """Every way in which an episode can go, and how likely it is."""

    episodes: Episodes
    chances: np.ndarray  # [K]
    scores: np.ndarray  # [K, TURNS, STATES, 2]


def every_episode() -> Listed:
    found: dict[tuple[Any, ...], tuple[np.ndarray, np.ndarray]] = {}
    # a draw of 0 calls wherever it can be done, one close to 1 stops; luck likewise
    for draws in product((0.0, 0.999999), repeat=TURNS):
        for luck in product((0.0, 0.999999), repeat=TURNS):
            one = play(np.array(draws), np.array(luck))
            key = tuple(np.concatenate([one.states, one.actions])[np.tile(one.alive, 2)])
            found.setdefault(key, (np.array(draws), np.array(luck)))
    episodes = play(*(np.stack(each) for each in zip(*found.values(), strict=True)))
    probs = np.where(episodes.alive, policy()[episodes.states, episodes.actions], 1.0).prod(-1)
    # whether a call found something shows in the next state, if it was not found already
    before, after = episodes.states[:, :-1] % 2, episodes.states[:, 1:] % 2
    chance = np.where(before == 1, 1.0, np.where(after == 1, CHANCE, 1 - CHANCE))
    chances = probs * np.where(episodes.alive[:, 1:], chance, 1.0).prod(-1)
    assert chances.sum() == pytest.approx(1)
    return Listed(episodes, chances, scores(episodes))


def exact_gradient(listed: Listed) -> np.ndarray:
    """Of the mean reward: sum over episodes of p R grad log p. [STATES, 2]"""
    rewards = listed.episodes.outcomes + listed.episodes.steps.sum(-1)
    return np.einsum("k,k,ktsa->sa", listed.chances, rewards, listed.scores)


def estimates(credits: np.ndarray, episodes: Episodes) -> np.ndarray:
    """One gradient per group: the mean over its members. [G, n, TURNS] -> [G, STATES * 2]"""
    slopes = (np.eye(2)[episodes.actions] - policy()[episodes.states]) * (episodes.alive * credits)[..., None]
    total = np.zeros((len(credits), STATES, 2))
    groups = np.arange(len(credits))[:, None, None]
    np.add.at(total, (groups, episodes.states), slopes)
    return total.reshape(len(credits), -1) / MEMBERS


@pytest.fixture(scope="module")
def sampled() -> Episodes:
    rng = np.random.default_rng(0)
    shape = (GROUPS, MEMBERS, TURNS)
    return play(rng.random(shape), rng.random(shape))


@pytest.fixture(scope="module")
def listed() -> Listed:
    return every_episode()


def tell(name: str, found: np.ndarray, wanted: np.ndarray, what: str) -> float:
    """The largest distance of the mean from what is wanted, in units of its own deviation; both are printed."""
    mean, error = found.mean(0), found.std(0) / np.sqrt(len(found))
    used = error > 0
    assert np.abs(mean[~used] - wanted[~used]).max(initial=0) < 1e-12
    distance = float((np.abs(mean - wanted)[used] / error[used]).max())
    print(f"\n{name}: mean {np.linalg.norm(mean):.4f} long, {what} {np.linalg.norm(wanted):.4f}, at most "
          f"{distance:.1f} deviations apart ({np.round(mean, 4)} and {np.round(wanted, 4)})")  # fmt: skip
    assert np.linalg.norm(error) < 0.02 * np.linalg.norm(wanted)  # precise enough to say something
    return distance


def test_what_turns_are_paid(listed: Listed) -> None:
    """By hand; and limits and claw-backs are no rare cases here."""
    for went, steps in [
        ((MISSED, FOUND, STOPPED), [0.3, 0.5, 0.0]),  # 0.3 + 0.7 are over 0.8
        ((FOUND, MISSED, MISSED, STOPPED), [0.7, 0.1, 0.0, 0.0]),  # of 0.6 twice there is room for 0.1
        ((MISSED, MISSED, MISSED, MISSED), [0.3, 0.3, 0.2, -0.8]),
        ((STOPPED,), [0.0]),
    ]:
        assert paid(went).steps == pytest.approx(steps), went
    clawed, capped = listed.chances @ listed.episodes.clawed, listed.chances @ listed.episodes.capped
    print(
        f"\nclawed back {clawed:.0%}, capped {capped:.0%} of the episodes, which are of {len(listed.chances)} kinds"
    )
    assert clawed > 0.1 and capped > 0.3


SURE = 4.5  # deviations; of 16 numbers one is beyond that in 9,000 trials
WRONG = 10.0


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
@pytest.mark.parametrize(("baseline", "factor"), [("rloo", 1.0), ("group", (MEMBERS - 1) / MEMBERS)])
def test_unbiased(sampled: Episodes, listed: Listed, baseline: Any, factor: float, credit: Credit) -> None:
    """`group` has its own reward in the mean, which makes it shorter by the factor (n - 1) / n, and nothing else."""
    found = estimates(compute_advantages(sampled.outcomes, sampled.steps, credit, baseline), sampled)
    wanted = factor * exact_gradient(listed).ravel()
    assert tell(f"{baseline}, {credit}", found, wanted, "exactly") < SURE


def test_credit_by_turn_is_the_more_precise(sampled: Episodes) -> None:
    spread = {}
    for credit in ("trajectory", "turn"):
        found = estimates(compute_advantages(sampled.outcomes, sampled.steps, credit, "rloo"), sampled)
        spread[credit] = float(found.var(0).sum())
    print(f"\nvariance of one group's gradient: {spread}")
    assert spread["turn"] < 0.95 * spread["trajectory"]


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_division_by_the_deviation_is_biased(sampled: Episodes, listed: Listed, credit: Credit) -> None:
    """Its mean, summed up over all groups that there can be, is another one: rare differences weigh as much as large
    ones."""
    found = estimates(
        compute_advantages(sampled.outcomes, sampled.steps, credit, "group", scale=True), sampled
    )
    members = np.array(list(product(range(len(listed.chances)), repeat=MEMBERS)))
    groups = Episodes(*(each[members] for each in listed.episodes))
    every = compute_advantages(groups.outcomes, groups.steps, credit, "group", scale=True)
    wanted = listed.chances[members].prod(1) @ estimates(every, groups)
    assert tell(f"scaled, {credit}", found, wanted, "summed up") < SURE
    exact = exact_gradient(listed).ravel()
    cosine = float(wanted @ exact / np.linalg.norm(wanted) / np.linalg.norm(exact))
    print(f"cosine with the exact gradient {cosine:.4f}")
    assert cosine < 0.999  # another direction, not another length alone
    as_long = exact * np.linalg.norm(wanted) / np.linalg.norm(exact)
    assert tell(f"scaled, {credit}", found, as_long, "if unbiased") > WRONG


def test_comparing_turn_by_turn_is_biased(sampled: Episodes, listed: Listed) -> None:
    """The naive way: each turn's reward less the mean of the others at that turn, summed up over the turns that the
    episode itself has. The baseline then ends where the episode does, so that stopping early escapes it: the
    mean is off by the sum over turns t of (mean reward of turn t) * grad P(the episode comes to turn t)."""
    others = (sampled.steps.sum(1, keepdims=True) - sampled.steps) / (MEMBERS - 1)
    per_turn = (sampled.steps - others) * sampled.alive
    to_go = np.flip(np.cumsum(np.flip(per_turn, -1), -1), -1)
    outcomes = compute_advantages(sampled.outcomes, np.zeros_like(sampled.steps), "trajectory", "rloo")
    found = estimates(outcomes + to_go, sampled)
    exact = exact_gradient(listed).ravel()
    right = estimates(compute_advantages(sampled.outcomes, sampled.steps, "turn", "rloo"), sampled)
    apart = {
        "credit by turn": tell("credit by turn", right, exact, "exactly"),
        "turn by turn": tell("turn by turn", found, exact, "if unbiased"),
    }
    print(f"deviations from the exact gradient: {apart}")
    assert apart["credit by turn"] < SURE and apart["turn by turn"] > WRONG
    mean_steps = listed.chances @ listed.episodes.steps
    # grad P(turn t is played) = E[played_t * sum of the scores so far]
    reached = np.einsum("k,kt,kusa->tsa", listed.chances, listed.episodes.alive.astype(float), listed.scores)
    bias = -np.einsum("t,tsa->sa", mean_steps, reached).ravel()
    assert tell("turn by turn", found, exact + bias, "with its bias") < SURE


@pytest.mark.parametrize("what", ["taken back", "capped"])
def test_what_is_lost_must_be_booked_where_it_is_settled(
    sampled: Episodes, listed: Listed, what: str
) -> None:
    """The same rewards in total, with earlier entries changed in the end: bonuses struck out on the turns that had
    earned them, or the cap spread evenly over all turns. A turn that loses them for the episode is not told. Credit by
    episode does not mind."""
    lost = sampled.clawed if what == "taken back" else sampled.capped * (1 - sampled.clawed)
    even = sampled.steps.sum(-1, keepdims=True) / sampled.alive.sum(-1, keepdims=True) * sampled.alive
    changed = sampled._replace(steps=np.where(lost[..., None] > 0, even, sampled.steps))
    np.testing.assert_allclose(changed.steps.sum(-1), sampled.steps.sum(-1), atol=1e-12)
    exact = exact_gradient(listed).ravel()
    cases: list[tuple[Credit, bool]] = [("trajectory", False), ("turn", True)]
    for credit, biased in cases:
        found = estimates(compute_advantages(changed.outcomes, changed.steps, credit, "rloo"), changed)
        distance = tell(f"{what}, {credit}", found, exact, "exactly")
        assert distance > WRONG if biased else distance < SURE
