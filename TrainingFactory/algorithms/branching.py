"""Critic-free credit of forked episodes. The episodes of a task form trees: at a fork after a turn, k continuations of
the same conversation are sampled. Every turn belongs to one segment: the turns between two forks, or to an end.

    R[i, t]  return of leaf i from turn t on (`advantages.py`)
    V[s, t]  value of segment s: R[i, t] if it ends in leaf i, else the mean of V[c, t] over the k segments c at its end
    A[s, t]  = V[s, t] - mean of V[c, t] over the other segments c that begin where s begins
    w[s]     = product of 1 / k over the forks above s; 1 for the first segment of a tree

The segments that begin a tree are compared with those of the task's other trees. Each turn is trained once, with weight
w, and a tree counts as one episode. docs/algorithms/branching.md derives that the gradient is unbiased if the decision
to fork after a turn depends on nothing that the episode samples later.

Only scored leaves count: k is the number of continuations with a scored leaf, and a fork with a single one is no fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from TrainingFactory.algorithms.advantages import REWARD_TOLERANCE, Baseline
from TrainingFactory.types import Trajectory


@dataclass(slots=True, frozen=True)
class TurnTable:
    """Values, advantages and weights of the turns of n leaves. Entries after a leaf's last turn are zero. A turn shared
    by several leaves has nonzero entries at one of them only."""

    roots: list[int]  # [n] member that is the root of the leaf's tree
    weights: np.ndarray  # [n, T]
    values: np.ndarray  # [n, T]
    advantages: np.ndarray  # [n, T]


def has_forks(group: Sequence[Trajectory]) -> bool:
    return any(trajectory.parent is not None for trajectory in group)


class EpisodeTrees:
    """The trees whose leaves are the scored episodes of a group. Episodes fork from episodes that may be unscored, so
    `group` includes these."""

    def __init__(self, group: Sequence[Trajectory], leaves: Sequence[Trajectory]) -> None:
        self._members = {trajectory.member: trajectory for trajectory in group}
        self._leaves = leaves
        self._origins = [self._find_turn_origins(leaf) for leaf in leaves]
        self.roots = [origins[0] for origins in self._origins]

    def _find_turn_origins(self, leaf: Trajectory) -> list[int]:
        """Return the member number of the episode that sampled each turn, then the leaf's own member number."""
        origins = [leaf.member] * (len(leaf.turns) + 1)
        trajectory, end_turn = leaf, len(leaf.turns)
        while trajectory.parent is not None:
            # An episode can fork at the turn at which it was forked itself; earlier turns are the grandparent's.
            end_turn = min(end_turn, trajectory.fork_turn)
            if trajectory.parent not in self._members:
                raise ValueError(
                    f"Episode {trajectory.member} of group {trajectory.group} was forked from episode "
                    f"{trajectory.parent}, which is missing. Keep all episodes of a group together"
                )
            trajectory = self._members[trajectory.parent]
            origins[:end_turn] = [trajectory.member] * end_turn
        return origins

    def split_leaves(self, leaves: Sequence[int], turn: int) -> list[list[int]]:
        """Split leaves that share all turns before `turn` into groups of leaves that share this turn as well."""
        branches: dict[int, list[int]] = {}
        for leaf in leaves:
            origins = self._origins[leaf]
            branches.setdefault(origins[min(turn, len(origins) - 1)], []).append(leaf)
        return list(branches.values())

    def find_next_fork(self, leaves: Sequence[int], turn: int) -> int:
        """Return the first turn from `turn` on that the leaves do not share. For a single leaf, return its number of
        turns."""
        if len(leaves) == 1:
            return len(self._leaves[leaves[0]].turns)
        while len(self.split_leaves(leaves, turn)) == 1:
            turn += 1
        return turn

    def compute_value(self, leaves: Sequence[int], turn: int, returns: np.ndarray) -> np.ndarray:
        """Return the value V of the segment at `turn` that leads to these leaves. [n, T] -> [T]"""
        if len(leaves) == 1:
            return returns[leaves[0]]
        fork_turn = self.find_next_fork(leaves, turn)
        branches = self.split_leaves(leaves, fork_turn)
        return np.mean([self.compute_value(branch, fork_turn, returns) for branch in branches], axis=0)


def compute_tree_advantages(
    trees: EpisodeTrees, returns: np.ndarray, is_trained: np.ndarray, baseline: Baseline, scale: bool = False
) -> TurnTable:
    """Return the values, advantages and weights of all turns. `returns` [n, T] has a row per leaf; `is_trained` [n, T]
    marks trainable turns. A shared turn belongs to the first leaf that may train it. `scale` divides by the standard
    deviation of the leaves' total returns, weighted like the leaves."""
    shape = returns.shape
    turn_table = TurnTable(trees.roots, np.zeros(shape), np.zeros(shape), np.zeros(shape))
    leaf_weights = np.ones(len(trees.roots))

    def fill_segment(leaves: list[int], turn: int, weight: float, sibling_mean: np.ndarray) -> None:
        fork_turn = trees.find_next_fork(leaves, turn)
        segment_values = trees.compute_value(leaves, turn, returns)
        for t in range(turn, fork_turn):
            leaf = next((leaf for leaf in leaves if is_trained[leaf, t]), leaves[0])
            turn_table.weights[leaf, t] = weight
            turn_table.values[leaf, t] = segment_values[t]
            turn_table.advantages[leaf, t] = segment_values[t] - sibling_mean[t]
        if len(leaves) == 1:
            leaf_weights[leaves[0]] = weight
        else:
            fill_branches(trees.split_leaves(leaves, fork_turn), fork_turn, weight)

    def fill_branches(branches: list[list[int]], turn: int, weight: float) -> None:
        branch_values = np.array([trees.compute_value(branch, turn, returns) for branch in branches])
        sibling_means = (branch_values.sum(0) - branch_values) / max(len(branches) - 1, 1)
        for branch, sibling_mean in zip(
            branches, np.zeros_like(branch_values) if baseline == "none" else sibling_means, strict=True
        ):
            fill_segment(branch, turn, weight if turn == 0 else weight / len(branches), sibling_mean)

    root_branches = trees.split_leaves(range(len(trees.roots)), 0)
    fill_branches(root_branches, 0, 1.0)
    if baseline == "none":
        return turn_table
    turn_table.advantages[np.abs(turn_table.advantages) <= REWARD_TOLERANCE * np.abs(returns).max()] = 0.0
    if baseline == "group":  # one factor for all forks, as without them: the direction stays that of `rloo`
        turn_table.advantages[:] *= (len(root_branches) - 1) / len(root_branches)
    if scale:
        mean_return = np.average(returns[:, 0], weights=leaf_weights)
        variance = leaf_weights @ (returns[:, 0] - mean_return) ** 2 / max(len(root_branches) - 1, 1)
        turn_table.advantages[:] /= np.sqrt(variance) if variance else np.inf
    return turn_table
