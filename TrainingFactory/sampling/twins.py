"""Find rows that feed the same tokens after the same history, as siblings do until they part: computed once, written
to every slot, and every row draws with its own random number."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Twins(NamedTuple):
    """Names the U tokens that are computed, of the N of a forward."""

    leaders: np.ndarray  # [rows] whether a row is the first of its kind
    kept: np.ndarray  # [N] whether a token belongs to one of those
    source: np.ndarray  # [N] which of the U tokens each one is


def find_twins(histories: np.ndarray, marks: np.ndarray, counts: np.ndarray) -> Twins | None:
    """Return the twins of rows that feed `counts` [rows] tokens; `histories` [rows] and `marks` [N] are hashes, of what
    is known in a row and of each token with its position. None if no two rows are alike."""
    starts = counts.cumsum() - counts
    known = histories + np.add.reduceat(marks, starts)
    _, first, kind = np.unique(known, return_index=True, return_inverse=True)
    if len(first) == len(counts):
        return None
    leader = first[kind]
    leaders = leader == np.arange(len(counts))
    kept = np.repeat(leaders, counts)
    same = np.arange(len(marks)) + np.repeat(starts[leader] - starts, counts)  # [N] the leader's token
    return Twins(leaders, kept, (kept.cumsum() - 1)[same])
