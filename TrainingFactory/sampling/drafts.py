"""Draft tokens for speculative decoding, so that one forward can verify several tokens. Like a processor's branch
predictor, a table stores which token last followed three others, and whether that prediction was right."""

from __future__ import annotations

import numpy as np

CONTEXT_TOKENS = 3  # tokens that a draft depends on
NUM_ENTRIES = 1 << 16  # entries of the table; a collision only causes a wrong draft
MIN_TRUST = 1  # consecutive correct predictions after which an entry is used
MAX_TRUST = 3  # consecutive correct predictions that are counted at most


class DraftTable:
    def __init__(self) -> None:
        self._next_tokens = np.zeros(NUM_ENTRIES, np.int32)
        self._trust_levels = np.zeros(NUM_ENTRIES, np.int8)

    @staticmethod
    def _find_entries(contexts: np.ndarray) -> np.ndarray:
        """Return the table index [M] of each context [M, CONTEXT_TOKENS]."""
        hashes = contexts[:, 0].astype(np.uint64)
        for column in range(1, CONTEXT_TOKENS):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + contexts[:, column].astype(np.uint64)
        return (hashes * np.uint64(0xD6E8FEB86659FD93) >> np.uint64(48)).astype(np.int64)

    def guess(self, contexts: np.ndarray, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return draft tokens [M, max_tokens] that may follow contexts [M, CONTEXT_TOKENS], and their counts [M]."""
        num_rows = len(contexts)
        tokens, draft_lengths = np.zeros((num_rows, max_tokens), np.int64), np.zeros(num_rows, np.int64)
        open_rows = np.arange(num_rows)  # rows whose drafts continue
        for column in range(max_tokens):
            entries = self._find_entries(contexts)
            is_trusted = self._trust_levels[entries] >= MIN_TRUST
            if not is_trusted.any():
                break
            open_rows, next_tokens = open_rows[is_trusted], self._next_tokens[entries[is_trusted]]
            tokens[open_rows, column] = next_tokens
            draft_lengths[open_rows] += 1
            contexts = np.column_stack((contexts[is_trusted][:, 1:], next_tokens))
        return tokens, draft_lengths

    def learn(self, contexts: np.ndarray, tokens: np.ndarray) -> None:
        """Update the predictions: tokens [M] have followed contexts [M, CONTEXT_TOKENS]."""
        entries = self._find_entries(contexts)
        is_correct, trust = self._next_tokens[entries] == tokens, self._trust_levels[entries]
        new_trust = np.where(is_correct, trust + 1, trust - 1)
        self._trust_levels[entries] = new_trust.clip(0, MAX_TRUST)
        is_replaced = ~is_correct & (trust == 0)
        self._next_tokens[entries[is_replaced]] = tokens[is_replaced]
