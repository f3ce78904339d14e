"""Credit of forked episodes: values by hand, and the mean of the estimator against the exact gradient, summed up over
all trees of a small environment in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.algorithms.test_bias import STATES, every_episode, exact_gradient, policy
from tests.kits.walks import (
    Leaf,
    Tree,
    Walk,
    by_rows,
    gradient,
    mean_of_pairs,
    next_turns,
    state_after,
    trees,
    walks,
)
from TrainingFactory.algorithms.advantages import compute_returns, make_reward_tables
from TrainingFactory.algorithms.branching import EpisodeTrees, TurnTable, compute_tree_advantages
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Completion, Message, Reward, Sample, Task, Trajectory, Turn

EXACT = exact_gradient(every_episode()).ravel()
PLAIN = [Tree(chance, [Leaf(walk)]) for walk, chance in walks()]


def after_first(walk: Walk) -> int:
    return 2 if len(walk) == 1 else 1


def after_second(walk: Walk) -> int:
    return 3 if len(walk) == 2 else 1


def after_both(walk: Walk) -> int:
    return 2 if len(walk) <= 2 else 1


def entropy(state: int) -> float:
    probs = policy()[state]
    return float(-(probs * np.log(probs)).sum())


def where_uncertain(walk: Walk) -> int:
    """After a turn whose distribution had a high entropy."""
    return 2 if len(walk) < 3 and entropy(state_after(walk[:-1])) > 0.6 else 1


def where_surprising(walk: Walk) -> int:
    """After a turn that was less likely than not."""
    return 2 if len(walk) == 2 and surprise(walk) > np.log(2) else 1


def surprise(walk: Walk) -> float:
    """Of the last turn."""
    return -float(np.log(dict(next_turns(walk[:-1]))[walk[-1]]))


RULES = [after_first, after_second, where_uncertain, where_surprising]


def test_all_trees_are_listed() -> None:
    for rule in (*RULES, after_both):
        listed = trees(rule)
        assert sum(tree.chance for tree in listed) == pytest.approx(1, abs=1e-12)
        assert {len(tree.leaves) for tree in listed} > {1}


@pytest.mark.parametrize("rule", RULES)
def test_fixed_and_online_forks_are_unbiased(rule: Any) -> None:
    """One member forks, another does not: the baselines have different numbers of leaves."""
    mean = mean_of_pairs(trees(rule), PLAIN, by_rows(GRPO(advantage="rloo")))
    np.testing.assert_allclose(mean, EXACT, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["turn", "trajectory"])
def test_forks_below_forks_are_unbiased(credit: Any) -> None:
    mean = mean_of_pairs(trees(after_both), PLAIN, by_rows(GRPO(advantage="rloo", credit=credit)))
    np.testing.assert_allclose(mean, EXACT, atol=1e-12)


@pytest.mark.slow
def test_the_group_baseline_shrinks_all_segments_alike() -> None:
    both = trees(after_first)
    mean = mean_of_pairs(both, both, by_rows(GRPO(advantage="group", credit="trajectory")))
    np.testing.assert_allclose(mean, EXACT / 2, atol=1e-12)


def test_a_budget_that_other_episodes_use_up_is_unbiased() -> None:
    """The second member forks only if the first did not, which depends on what the first one sampled."""
    estimate, mean = by_rows(GRPO(advantage="rloo")), np.zeros(2 * STATES)
    second = trees(where_surprising)
    for one in PLAIN_OR_FORKED:
        others = second if len(one.leaves) == 1 else PLAIN
        mean += one.chance * mean_of_pairs([Tree(1.0, one.leaves)], others, estimate)
    np.testing.assert_allclose(mean, EXACT, atol=1e-12)


PLAIN_OR_FORKED = trees(lambda walk: 2 if len(walk) == 1 and surprise(walk) > 1.0 else 1)


@pytest.mark.parametrize("unscored", [0, 1])
def test_unscored_leaves_leave_it_unbiased(unscored: int) -> None:
    """A leaf fails for reasons of its own: the root, from which the other one was forked, or the other one."""
    estimate = by_rows(GRPO(advantage="rloo"))

    def without(group: list[Trajectory]) -> np.ndarray:
        if group[1].parent is not None:
            group[unscored] = replace(group[unscored], reward=None)
        return estimate(group)

    # All orders of continuations are equally likely, so either of two different ones may be the root.
    ordered = [
        Tree(tree.chance / 2, leaves)
        for tree in trees(after_first)
        for leaves in (tree.leaves, swapped(tree.leaves))
    ]
    np.testing.assert_allclose(mean_of_pairs(ordered, PLAIN, without), EXACT, atol=1e-12)


def swapped(leaves: list[Leaf]) -> list[Leaf]:
    if len(leaves) == 1:
        return leaves
    return [Leaf(leaves[1].walk), Leaf(leaves[0].walk, 0, leaves[1].fork_turn)]


# What is biased


def chosen_afterwards(measure: Callable[[Walk], float]) -> list[Tree]:
    """Trees of finished episodes, forked once after the turn, but the last, where the measure was highest."""
    listed = []
    for walk, chance in walks():
        if len(walk) == 1:
            listed.append(Tree(chance, [Leaf(walk)]))
            continue
        turn = max(range(1, len(walk)), key=lambda turn: measure(walk[:turn]))
        for other, probability in walks(walk[:turn]):
            listed.append(Tree(chance * probability, [Leaf(walk), Leaf(other, 0, turn)]))
    return listed


def off_direction(mean: np.ndarray) -> float:
    """The distance from the closest multiple of the exact gradient, relative to the mean's length."""
    along = mean @ EXACT / (EXACT @ EXACT) * EXACT
    return float(np.linalg.norm(mean - along) / np.linalg.norm(mean))


def test_forks_chosen_in_finished_episodes_are_biased() -> None:
    """The turns after the fork decided that there is a fork, so that the first continuation is not like the others."""
    listed = chosen_afterwards(lambda walk: entropy(state_after(walk[:-1])))
    mean = mean_of_pairs(listed, PLAIN, by_rows(GRPO(advantage="rloo")))
    bias = float(np.linalg.norm(mean - EXACT) / np.linalg.norm(EXACT))
    print(f"\nfork at the highest entropy of the finished episode: bias {bias:.1%} of the gradient's length")
    assert bias > 0.05


def leaves_as_episodes(group: list[Trajectory]) -> np.ndarray:
    """Every leaf as an episode of its own: its shared turns are trained with it."""
    plain = [replace(leaf, parent=None, fork_turn=0) for leaf in group]
    return gradient(GRPO(advantage="rloo").samples(plain), len(plain))


def shared_turns_repeated(group: list[Trajectory]) -> np.ndarray:
    """The right advantages, with every row of a tree trained in full."""
    table, total = credit_of(group), np.zeros(2 * STATES)
    for leaf, trajectory in enumerate(group):
        values = []
        for number in range(len(trajectory.turns)):
            shares = [
                other
                for other, episode in enumerate(group)
                if table.weights[other, number]
                and episode.turns[: number + 1] == trajectory.turns[: number + 1]
                and table.roots[other] == table.roots[leaf]
            ]
            owner = leaf if leaf in shares else shares[0]
            values.append(float(table.advantages[owner, number]))
        total += gradient(to_samples(trajectory, values), len(group))
    return total


def baseline_over_leaves(group: list[Trajectory]) -> np.ndarray:
    """The right values and weights, less the mean of all leaves but the one that trains the turn."""
    table = credit_of(group)
    returns = compute_returns(*make_reward_tables(group), "turn")
    others = (returns.sum(0) - returns) / (len(group) - 1)
    total = np.zeros(2 * STATES)
    for leaf, trajectory in enumerate(group):
        count = len(trajectory.turns)
        values = (table.values - others)[leaf, :count].tolist()
        weights = table.weights[leaf, :count].tolist()
        total += gradient(to_samples(trajectory, values, weights=weights), len(set(table.roots)))
    return total


def credit_of(group: list[Trajectory]) -> TurnTable:
    returns = compute_returns(*make_reward_tables(group), "turn")
    return compute_tree_advantages(EpisodeTrees(group, group), returns, np.ones(returns.shape, bool), "rloo")


@pytest.mark.parametrize("estimator", [leaves_as_episodes, shared_turns_repeated, baseline_over_leaves])
def test_wrong_estimators_are_rejected(estimator: Any) -> None:
    mean = mean_of_pairs(trees(after_first), PLAIN, estimator)
    print(f"\n{estimator.__name__}: {off_direction(mean):.1%} off the direction of the gradient")
    assert off_direction(mean) > 0.02


# Values by hand


def leaf(
    member: int, outcome: float | None, steps: list[float], parent: int | None = None, fork_turn: int = 0
) -> Trajectory:
    """An episode of one token a turn: 10 times the member that sampled it plus the turn; replies are 0."""
    turns, ids = [], [1]
    for number in range(len(steps)):
        origin = parent if parent is not None and number < fork_turn else member
        token = 10 * (origin + 1) + number
        turns.append(Turn(list(ids), Completion([token], [-0.5], "stop"), Message("assistant", "")))
        ids += [token, 0]
    reward = None if outcome is None else Reward(outcome, steps)
    return Trajectory(
        Task("t", "?"), "g", member, turns=turns, reward=reward, parent=parent, fork_turn=fork_turn
    )


def trained(rows: list[Sample]) -> dict[int, tuple[float, float]]:
    """Advantage and weight of each trained token."""
    values: dict[int, tuple[float, float]] = {}
    for row in rows:
        assert row.weights is not None
        for token, mask, *pair in zip(row.token_ids, row.loss_mask, row.advantages, row.weights, strict=True):
            if mask:
                assert token not in values, "a sampled token is trained once"
                values[token] = (pair[0], pair[1])
    return values


def three_leaves() -> list[Trajectory]:
    """Member 0 is forked after its first turn into 0, 1 and 2, and 1 again after its second turn into 1 and 3; member 4
    is alone."""
    return [
        leaf(0, 1.0, [0.5, 0.0]),
        leaf(1, 0.0, [0.5, 0.2, 0.0], 0, 1),
        leaf(2, 4.0, [0.5, 0.0], 0, 1),
        replace(leaf(3, 1.0, [0.5, 0.2, 0.4], 1, 2), turns=[]),
        leaf(4, 2.0, [1.0]),
    ]


def test_values_by_hand() -> None:
    group = three_leaves()
    third = leaf(3, 1.0, [0.5, 0.2, 0.4])
    group[3].turns = [*group[1].turns[:2], third.turns[2]]
    rows = GRPO(advantage="rloo").samples(group)
    # From turn 1 on, leaf 1 has 0.2 and leaf 3 has 1 + 0.2 + 0.4: their mean is 0.9. With turn 0: 0.5 more.
    tree = (1.5 + 1.4 + 4.5) / 3
    assert trained(rows) == {
        10: pytest.approx((tree - 3.0, 1.0)),
        11: pytest.approx((1.0 - (0.9 + 4.0) / 2, 1 / 3)),
        21: pytest.approx((0.9 - (1.0 + 4.0) / 2, 1 / 3)),
        22: pytest.approx((0.0 - 1.4, 1 / 6)),
        31: pytest.approx((4.0 - (1.0 + 0.9) / 2, 1 / 3)),
        42: pytest.approx((1.4 - 0.0, 1 / 6)),
        50: pytest.approx((3.0 - tree, 1.0)),
    }
    assert len({row.episode for row in rows}) == len({row.pair for row in rows}) == 2
    halved = trained(GRPO(advantage="group").samples(group))
    for token, (advantage, weight) in trained(rows).items():
        assert halved[token] == pytest.approx((advantage / 2, weight))


def test_a_fork_with_one_scored_continuation_is_no_fork() -> None:
    """Member 0, from which 1 was forked, has no reward: the shared turn is trained with 1, against the other tree."""
    group = [leaf(0, None, [0.0, 0.0]), leaf(1, 1.0, [0.0, 0.0], 0, 1), leaf(2, 0.0, [0.0])]
    assert trained(GRPO(advantage="rloo").samples(group)) == {10: (1.0, 1.0), 21: (1.0, 1.0), 30: (-1.0, 1.0)}


def test_one_scored_tree_gives_no_rows() -> None:
    group = [leaf(0, 1.0, [0.0, 0.0]), leaf(1, 0.0, [0.0, 0.0], 0, 1), leaf(2, None, [0.0])]
    assert GRPO(advantage="rloo").samples(group) == []


def test_equal_values_give_no_rows_and_forks_alone_can_differ() -> None:
    equal = [leaf(0, 1.0, [0.0, 0.0]), leaf(1, 1.0, [0.0, 0.0], 0, 1), leaf(2, 1.0, [0.0])]
    assert GRPO().samples(equal) == []
    differ = [leaf(0, 2.0, [0.0, 0.0]), leaf(1, 0.0, [0.0, 0.0], 0, 1), leaf(2, 1.0, [0.0])]
    values = trained(GRPO(advantage="rloo").samples(differ))
    assert values == {10: (0.0, 1.0), 11: (2.0, 0.5), 21: (-2.0, 0.5), 30: (0.0, 1.0)}


def test_a_masked_leaf_leaves_shared_turns_to_the_others() -> None:
    group = [leaf(0, 2.0, [0.0, 0.0]), leaf(1, 0.0, [0.0, 0.0], 0, 1), leaf(2, 0.0, [0.0])]
    group[0] = replace(group[0], status="truncated")
    values = trained(GRPO(advantage="rloo", train_truncated=False).samples(group))
    assert values == {10: (1.0, 1.0), 21: (-2.0, 0.5), 30: (-1.0, 1.0)}


def test_a_folded_leaf_has_several_rows_of_one_episode() -> None:
    group = [leaf(0, 2.0, [0.0, 0.0]), leaf(1, 0.0, [0.0, 0.0, 0.0], 0, 1), leaf(2, 1.0, [0.0])]
    group[1].turns[2] = replace(group[1].turns[2], prompt_ids=[1, 7], fold="summary")
    rows = GRPO(advantage="rloo").samples(group)
    assert [row.token_ids for row in rows][1:3] == [[1, 10, 0, 21], [1, 7, 22]]
    assert len({row.episode for row in rows}) == 2 and len(rows) == 4
    assert trained(rows)[22] == (-2.0, 0.5)


def test_a_missing_parent_is_an_error() -> None:
    group = [leaf(1, 1.0, [0.0, 0.0], 0, 1), leaf(2, 0.0, [0.0])]
    with pytest.raises(ValueError, match="forked from episode 0, which is missing"):
        GRPO().samples(group)
