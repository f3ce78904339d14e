"""Packing of training rows into prefix trees, so that a common prefix is computed once. No other module shifts targets:
the output at a token predicts the next token. A pack has at most `token_budget` tokens, unless one row, or an episode
or pair that must not be split, has more. A node holds consecutive tokens; a row is a path from the root.

        row 0  P P P a a      nodes   0: P P P            flat  P P P a a b b b
        row 1  P P P b b b            1: a a   (parent 0)
                                      2: b b b (parent 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np

from TrainingFactory.common.image_tokens import renumber_images
from TrainingFactory.data.samples import find_mismatched_samples as find_mismatched
from TrainingFactory.types import Sample

MIN_SAVED_TOKENS = 24  # tokens that a node must save; below that, another level costs more than it saves
MAX_LEVELS = 6
COPY_SHARE = 16  # a common prefix may be repeated in another tree if that adds at most 1 token in COPY_SHARE
SortKeys = list[list[int]]  # sort the rows in the same order in every process


@dataclass(slots=True)
class TreeNode:
    start: int  # index of its first token in the flat tree
    length: int
    depth: int  # position of its first token in a row
    parent: int  # index of the parent node, -1 for a root
    level: int  # number of ancestors
    num_rows: int = 1  # rows that contain it


@dataclass(slots=True)
class Pack:
    """N tokens of a tree, the M trained tokens of its rows (row by row, in order), and their E episodes."""

    token_ids: np.ndarray  # [N]
    positions: np.ndarray  # [N] position within a row
    nodes: list[TreeNode]  # parents before children; their tokens are adjacent in the flat tree
    rows: np.ndarray  # indices of the samples in this pack
    source: np.ndarray  # [M] flat index of the token whose output predicts the trained one
    place: np.ndarray  # [M] flat index of the trained token itself
    target: np.ndarray  # [M] id of the trained token
    row: np.ndarray  # [M] index of its sample
    episode: np.ndarray  # [M] index of its episode within the pack
    labels: np.ndarray  # [E]
    pairs: np.ndarray  # [P, 2] compared episodes: chosen, rejected
    logprobs: np.ndarray  # [M] of the sampler
    advantages: np.ndarray  # [M]
    rewards: np.ndarray  # [M]
    versions: np.ndarray  # [M] weight version that sampled it
    row_tokens: int  # tokens of the rows without sharing
    weights: np.ndarray | None = None  # [M] of the tokens in the loss; None: all 1
    lengths: np.ndarray | None = (
        None  # [E] trained tokens of the episodes in all packs; None: all are in this pack
    )
    # Added by `Learner.annotate` if the objective needs it, and derived from it by `Algorithm.prepare`. [M] each
    reference: np.ndarray | None = None  # log-probs of the reference model
    old: np.ndarray | None = None  # log-probs by the learner before the step
    values: np.ndarray | None = None  # the critic's values before the step
    returns: np.ndarray | None = None  # targets of the critic


def pack(
    samples: Sequence[Sample], token_budget: int = 16_384, sharing: bool = True, split_above: int = 0,
    splitting: bool = False,
) -> list[Pack]:  # fmt: skip
    """Pack the rows. Without `sharing`, every row is its own tree, and the budget counts padded tokens. `split_above`
    is the approximate number of tokens under the root of a tree; 0: no limit. `splitting` spreads the rows of an
    episode over several packs if they exceed the budget."""
    for row, sample in enumerate(samples):
        if sample.loss_mask and sample.loss_mask[0]:
            raise ValueError(f"row {row} trains its first token, which no earlier token predicts")
    ids = [np.asarray(sample.token_ids, np.int64) for sample in samples]
    packs: list[Pack] = []
    batch: list[list[int]] = []
    size = max_width = num_rows = 0
    keys = renumber_images([sample.token_ids for sample in samples])
    units = _group_into_units(samples, ids, keys, sharing)
    if splitting:
        units = [subunit for unit in units for subunit in _split_unit(ids, unit, token_budget, sharing)]
    for unit in units:
        unit_width = max(len(ids[row]) for row in unit)
        if sharing:
            tree_size = _count_tree_tokens(ids, unit)
            joint_size = size + tree_size - (count_shared(ids[batch[-1][-1]], ids[unit[0]]) if batch else 0)
        else:
            tree_size = unit_width * len(unit)
            joint_size = max(max_width, unit_width) * (num_rows + len(unit))
        if batch and joint_size > token_budget:
            packs += _build_packs(samples, ids, keys, batch, token_budget, sharing, split_above, splitting)
            batch, joint_size, max_width, num_rows = [], tree_size, 0, 0
        batch.append(unit)
        size, max_width, num_rows = joint_size, max(max_width, unit_width), num_rows + len(unit)
    return (
        packs + _build_packs(samples, ids, keys, batch, token_budget, sharing, split_above, splitting)
        if batch
        else packs
    )


def _group_into_units(
    samples: Sequence[Sample], ids: list[np.ndarray], keys: SortKeys, sharing: bool
) -> list[list[int]]:
    """Group the rows into units that must stay in one pack. Return the row indices of each unit, in packing order."""

    # Without sharing, sort by length first, because adjacent rows of similar length need little padding.
    def get_sort_key(row: int) -> Any:
        return keys[row] if sharing else (len(ids[row]), keys[row])

    units: dict[int, list[int]] = {}
    for row in sorted((i for i, sample in enumerate(samples) if any(sample.loss_mask)), key=get_sort_key):
        units.setdefault(samples[row].pair, []).append(row)
    return list(units.values())


def _split_unit(ids: list[np.ndarray], unit: list[int], budget: int, sharing: bool) -> list[list[int]]:
    """Split a unit into one unit per row if its rows together exceed the budget."""
    num_tokens = _count_tree_tokens(ids, unit) if sharing else len(unit) * max(len(ids[row]) for row in unit)
    return [unit] if num_tokens <= budget else [[row] for row in unit]


def _count_tree_tokens(ids: list[np.ndarray], rows: list[int]) -> int:
    """Return the number of tokens of a tree over sorted rows in which every common prefix is shared."""
    num_shared = sum(count_shared(ids[left], ids[right]) for left, right in pairwise(rows))
    return sum(len(ids[row]) for row in rows) - num_shared


def count_shared(left: np.ndarray, right: np.ndarray) -> int:
    max_length = min(len(left), len(right))
    differing_positions = np.flatnonzero(left[:max_length] != right[:max_length])
    return int(differing_positions[0]) if len(differing_positions) else max_length


class _Tree:
    """Prefix tree over sorted rows. `overlaps[i]` is the length of the common prefix of rows i - 1 and i."""

    def __init__(self, ids: list[np.ndarray], overlaps: list[int]) -> None:
        self.ids, self.overlaps = ids, overlaps
        self.nodes: list[TreeNode] = []
        self.tokens: list[np.ndarray] = []
        self.node_paths: list[list[int]] = [[] for _ in ids]
        self.size = 0
        self.add_rows(0, len(ids), 0, -1)

    def add_rows(self, start_row: int, end_row: int, depth: int, parent: int) -> None:
        """Add the nodes of the rows from `start_row` up to `end_row` to the tree. The first `depth` tokens of these
        rows are in ancestor nodes."""
        level = self.nodes[parent].level + 1 if parent >= 0 else 0
        if end_row - start_row == 1:
            self._add_node(start_row, end_row, depth, len(self.ids[start_row]), parent, level)
            return
        common_length = min(self.overlaps[start_row + 1 : end_row])
        if (common_length - depth) * (end_row - start_row - 1) >= MIN_SAVED_TOKENS and level < MAX_LEVELS - 1:
            parent = self._add_node(start_row, end_row, depth, common_length, parent, level)
            depth = common_length
        elif level == MAX_LEVELS - 1 or all(
            overlap == common_length for overlap in self.overlaps[start_row + 1 : end_row]
        ):
            for row in range(start_row, end_row):
                self.add_rows(row, row + 1, depth, parent)
            return
        boundaries = [
            start_row,
            *(row for row in range(start_row + 1, end_row) if self.overlaps[row] == common_length),
            end_row,
        ]
        for child_start, child_end in pairwise(boundaries):
            self.add_rows(child_start, child_end, depth, parent)

    def _add_node(
        self, start_row: int, end_row: int, depth: int, end_depth: int, parent: int, level: int
    ) -> int:
        if end_depth == depth:  # the row ends with its parent node
            return parent
        self.nodes.append(TreeNode(self.size, end_depth - depth, depth, parent, level, end_row - start_row))
        self.tokens.append(self.ids[start_row][depth:end_depth])
        self.size += end_depth - depth
        for row in range(start_row, end_row):
            self.node_paths[row].append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def find_token_indices(self, row: int) -> np.ndarray:
        """Return the flat index of each token of a row."""
        nodes = (self.nodes[index] for index in self.node_paths[row])
        return np.concatenate([np.arange(node.start, node.start + node.length) for node in nodes])


def _build_packs(
    samples: Sequence[Sample],
    ids: list[np.ndarray],
    keys: SortKeys,
    units: list[list[int]],
    budget: int,
    sharing: bool,
    split_above: int,
    splitting: bool,
) -> list[Pack]:
    """Build one pack, or several if the tree exceeds the budget. The tree can have more tokens than
    `_count_tree_tokens` returns, because it shares no short prefixes."""
    rows = [row for unit in units for row in unit]
    if sharing:
        rows.sort(key=lambda row: keys[row])
    overlaps = [
        0,
        *(count_shared(ids[left], ids[right]) if sharing else 0 for left, right in pairwise(rows)),
    ]
    tree = _Tree(
        [ids[row] for row in rows],
        _cut_small_overlaps([len(ids[row]) for row in rows], overlaps, split_above),
    )
    if splitting and len(units) == 1 and tree.size > budget:
        units = [[row] for row in rows]
    middle = len(units) // 2
    if middle and tree.size > budget:
        half_packs = (
            _build_packs(samples, ids, keys, half_units, budget, sharing, split_above, splitting)
            for half_units in (units[:middle], units[middle:])
        )
        return [*chain.from_iterable(half_packs)]
    return [_build_pack(samples, ids, rows, tree)]


def _cut_small_overlaps(lengths: list[int], overlaps: list[int], split_above: int) -> list[int]:
    """Return `overlaps` with 0 at each row where a new tree begins. Such a row shares no more tokens than all rows of
    the previous tree share, and that tree is large enough."""
    shared_lengths = list(overlaps)
    tree_size = min_length = lengths[0]
    for row in range(1, len(overlaps)) if split_above else ():
        min_length = min(min_length, overlaps[row])
        if overlaps[row] == min_length and tree_size > max(split_above, COPY_SHARE * overlaps[row]):
            shared_lengths[row] = tree_size = 0
            min_length = lengths[row]
        tree_size += lengths[row] - shared_lengths[row]
    return shared_lengths


def _build_pack(samples: Sequence[Sample], ids: list[np.ndarray], indices: list[int], tree: _Tree) -> Pack:
    rows = [samples[row] for row in indices]
    trained_positions = [np.flatnonzero(sample.loss_mask) for sample in rows]
    trained_counts = [len(positions) for positions in trained_positions]
    positions_by_row = [tree.find_token_indices(index) for index in range(len(indices))]
    first_rows: dict[int, Sample] = {}  # first row of each episode, in the order of the pack
    for sample in rows:
        first_rows.setdefault(sample.episode, sample)
    episode_index = {episode: index for index, episode in enumerate(first_rows)}

    def gather_values(values: Iterable[Any], dtype: Any, shift: int = 0) -> np.ndarray:
        """Return the values of all rows at their trained tokens, or at the tokens `shift` positions before."""
        pairs = zip(values, trained_positions, strict=True)
        return np.concatenate([np.asarray(value, dtype)[positions - shift] for value, positions in pairs])

    references = [sample.reference for sample in rows]
    return Pack(
        token_ids=np.concatenate(tree.tokens),
        positions=np.concatenate([np.arange(node.depth, node.depth + node.length) for node in tree.nodes]),
        nodes=tree.nodes,
        rows=np.array(indices),
        source=gather_values(positions_by_row, np.int64, shift=1),
        place=gather_values(positions_by_row, np.int64),
        target=gather_values((ids[row] for row in indices), np.int64),
        row=np.repeat(indices, trained_counts),
        episode=np.repeat([episode_index[sample.episode] for sample in rows], trained_counts),
        labels=np.array([sample.label for sample in first_rows.values()], np.float32),
        pairs=_order_pairs(first_rows.values(), episode_index),
        logprobs=gather_values((sample.logprobs for sample in rows), np.float32),
        advantages=gather_values((sample.advantages for sample in rows), np.float32),
        rewards=gather_values((sample.rewards for sample in rows), np.float32),
        versions=gather_values((sample.policy_version for sample in rows), np.int64),
        row_tokens=sum(len(sample.token_ids) for sample in rows),
        weights=None
        if all(sample.weights is None for sample in rows)
        else gather_values((sample.weights or np.ones(len(sample.token_ids)) for sample in rows), np.float32),
        reference=gather_values(references, np.float32)
        if all(values is not None for values in references)
        else None,
    )


def _order_pairs(first_rows: Iterable[Sample], episode_index: dict[int, int]) -> np.ndarray:
    """Return [P, 2]: the episodes of each pair, the one with the higher label first."""
    groups: dict[int, list[Sample]] = {}
    for sample in first_rows:
        groups.setdefault(sample.pair, []).append(sample)
    pairs = [sorted(group, key=lambda sample: -sample.label) for group in groups.values() if len(group) == 2]
    index_pairs = [[episode_index[sample.episode] for sample in pair] for pair in pairs]
    return np.array(index_pairs, np.int64).reshape(-1, 2)


@dataclass(slots=True)
class Batch:
    """Packs of one update, with counts over all of them."""

    packs: list[Pack]
    num_rows: int  # training rows
    num_tokens: int  # trained tokens
    num_episodes: int  # an episode in several packs counts once
    num_pairs: int
    baseline: float = 0.0  # set by `Algorithm.prepare`, for the whole step
    values_only: bool = False  # update only the critic, not the policy
    mismatched: list[Pack] = field(default_factory=list)  # answers paired with other prompts, never trained
    num_split_episodes: int = 0  # episodes in several packs

    @property
    def token_weight(self) -> float:
        """Return the sum of the trained tokens' weights: their number, unless rows have weights."""
        if all(pack.weights is None for pack in self.packs):
            return self.num_tokens
        weights = (
            len(pack.target) if pack.weights is None else float(pack.weights.sum(dtype=float))
            for pack in self.packs
        )
        return sum(weights)


def make_batch(
    samples: Sequence[Sample], token_budget: int = 16_384, sharing: bool = True, mismatched: bool = False,
    split_above: int = 0, splitting: bool = False,
) -> Batch:  # fmt: skip
    """Pack the rows of a step. `sharing`, `split_above` and `splitting` have the same meaning as in `pack`."""
    packs = pack(samples, token_budget, sharing, split_above, splitting)
    num_split_episodes = _add_lengths(samples, packs) if splitting else 0
    return Batch(
        packs,
        sum(len(pack.rows) for pack in packs),
        sum(len(pack.target) for pack in packs),
        len({samples[row].episode for pack in packs for row in pack.rows}),
        sum(len(pack.pairs) for pack in packs),
        mismatched=pack(find_mismatched(samples), token_budget, sharing, split_above) if mismatched else [],
        num_split_episodes=num_split_episodes,
    )


def _add_lengths(samples: Sequence[Sample], packs: Sequence[Pack]) -> int:
    """Set `lengths` to the lengths of whole episodes in each pack that has only a part of one. Return the number of
    split episodes."""
    episode_ids_by_pack = [list(dict.fromkeys(samples[row].episode for row in pack.rows)) for pack in packs]
    pack_counts = Counter(chain.from_iterable(episode_ids_by_pack))
    if (num_split_episodes := sum(count > 1 for count in pack_counts.values())) == 0:
        return 0
    lengths = dict.fromkeys(pack_counts, 0.0)
    for sample in samples:
        if sample.episode in lengths:
            weights = sample.loss_mask if sample.weights is None else np.asarray(sample.weights, np.float32)
            lengths[sample.episode] += float(np.sum(weights, dtype=float))
    for pack, episode_ids in zip(packs, episode_ids_by_pack, strict=True):
        if any(pack_counts[episode_id] > 1 for episode_id in episode_ids):
            pack.lengths = np.array([lengths[episode_id] for episode_id in episode_ids])
    return num_split_episodes
