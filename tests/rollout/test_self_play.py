"""Self-play: one policy in two roles, with a reward and a baseline for each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kits.lessons import evaluations, learn, warm_start
from tests.kits.rollout import PARAMS, FakeChat, FakeSampler, call_text
from tests.kits.run import brief, rows, train
from tests.kits.warm import WARM
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.data.trajectories import trajectory_from_dict, trajectory_to_dict
from TrainingFactory.envs.self_play import SelfPlayEnvironment
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.rollout.branching import Branching
from TrainingFactory.rollout.self_play import SelfPlayRollouts
from TrainingFactory.tools import tool
from TrainingFactory.training.filters import EpisodeFilters
from TrainingFactory.types import Message, SamplingParams, Task, Trajectory

Say = Callable[[int, int, str], str]


class Haggle(SelfPlayEnvironment):
    """The buyer offers, the seller raises, the buyer accepts or offers again."""

    roles = ("buyer", "seller")
    closed = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.offers: list[tuple[str, str]] = []

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        yield from (Task(f"lamp-{number}", "A lamp.") for number in range(count))

    def opening(self, role: str) -> list[Message]:
        return [Message("system", f"You are the {role}."), Message("user", self.task.prompt)]  # type: ignore[arg-type]

    def move(self, role: str, text: str) -> str | None:
        self.offers.append((role, text))
        return None if text == "deal" else f"{role}: {text}"

    def rewards(self) -> Mapping[str, float]:
        if self.forfeited:
            return {role: -1.0 if role == self.forfeited else 0.5 for role in self.roles}
        price = float(max((int(text) for _, text in self.offers if text.isdigit()), default=0))
        return {"buyer": 10.0 - price, "seller": price}

    async def close(self) -> None:
        Haggle.closed += 1


def play(
    say: Say,
    count: int = 1,
    group_size: int = 1,
    game: type[SelfPlayEnvironment] = Haggle,
    sampler: FakeSampler | None = None,
    **options: Any,
) -> list[list[Trajectory]]:
    Haggle.closed = 0
    options = {"params": PARAMS, "episode_timeout": 20.0} | options
    engine = SelfPlayRollouts(game, FakeChat(), **options)
    tasks = list(game.tasks("train", 0, count))
    return asyncio.run(engine.rollout_batch(tasks, sampler or FakeSampler(say), group_size))


def haggling(session: int, turn: int, prompt: str) -> str:
    """The buyer offers 3, then accepts. The seller of game n asks for 5 + n."""
    if "buyer." in prompt:
        return "deal" if turn else "3"
    return f"{5 + session // 2 % 4}"


def texts(episode: Trajectory) -> list[tuple[str, str]]:
    after = [message for turn in episode.turns for message in (turn.message, *turn.replies)]
    return [(message.role, message.content) for message in [*episode.prompt, *after]]


def test_each_role_has_its_own_conversation_and_reward() -> None:
    [[buyer, seller]] = play(lambda session, turn, prompt: haggling(0, turn, prompt))
    assert texts(buyer) == [
        ("system", "You are the buyer."),
        ("user", "A lamp."),
        ("assistant", "3"),
        ("user", "seller: 5"),
        ("assistant", "deal"),
    ]
    assert texts(seller) == [
        ("system", "You are the seller."),
        ("user", "A lamp.\n\nbuyer: 3"),
        ("assistant", "5"),
    ]
    assert [(episode.role, episode.member, episode.status) for episode in (buyer, seller)] == [
        ("buyer", 0, "done"),
        ("seller", 1, "done"),
    ]
    assert [episode.reward and episode.reward.outcome for episode in (buyer, seller)] == [5.0, 5.0]
    assert Haggle.closed == 1
    assert trajectory_from_dict(trajectory_to_dict(seller)).role == "seller"
    assert "role" not in trajectory_to_dict(Trajectory(Task("t", "?"), "g"))


def test_advantages_compare_episodes_of_the_same_role() -> None:
    """Against means computed here, from the rewards that the rules of the game imply."""
    [group] = play(haggling, group_size=4)
    prices = {f"{5 + number}" for number in range(4)}
    asked = [turn.message.content for episode in group[4:] for turn in episode.turns]
    assert set(asked) == prices
    [made] = EpisodeFilters({}).make_groups([group], GRPO(), [(0, 0, 0)])
    sellers = [float(price) for price in asked]
    buyers = [10.0 - price for price in sellers]
    expected = [x - sum(role) / 4 for role in (buyers, sellers) for x in role]
    assert len(made.rows) == 8  # one row per episode, once
    for row, advantage, episode in zip(made.rows, expected, group, strict=True):
        trained = [value for value, mask in zip(row.advantages, row.loss_mask, strict=True) if mask]
        assert trained == pytest.approx([advantage] * len(trained))
        sampled = [token for turn in episode.turns for token in turn.completion.token_ids]
        assert [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask] == sampled
    mixed = GRPO().samples(group)  # one baseline for both roles would be something else
    assert [row.advantages[-1] for row in mixed] != pytest.approx([row.advantages[-1] for row in made.rows])


def test_metrics_are_reported_by_role() -> None:
    [group] = play(haggling, group_size=4)
    metrics = rollout_metrics(group)
    assert metrics["role/seller/reward"] == pytest.approx((5 + 6 + 7 + 8) / 4)
    assert metrics["role/buyer/reward"] == pytest.approx(10 - (5 + 6 + 7 + 8) / 4)
    assert metrics["role/buyer/unscored"] == metrics["role/seller/unscored"] == 0


def test_games_share_no_state_and_take_one_place_each() -> None:
    groups = play(haggling, count=3, group_size=4, max_concurrency=1)
    assert [len(group) for group in groups] == [8, 8, 8] and Haggle.closed == 12
    assert {episode.status for group in groups for episode in group} == {"done"}
    assert len({(e.group, e.member) for group in groups for e in group}) == 24


def test_a_cut_turn_forfeits_the_game_for_its_role() -> None:
    def rambling(session: int, turn: int, prompt: str) -> str:
        return "x" * 50 if "seller." in prompt else "3"

    [[buyer, seller]] = play(rambling, params=SamplingParams(max_tokens=10))
    assert (buyer.status, seller.status) == ("done", "truncated")
    assert [episode.reward and episode.reward.outcome for episode in (buyer, seller)] == [0.5, -1.0]


def test_max_turns_ends_the_game_for_both() -> None:
    [[buyer, seller]] = play(lambda *_: "4", max_turns=3)
    assert (buyer.status, len(buyer.turns)) == ("max_turns", 3)
    assert len(seller.turns) == 3
    assert [episode.reward and episode.reward.outcome for episode in (buyer, seller)] == [6.0, 4.0]


def test_a_failed_role_drops_the_other_one_too() -> None:
    class Broken(Haggle):
        def move(self, role: str, text: str) -> str | None:
            if role == "seller":
                raise RuntimeError("no such move")
            return super().move(role, text)

    [[buyer, seller]] = play(lambda *_: "4", game=Broken)
    assert (buyer.status, seller.status) == ("tool_failure", "error")
    assert "the other role, seller, failed" in (buyer.error or "") and "no such move" in (seller.error or "")
    assert buyer.reward is None and seller.reward is None and Haggle.closed == 1


def test_a_game_that_ends_before_the_second_role_moves() -> None:
    """There is nothing to train for the second role, which has no episode then."""
    reported: list[Trajectory] = []
    [[buyer]] = play(lambda *_: "deal", on_episode=reported.append)
    assert (buyer.role, buyer.status) == ("buyer", "done") and buyer.reward is not None
    assert reported == [buyer]
    assert rollout_metrics([buyer])["role/buyer/episodes"] == 1 and Haggle.closed == 1


def test_roles_may_have_tools() -> None:
    @tool
    def appraise() -> str:
        """The value of the lamp."""
        return "9"

    class Appraised(Haggle):
        def role_tools(self, role: str) -> list[Any]:
            return [appraise] if role == "seller" else []

    def say(session: int, turn: int, prompt: str) -> str:
        if "buyer." in prompt:
            return "deal" if turn else "3"
        return "9" if turn else call_text("appraise")

    [[buyer, seller]] = play(say, game=Appraised)
    assert [spec.name for spec in seller.tools] == ["appraise"] and buyer.tools == []
    assert [len(turn.tool_results) for turn in seller.turns] == [1, 0]
    assert seller.reward is not None and seller.reward.outcome == 9.0


def test_unsupported_combinations_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.branching does not apply to self-play \(Haggle\)"):
        SelfPlayRollouts(Haggle, FakeChat(), PARAMS, branching=Branching("tool_result"))

    class Alone(Haggle):
        roles = ("one",)  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"Alone\.roles must be two names"):
        SelfPlayRollouts(Alone, FakeChat(), PARAMS)
    with pytest.raises(ValueError, match=r"reward\.type=environment"):
        train(brief(tmp_path), "rewarded", environment=Haggle, reward=lambda episode: 1.0)
    with pytest.raises(ValueError, match=r"training\.branching does not apply to self-play \(Haggle\)"):
        train(brief(tmp_path, training={"branching": {"at": "tool_result"}}), "forked", environment=Haggle)
    user = {"model": "openai:x@http://127.0.0.1:9/v1", "options": {"api_key_env": None}}
    with pytest.raises(ValueError, match=r"environment\.user does not apply to self-play \(Haggle\)"):
        train(brief(tmp_path, environment={"user": user}), "user", environment=Haggle)
    assert not list(tmp_path.iterdir())  # before there is a run


class Numbers(Haggle):
    """Both roles write twice, which the warm model can; scored by the text, so that rewards differ."""

    def opening(self, role: str) -> list[Message]:
        return [
            Message("system", "Look up, then answer."),
            Message("user", "Anna?" if role == "buyer" else "Bob?"),
        ]

    def move(self, role: str, text: str) -> str | None:
        self.offers.append((role, text))
        return None if len(self.offers) == 4 else "Go on."

    def rewards(self) -> Mapping[str, float]:
        return {
            role: float(sum(len(text) for who, text in self.offers if who == role) % 3) for role in self.roles
        }


def test_a_run_trains_both_roles(tmp_path: Path) -> None:
    config = brief(
        tmp_path,
        training={"max_steps": 1, "batch_size": 1, "group_size": 3, "eval_every": 1},
        data={"count": 2, "heldout_count": 1},
        model={"name": str(WARM)},
        sampling={"max_tokens": 24, "slots": 5},
    )
    assert train(config, "run", environment=Numbers).state == "finished"
    [row] = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "episodes" in row]
    episodes = rows(tmp_path / "run" / "trajectories.jsonl")
    assert len(episodes) == row["episodes"] > 3
    for role in Numbers.roles:
        of_role = [episode for episode in episodes if episode["role"] == role]
        assert len(of_role) == row[f"role/{role}/episodes"] > 0 and row[f"role/{role}/unscored"] == 0
        outcomes = [episode["reward"]["outcome"] for episode in of_role]
        assert row[f"role/{role}/reward"] == pytest.approx(sum(outcomes) / len(outcomes))
    assert [episode["member"] for episode in episodes if episode["role"] == "buyer"] == [0, 1, 2]


COLOURS = ("red", "blue", "green", "white", "black", "brown")


class Whisper(SelfPlayEnvironment):
    """The speaker reads a colour and says it; the listener repeats what it hears. Each is rewarded for its own part."""

    roles = ("speaker", "listener")

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.said: list[str] = []

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        rng = random.Random(f"{split} {seed}")
        for number in range(count):
            yield Task(f"{split}-{number}", rng.choice(COLOURS))

    def opening(self, role: str) -> list[Message]:
        return [Message("user", f"Say {self.task.prompt}." if role == "speaker" else "Repeat:")]

    def move(self, role: str, text: str) -> str | None:
        self.said.append(text)
        return text if role == "speaker" else None

    def rewards(self) -> Mapping[str, float]:
        speaker, listener = [*self.said, "", ""][:2]
        return {"speaker": float(speaker == self.task.prompt), "listener": float(listener == speaker != "")}


def whispers(count: int, skill: float) -> Iterator[list[Message]]:
    """Yield conversations of both roles, right with probability `skill`, else with a random colour."""
    rng = random.Random(4)
    for number in range(count):
        colour = rng.choice(COLOURS)
        prompt = f"Say {colour}." if number % 2 else f"Repeat:\n\n{colour}"
        answer = colour if rng.random() < skill else rng.choice(COLOURS)
        yield [Message("user", prompt), Message("assistant", answer)]


@pytest.mark.slow
def test_one_policy_learns_both_roles(tmp_path: Path) -> None:
    model = warm_start(tmp_path, whispers(80 * 16, skill=0.4), batch_size=16, steps=80)
    report = learn(tmp_path, model, {"max_turns": 2}, 30, max_tokens=12, of_class=Whisper, batch_size=8)
    for role in Whisper.roles:
        first, *_, last = evaluations(report, f"role/{role}/reward")
        print(f"{role}: warm start {first:.2f}, trained {last:.2f}")
        assert last >= first + 0.2 and last >= 0.6, role
