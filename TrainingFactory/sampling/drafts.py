"""Guess the next tokens, so that one forward can settle several of them: a table like a processor's branch predictor
notes which token followed three given ones last time, and whether that came true when it was next looked up."""

from __future__ import annotations

import numpy as np

CONTEXT = 3  # tokens that a guess depends on
SIZE = 1 << 16  # entries of the table; what collides guesses wrong, no more
TRUSTED, SURE = 1, 3  # how often in a row an entry must have been right; how much of that is remembered


class Drafts:
    def __init__(self) -> None:
        self._next = np.zeros(SIZE, np.int32)
        self._trust = np.zeros(SIZE, np.int8)

    @staticmethod
    def _entry(context: np.ndarray) -> np.ndarray:
        """Turn [M, CONTEXT] tokens into [M] places in the table."""
        mixed = context[:, 0].astype(np.uint64)
        for column in range(1, CONTEXT):
            mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + context[:, column].astype(np.uint64)
        return (mixed * np.uint64(0xD6E8FEB86659FD93) >> np.uint64(48)).astype(np.int64)

    def guess(self, context: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what probably follows each context [M, CONTEXT]: tokens [M, most], and how many of them to use."""
        count = len(context)
        tokens, lengths = np.zeros((count, most), np.int64), np.zeros(count, np.int64)
        going = np.arange(count)
        for place in range(most):
            entry = self._entry(context)
            trusted = self._trust[entry] >= TRUSTED
            if not trusted.any():
                break
            going, following = going[trusted], self._next[entry[trusted]]
            tokens[going, place] = following
            lengths[going] += 1
            context = np.column_stack((context[trusted][:, 1:], following))
        return tokens, lengths

    def learn(self, context: np.ndarray, tokens: np.ndarray) -> None:
        """Note that these tokens [M] followed these contexts [M, CONTEXT]."""
        entry = self._entry(context)
        right, trust = self._next[entry] == tokens, self._trust[entry]
        self._trust[entry] = np.where(right, np.minimum(trust + 1, SURE), np.maximum(trust - 1, 0))
        new = ~right & (trust == 0)
        self._next[entry[new]] = tokens[new]
