"""Log-probs of the reference model, computed once before training and kept by row, so that the reference need not be
kept."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.types import Sample


class References:
    """A row is known by its tokens and by which of them are trained."""

    def __init__(self) -> None:
        self._kept: dict[bytes, np.ndarray] = {}  # [trained tokens] each

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, learner: Learner, samples: Sequence[Sample], token_budget: int) -> None:
        """Computes those of rows that are not known yet."""
        new = list({key: row for row in samples if (key := _key(row)) not in self._kept}.values())
        batch = learner.annotate(make_batch(new, token_budget, learner.sharing), frozenset({"reference"}))
        for pack in batch.packs:
            assert pack.reference is not None
            for number in pack.rows:
                self._kept[_key(new[number])] = pack.reference[pack.row == number]

    def fill(self, samples: Sequence[Sample]) -> None:
        """Gives the rows what is known of them."""
        for row in samples:
            kept = self._kept.get(_key(row))
            if kept is not None:
                values = np.zeros(len(row.token_ids), np.float32)
                values[row.loss_mask] = kept
                row.reference = values.tolist()


def _key(row: Sample) -> bytes:
    tokens, mask = np.asarray(row.token_ids, np.int64), np.asarray(row.loss_mask, np.bool_)
    return hashlib.blake2b(tokens.tobytes() + mask.tobytes(), digest_size=16).digest()
