"""Twins: rows that feed the same tokens after the same history, as the members of a group do until they diverge. Twins
are computed once, and the result is written to the slot of every one of them; every row draws with its own random
number."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TwinRows(NamedTuple):
    """The U of N tokens that a forward computes, because rows with equal tokens and history are computed once."""

    leading_rows: np.ndarray  # [rows] whether a row is the first of its kind
    is_leader: np.ndarray  # [N] whether a token belongs to a leader
    source_tokens: np.ndarray  # [N] which of the U computed tokens equals each token


def find_twins(histories: np.ndarray, token_hashes: np.ndarray, counts: np.ndarray) -> TwinRows | None:
    """Find the twins among rows that feed `counts` [rows] tokens each. Return None if all rows differ. `histories`
    [rows] are hashes of the rows' sequences, `token_hashes` [N] are hashes of the tokens with their positions."""
    starts = counts.cumsum() - counts
    hashes = histories + np.add.reduceat(token_hashes, starts)
    _, first_rows, group_indices = np.unique(hashes, return_index=True, return_inverse=True)
    if len(first_rows) == len(counts):
        return None
    leader_rows = first_rows[group_indices]
    is_leading_row = leader_rows == np.arange(len(counts))
    is_leader = np.repeat(is_leading_row, counts)
    leader_token = np.arange(len(token_hashes)) + np.repeat(starts[leader_rows] - starts, counts)  # [N]
    return TwinRows(is_leading_row, is_leader, (is_leader.cumsum() - 1)[leader_token])
