"""Attention over a prefix tree with a limited range: sliding windows and chunks.

On a CPU, long nodes are split into pieces. Each piece attends to itself, then to its parent piece, its grandparent and
so on, as far as the attention range goes. Pieces with the same ancestor attend to it in one part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from TrainingFactory.data.packing import TreeNode
from TrainingFactory.learning.tree.parts import (
    TreePart,
    group_by_length,
    pad_indices,
    pad_rows,
    plan_node_parts,
)

MAX_PIECE_TOKENS = 512  # tokens of a piece, unless the window is shorter or more than four pieces long


@dataclass(frozen=True, slots=True)
class AttentionRange:
    """Attention range: a query attends to the last `size` positions, its own included, or with `is_chunked` to the
    earlier positions of its chunk of `size` positions."""

    size: int
    is_chunked: bool = False

    def get_first_visible(self, positions: np.ndarray) -> np.ndarray:
        """Return the first position that a query at each of these positions sees."""
        return positions - positions % self.size if self.is_chunked else positions - (self.size - 1)

    def split_nodes(self, nodes: list[TreeNode]) -> list[TreeNode]:
        """Split the nodes into pieces so short that every token of a piece attends to all earlier tokens of the
        piece."""
        piece_length = min(self.size, max(MAX_PIECE_TOKENS, self.size // 4))
        pieces: list[TreeNode] = []
        last_pieces: list[int] = []  # of each node
        for node in nodes:
            offsets = np.arange(node.depth, node.depth + node.length)
            offsets = (offsets % self.size if self.is_chunked else offsets) % piece_length
            starts = [0, *(start for start in np.flatnonzero(offsets == 0).tolist() if start)]
            parent = last_pieces[node.parent] if node.parent >= 0 else -1
            for start, end in zip(starts, [*starts[1:], node.length], strict=True):
                level = pieces[parent].level + 1 if parent >= 0 else 0
                pieces.append(TreeNode(node.start + start, end - start, node.depth + start, parent, level))
                parent = len(pieces) - 1
            last_pieces.append(parent)
        return pieces


def plan_ranged_parts(
    nodes: list[TreeNode], positions: np.ndarray, attention_range: AttentionRange, device: torch.device
) -> list[TreePart]:
    """Return the parts of the attention: first of each piece's tokens to each other, then of pieces to their parents,
    grandparents and so on."""
    pieces = attention_range.split_nodes(nodes)
    first_visible = attention_range.get_first_visible(positions)
    parts = plan_node_parts(pieces, device)
    ancestors = [piece.parent for piece in pieces]
    while any(ancestor >= 0 for ancestor in ancestors):
        queries: dict[int, list[np.ndarray]] = {}  # of each ancestor
        for index, ancestor in enumerate(ancestors):
            if ancestor < 0:
                continue
            piece = pieces[index]
            tokens = np.arange(piece.start, piece.start + piece.length)
            last_key = pieces[ancestor].depth + pieces[ancestor].length - 1
            tokens = tokens[first_visible[tokens] <= last_key]
            if len(tokens):
                queries.setdefault(ancestor, []).append(tokens)
            ancestors[index] = pieces[ancestor].parent if len(tokens) else -1
        rows = [(np.concatenate(tokens), pieces[ancestor]) for ancestor, tokens in queries.items()]
        for indices in group_by_length([len(tokens) for tokens, _ in rows]):
            parts.append(_make_part([rows[index] for index in indices], first_visible, device))
    return parts


def _make_part(
    rows: list[tuple[np.ndarray, TreeNode]], first_visible: np.ndarray, device: torch.device
) -> TreePart:
    """Return the part in which the queries of each row attend to one piece. Every query sees at least the last key."""
    queries, is_query = pad_indices([tokens for tokens, _ in rows], device)
    keys, is_key = pad_rows([range(piece.start, piece.start + piece.length) for _, piece in rows], device)
    is_visible = is_key[:, None] & is_query[:, :, None]  # [n, T, A]
    for index, (tokens, piece) in enumerate(rows):
        key_positions = np.arange(piece.depth, piece.depth + piece.length)
        is_near = key_positions >= first_visible[tokens][:, None]
        is_visible[index, : len(tokens), : piece.length] &= is_near
    if is_visible.all():
        return TreePart(queries, keys, False, None)
    mask = torch.where(torch.from_numpy(is_visible), 0.0, -torch.inf)[:, None].to(device)
    return TreePart(queries, keys, False, mask)
