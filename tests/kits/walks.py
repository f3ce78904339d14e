"""All episodes, and all trees of forked episodes, of the small environment of `tests/algorithms/test_bias.py`, with
their probabilities: the mean of an estimator is summed up, not sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement
from math import factorial, prod
from typing import NamedTuple

import numpy as np

from tests.algorithms.test_bias import CALL, CHANCE, FOUND, MISSED, STATES, STOP, STOPPED, TURNS, paid, policy
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.types import Completion, Message, Sample, Task, Trajectory, Turn

Walk = tuple[int, ...]  # how each turn went
Rule = Callable[[Walk], int]  # continuations after these turns
FIRST = 99  # the token of the prompt; replies are 50 and up, actions below


class Leaf(NamedTuple):
    walk: Walk
    parent: int | None = None  # index in the tree
    fork_turn: int = 0


class Tree(NamedTuple):
    chance: float
    leaves: list[Leaf]  # the first one is the root


def state_after(walk: Walk) -> int:
    return len(walk) * 2 + (FOUND in walk)


def is_over(walk: Walk) -> bool:
    return len(walk) == TURNS or (bool(walk) and walk[-1] == STOPPED)


def next_turns(walk: Walk) -> Iterator[tuple[int, float]]:
    """How the next turn can go, and how likely that is."""
    call, stop = policy()[state_after(walk)]
    hit = CHANCE if FOUND not in walk and len(walk) < TURNS - 1 else 0.0
    for how, chance in ((STOPPED, stop), (FOUND, call * hit), (MISSED, call * (1 - hit))):
        if chance:
            yield how, float(chance)


@cache
def walks(begin: Walk = ()) -> list[tuple[Walk, float]]:
    """All episodes that begin like this, with their probabilities given the beginning."""
    if is_over(begin):
        return [(begin, 1.0)]
    return [(walk, chance * rest) for how, chance in next_turns(begin) for walk, rest in walks((*begin, how))]


def trees(rule: Rule, begin: Walk = ()) -> list[Tree]:
    """All trees in which `rule` forks, up to the order of the continuations at a fork."""
    listed = []
    for how, chance in next_turns(begin):
        walk = (*begin, how)
        if is_over(walk):
            listed.append(Tree(chance, [Leaf(walk)]))
            continue
        size = rule(walk)
        parts = trees(rule, walk)
        for chosen in combinations_with_replacement(range(len(parts)), size):
            orders = factorial(size) // prod(factorial(chosen.count(part)) for part in set(chosen))
            probability = chance * orders * prod(parts[part].chance for part in chosen)
            listed.append(Tree(probability, joined([parts[part].leaves for part in chosen], len(walk))))
    return listed


def joined(parts: Sequence[list[Leaf]], fork_turn: int) -> list[Leaf]:
    """The leaves of a fork: the first part goes on as its root, the others are forked from it."""
    leaves = list(parts[0])
    for part in parts[1:]:
        first = len(leaves)
        leaves.append(Leaf(part[0].walk, 0, fork_turn))
        leaves += [Leaf(leaf.walk, (leaf.parent or 0) + first, leaf.fork_turn) for leaf in part[1:]]
    return leaves


@cache
def episode(walk: Walk) -> Trajectory:
    """The episode, with one token for each turn: twice the state plus the action."""
    ids, turns = [FIRST], []
    for number, how in enumerate(walk):
        state = state_after(walk[:number])
        token = state * 2 + (STOP if how == STOPPED else CALL)
        message = Message("assistant", "")
        turns.append(Turn(list(ids), Completion([token], [0.0], "stop"), message, state=str(state)))
        ids += [token, 50 + how]
    return Trajectory(Task("t", "?"), "g", turns=turns, reward=paid(walk))


def group_of(*members: Iterable[Leaf]) -> list[Trajectory]:
    group: list[Trajectory] = []
    for leaves in members:
        first = len(group)
        for leaf in leaves:
            parent = None if leaf.parent is None else leaf.parent + first
            group.append(
                replace(episode(leaf.walk), member=len(group), parent=parent, fork_turn=leaf.fork_turn)
            )
    return group


def gradient(rows: Sequence[Sample], episodes: int) -> np.ndarray:
    """The gradient of a group that its rows stand for, with the loss of an episode as the sum over its tokens."""
    credit = np.zeros(STATES * 2)
    for row in rows:
        weights = row.weights or [1.0] * len(row.token_ids)
        for token, mask, advantage, weight in zip(
            row.token_ids, row.loss_mask, row.advantages, weights, strict=True
        ):
            if mask:
                credit[token] += weight * advantage
    by_state = credit.reshape(STATES, 2)
    return (by_state - policy() * by_state.sum(1, keepdims=True)).ravel() / episodes


Estimator = Callable[[list[Trajectory]], np.ndarray]


def by_rows(grpo: GRPO) -> Estimator:
    """What the rows of a run stand for: an episode is a tree."""

    def estimate(group: list[Trajectory]) -> np.ndarray:
        rows = grpo.samples(group)
        return gradient(rows, len({row.episode for row in rows}) or 1)

    return estimate


def mean_of_pairs(first: Sequence[Tree], second: Sequence[Tree], estimator: Estimator) -> np.ndarray:
    """The mean over all groups of two trees."""
    return sum(
        (one.chance * other.chance * estimator(group_of(one.leaves, other.leaves)))
        for one in first
        for other in second
    )  # pyright: ignore[reportReturnType]
