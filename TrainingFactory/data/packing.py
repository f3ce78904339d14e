"""Pack training rows as prefix trees, in which what rows have in common at their beginning is computed once. The only
place that shifts: a trained token is predicted by the output at the token before it. In a pack, of at most
`token_budget` tokens unless an episode or pair has more, a node holds a run of tokens; a row is a path from the top.

        row 0  P P P a a      nodes   0: P P P            flat  P P P a a b b b
        row 1  P P P b b b            1: a a   (parent 0)
                                      2: b b b (parent 0)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np

from TrainingFactory.data.samples import mismatched as mismatched_rows
from TrainingFactory.types import Sample

MIN_SAVING = 24  # tokens that a node must save; below that one more level costs more than it gives
MAX_LEVELS = 6
COPY_SHARE = 16  # a beginning of many rows is there again if that costs 1 token in so many, no more


@dataclass(slots=True)
class Node:
    start: int  # of its tokens in the flat tree
    length: int
    depth: int  # position of its first token in a row
    parent: int  # number of the node above, -1 for none
    level: int  # how many nodes are above


@dataclass(slots=True)
class Pack:
    """Holds N tokens of a tree, the M trained tokens of its rows (row by row, in order), and their E episodes."""

    token_ids: np.ndarray  # [N]
    positions: np.ndarray  # [N] position within a row
    nodes: list[Node]  # parents before children; their tokens follow each other in the flat tree
    rows: np.ndarray  # which of the samples are in this pack
    source: np.ndarray  # [M] flat index of the token whose output predicts the trained one
    place: np.ndarray  # [M] flat index of the trained token itself
    target: np.ndarray  # [M] the trained token
    row: np.ndarray  # [M] the sample it belongs to
    episode: np.ndarray  # [M] the episode it belongs to, counted within the pack
    labels: np.ndarray  # [E]
    pairs: np.ndarray  # [P, 2] episodes that are compared: the better one, the worse one
    logprobs: np.ndarray  # [M] the sampler's
    advantages: np.ndarray  # [M]
    rewards: np.ndarray  # [M]
    versions: np.ndarray  # [M] of the weights that sampled it
    row_tokens: int  # tokens of the rows without sharing
    # What `Learner.annotate` adds where an objective needs it, and what `Algorithm.prepare` makes of it. [M] each
    reference: np.ndarray | None = None  # log-probs of the reference model
    old: np.ndarray | None = None  # log-probs of the model before the step, by the learner
    values: np.ndarray | None = None  # what the critic expected before the step
    returns: np.ndarray | None = None  # what the critic should have expected


def pack(
    samples: Sequence[Sample], token_budget: int = 16_384, sharing: bool = True, below: int = 0
) -> list[Pack]:
    """Pack the rows; without `sharing` each has a node of its own, and the budget counts them as if padded. A tree has
    about `below` tokens under its top if that is not 0."""
    for number, sample in enumerate(samples):
        if sample.loss_mask and sample.loss_mask[0]:
            raise ValueError(f"row {number} trains its first token, which nothing comes before")
    ids = [np.asarray(sample.token_ids, np.int64) for sample in samples]
    packs: list[Pack] = []
    batch: list[list[int]] = []
    size = widest = rows = 0
    for unit in _units(samples, ids, sharing):
        longest = max(len(ids[number]) for number in unit)
        if sharing:
            own = _tree_size(ids, unit)
            together = size + own - (shared_prefix(ids[batch[-1][-1]], ids[unit[0]]) if batch else 0)
        else:
            own = longest * len(unit)
            together = max(widest, longest) * (rows + len(unit))
        if batch and together > token_budget:
            packs += _packs(samples, ids, batch, token_budget, sharing, below)
            batch, together, widest, rows = [], own, 0, 0
        batch.append(unit)
        size, widest, rows = together, max(widest, longest), rows + len(unit)
    return packs + _packs(samples, ids, batch, token_budget, sharing, below) if batch else packs


def _units(samples: Sequence[Sample], ids: list[np.ndarray], sharing: bool) -> list[list[int]]:
    """Return the numbers of the rows that stay together, in the order in which they are packed."""

    # Without sharing, rows of like length side by side need little padding.
    def key(number: int) -> Any:
        return samples[number].token_ids if sharing else (len(ids[number]), samples[number].token_ids)

    found: dict[int, list[int]] = {}
    for number in sorted((n for n, sample in enumerate(samples) if any(sample.loss_mask)), key=key):
        found.setdefault(samples[number].pair, []).append(number)
    return list(found.values())


def _tree_size(ids: list[np.ndarray], rows: list[int]) -> int:
    """Count the tokens of a tree over sorted rows that had a node for every saving."""
    common = sum(shared_prefix(ids[left], ids[right]) for left, right in pairwise(rows))
    return sum(len(ids[row]) for row in rows) - common


def shared_prefix(left: np.ndarray, right: np.ndarray) -> int:
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


class _Tree:
    """Builds the nodes over sorted rows; `shared[i]` is what row i has in common with row i - 1."""

    def __init__(self, ids: list[np.ndarray], shared: list[int]) -> None:
        self.ids, self.shared = ids, shared
        self.nodes: list[Node] = []
        self.tokens: list[np.ndarray] = []
        self.paths: list[list[int]] = [[] for _ in ids]
        self.size = 0
        self.grow(0, len(ids), 0, -1)

    def grow(self, first: int, last: int, depth: int, parent: int) -> None:
        """Add nodes for rows first..last-1, whose first `depth` tokens are in the nodes above."""
        level = self.nodes[parent].level + 1 if parent >= 0 else 0
        if last - first == 1:
            self._node(first, last, depth, len(self.ids[first]), parent, level)
            return
        common = min(self.shared[first + 1 : last])
        if (common - depth) * (last - first - 1) >= MIN_SAVING and level < MAX_LEVELS - 1:
            parent = self._node(first, last, depth, common, parent, level)
            depth = common
        elif level == MAX_LEVELS - 1 or all(s == common for s in self.shared[first + 1 : last]):
            for row in range(first, last):
                self.grow(row, row + 1, depth, parent)
            return
        borders = [first, *(n for n in range(first + 1, last) if self.shared[n] == common), last]
        for start, end in pairwise(borders):
            self.grow(start, end, depth, parent)

    def _node(self, first: int, last: int, depth: int, end: int, parent: int, level: int) -> int:
        if end == depth:  # the row ends where the node above ends
            return parent
        self.nodes.append(Node(self.size, end - depth, depth, parent, level))
        self.tokens.append(self.ids[first][depth:end])
        self.size += end - depth
        for row in range(first, last):
            self.paths[row].append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def places(self, row: int) -> np.ndarray:
        """Return the flat index of each token of a row."""
        nodes = (self.nodes[number] for number in self.paths[row])
        return np.concatenate([np.arange(node.start, node.start + node.length) for node in nodes])


def _packs(
    samples: Sequence[Sample],
    ids: list[np.ndarray],
    units: list[list[int]],
    budget: int,
    sharing: bool,
    below: int,
) -> list[Pack]:
    """Make one pack, or several where the tree is larger than was counted on: it has no node for small savings."""
    rows = [number for unit in units for number in unit]
    if sharing:
        rows.sort(key=lambda number: samples[number].token_ids)
    shared = [0, *(shared_prefix(ids[left], ids[right]) if sharing else 0 for left, right in pairwise(rows))]
    tree = _Tree([ids[number] for number in rows], _parted([len(ids[row]) for row in rows], shared, below))
    half = len(units) // 2
    if half and tree.size > budget:
        parts = (_packs(samples, ids, part, budget, sharing, below) for part in (units[:half], units[half:]))
        return [*chain.from_iterable(parts)]
    return [_pack(samples, ids, rows, tree)]


def _parted(lengths: list[int], shared: list[int], below: int) -> list[int]:
    """Return `shared` with a 0 where another tree begins: at a row that shares no more than all before it did."""
    parted, size, least = list(shared), lengths[0], lengths[0]
    for row in range(1, len(shared)) if below else ():
        least = min(least, shared[row])
        if shared[row] == least and size > max(below, COPY_SHARE * shared[row]):
            parted[row], size, least = 0, 0, lengths[row]
        size += lengths[row] - parted[row]
    return parted


def _pack(samples: Sequence[Sample], ids: list[np.ndarray], batch: list[int], tree: _Tree) -> Pack:
    rows = [samples[number] for number in batch]
    trained = [np.flatnonzero(sample.loss_mask) for sample in rows]
    sizes = [len(at) for at in trained]
    places = [tree.places(index) for index in range(len(batch))]
    first: dict[int, Sample] = {}  # row of each episode, in the order of the pack
    for sample in rows:
        first.setdefault(sample.episode, sample)
    order = {episode: number for number, episode in enumerate(first)}

    def of(values: Iterable[Any], kind: Any, shift: int = 0) -> np.ndarray:
        """Return what each row has at its trained tokens, or so many before them."""
        pairs = zip(values, trained, strict=True)
        return np.concatenate([np.asarray(value, kind)[at - shift] for value, at in pairs])

    known = [sample.reference for sample in rows]
    return Pack(
        token_ids=np.concatenate(tree.tokens),
        positions=np.concatenate([np.arange(node.depth, node.depth + node.length) for node in tree.nodes]),
        nodes=tree.nodes,
        rows=np.array(batch),
        source=of(places, np.int64, shift=1),
        place=of(places, np.int64),
        target=of((ids[number] for number in batch), np.int64),
        row=np.repeat(batch, sizes),
        episode=np.repeat([order[sample.episode] for sample in rows], sizes),
        labels=np.array([sample.label for sample in first.values()], np.float32),
        pairs=_pairs(first.values(), order),
        logprobs=of((sample.logprobs for sample in rows), np.float32),
        advantages=of((sample.advantages for sample in rows), np.float32),
        rewards=of((sample.rewards for sample in rows), np.float32),
        versions=of((sample.policy_version for sample in rows), np.int64),
        row_tokens=sum(len(sample.token_ids) for sample in rows),
        reference=of(known, np.float32) if all(values is not None for values in known) else None,
    )


def _pairs(episodes: Iterable[Sample], order: dict[int, int]) -> np.ndarray:
    """Return [P, 2]: of every two episodes that belong together, the one with the higher label and the other."""
    found: dict[int, list[Sample]] = {}
    for sample in episodes:
        found.setdefault(sample.pair, []).append(sample)
    pairs = [sorted(members, key=lambda each: -each.label) for members in found.values() if len(members) == 2]
    numbers = [[order[sample.episode] for sample in pair] for pair in pairs]
    return np.array(numbers, np.int64).reshape(-1, 2)


@dataclass(slots=True)
class Batch:
    """Holds all that one update is made from; counts are over the whole step, whatever the packs."""

    packs: list[Pack]
    rows: int  # training rows
    tokens: int  # trained tokens
    episodes: int
    pairs: int
    baseline: float = 0.0  # what `prepare` found for the step as a whole
    values_only: bool = False  # the critic learns, the policy stays as it is
    mismatched: list[Pack] = field(default_factory=list)  # answers after other prompts, never trained


def make_batch(
    samples: Sequence[Sample], token_budget: int = 16_384, sharing: bool = True, mismatched: bool = False,
    below: int = 0,
) -> Batch:  # fmt: skip
    """Pack the rows of a step; `sharing` and `below` as the learner has them."""
    packs = pack(samples, token_budget, sharing, below)
    return Batch(
        packs,
        sum(len(p.rows) for p in packs),
        sum(len(p.target) for p in packs),
        sum(len(p.labels) for p in packs),
        sum(len(p.pairs) for p in packs),
        mismatched=pack(mismatched_rows(samples), token_budget, sharing, below) if mismatched else [],
    )
