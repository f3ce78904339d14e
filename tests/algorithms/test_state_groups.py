"""State groups: turns of a task that begin in the same state, by hand and in a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.algorithms.test_branching import EXACT, PLAIN, leaf, off_direction, trained
from tests.kits.rollout import Echo, rollout
from tests.kits.run import brief, train
from tests.kits.walks import by_rows, mean_of_pairs
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.types import Message, Step, Trajectory


def in_states(episode: Trajectory, *states: str | None) -> Trajectory:
    turns = [replace(turn, state=state) for turn, state in zip(episode.turns, states, strict=True)]
    return replace(episode, turns=turns)


def advantages_of(group: list[Trajectory], **options: object) -> list[list[float]]:
    rows = GRPO(**options).samples(group)  # pyright: ignore[reportArgumentType]
    return [
        [round(a, 9) for a, mask in zip(row.advantages, row.loss_mask, strict=True) if mask] for row in rows
    ]


GROUP = [
    in_states(leaf(0, 1.0, [0.5, 0.0]), "start", "door"),
    in_states(leaf(1, 0.0, [0.0, 0.0, 0.25]), "start", "door", "door"),
    in_states(leaf(2, 2.0, [0.0]), None),
]


def test_values_by_hand() -> None:
    """Returns are 1.5, 1; 0.25, 0.25, 0.25; 2. `start` has 1.5 and 0.25, `door` 1 and twice 0.25."""
    plain = advantages_of(GROUP, advantage="group")
    mixed = advantages_of(GROUP, advantage="group", state_groups=2.0)
    term = [[0.625, 0.5], [-0.625, -0.25, -0.25], [0.0]]
    for before, after, added in zip(plain, mixed, term, strict=True):
        np.testing.assert_allclose(np.array(after) - before, 2 * np.array(added), atol=1e-8)


def test_with_rloo_an_episode_is_compared_with_the_others_alone() -> None:
    plain = advantages_of(GROUP, advantage="rloo")
    mixed = advantages_of(GROUP, advantage="rloo", state_groups=1.0)
    term = [[1.25, 0.75], [-1.25, -0.75, -0.75], [0.0]]
    for before, after, added in zip(plain, mixed, term, strict=True):
        np.testing.assert_allclose(np.array(after) - before, added, atol=1e-8)


def test_a_shared_turn_of_a_tree_is_one_turn_of_its_state() -> None:
    group = [
        in_states(leaf(0, 2.0, [0.0, 0.0]), "start", "door"),
        in_states(leaf(1, 0.0, [0.0, 0.0], 0, 1), "start", "door"),
        in_states(leaf(2, 0.0, [0.0]), "start"),
    ]
    plain, mixed = (trained(GRPO(advantage="group", state_groups=w).samples(group)) for w in (0.0, 1.0))
    added = {token: mixed[token][0] - plain[token][0] for token in plain}
    assert added == pytest.approx({10: 0.5, 11: 1.0, 21: -1.0, 30: -0.5})


def test_the_term_is_a_baseline_but_weighs_shared_states_more() -> None:
    """With the names of all states, the mean of the term is the gradient of each state times the chance that the other
    episode comes there as well: not the direction of the gradient of the mean reward."""
    plain = mean_of_pairs(PLAIN, PLAIN, by_rows(GRPO(advantage="rloo")))
    np.testing.assert_allclose(plain, EXACT, atol=1e-12)
    mean = mean_of_pairs(PLAIN, PLAIN, by_rows(GRPO(advantage="rloo", state_groups=1.0)))
    print(f"\nstate_groups=1: {off_direction(mean):.1%} off the direction of the gradient")
    visits = np.zeros(len(EXACT) // 2)
    for tree in PLAIN:
        walk = tree.leaves[0].walk
        visits[[2 * n + (2 in walk[:n]) for n in range(len(walk))]] += tree.chance
    np.testing.assert_allclose(mean, EXACT * (1 + np.repeat(visits, 2)), atol=1e-12)
    assert 0.01 < off_direction(mean) < 0.5


@pytest.mark.parametrize("options", [{"scale_rewards": True}, {"advantage": "reinforce_plus_plus"}])
def test_contradicting_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"grpo\.state_groups=0\.5"):
        GRPO(state_groups=0.5, **options)  # pyright: ignore[reportArgumentType]


class Counting(Echo):
    """Is in the state of its number of replies; the first has no name."""

    count = 0

    @property
    def state(self) -> str | None:
        return f"reply {self.count}" if self.count else None

    async def step(self, message: Message) -> Step:
        self.count += 1
        return await super().step(message)


def test_turns_have_the_state_before_them() -> None:
    [[episode]] = rollout(Counting)
    assert [turn.state for turn in episode.turns] == [None, "reply 1", "reply 2"]
    [[episode]] = rollout(type("Broken", (Echo,), {"state": property(lambda self: 1 / 0)}))
    assert episode.status == "error" and "the environment's state" in (episode.error or "")
    [[episode]] = rollout(type("Other", (Echo,), {"state": {"a": 1}}))
    assert episode.status == "done" and episode.turns[0].state is None


def test_a_run_without_names_of_states_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of \d+ turns names its state.*property `state`"):
        train(brief(tmp_path, grpo={"state_groups": 0.5}), "unnamed")
