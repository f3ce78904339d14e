"""Draft tokens for speculative decoding, so that one forward can verify several tokens. Like a processor's branch
predictor, a table stores which token last followed three others, and whether that prediction was right."""

from __future__ import annotations

import numpy as np

CONTEXT = 3  # tokens that a draft depends on
SIZE = 1 << 16  # entries of the table; a collision only causes a wrong draft
TRUSTED = 1  # consecutive correct predictions after which an entry is used
SURE = 3  # consecutive correct predictions that are counted at most


class DraftTable:
    def __init__(self) -> None:
        self._next = np.zeros(SIZE, np.int32)
        self._trust = np.zeros(SIZE, np.int8)

    @staticmethod
    def _entry_of(context: np.ndarray) -> np.ndarray:
        """Return the table index [M] of each context [M, CONTEXT]."""
        hashes = context[:, 0].astype(np.uint64)
        for column in range(1, CONTEXT):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + context[:, column].astype(np.uint64)
        return (hashes * np.uint64(0xD6E8FEB86659FD93) >> np.uint64(48)).astype(np.int64)

    def guess(self, context: np.ndarray, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return draft tokens [M, max_tokens] that may follow each context [M, CONTEXT], and their numbers [M]."""
        count = len(context)
        tokens, lengths = np.zeros((count, max_tokens), np.int64), np.zeros(count, np.int64)
        rows = np.arange(count)  # rows whose drafts continue
        for position in range(max_tokens):
            entry = self._entry_of(context)
            is_trusted = self._trust[entry] >= TRUSTED
            if not is_trusted.any():
                break
            rows, next_tokens = rows[is_trusted], self._next[entry[is_trusted]]
            tokens[rows, position] = next_tokens
            lengths[rows] += 1
            context = np.column_stack((context[is_trusted][:, 1:], next_tokens))
        return tokens, lengths

    def learn(self, context: np.ndarray, tokens: np.ndarray) -> None:
        """Update the predictions: tokens [M] have followed contexts [M, CONTEXT]."""
        entry = self._entry_of(context)
        is_correct, trust = self._next[entry] == tokens, self._trust[entry]
        self._trust[entry] = np.where(is_correct, np.minimum(trust + 1, SURE), np.maximum(trust - 1, 0))
        is_replaced = ~is_correct & (trust == 0)
        self._next[entry[is_replaced]] = tokens[is_replaced]
