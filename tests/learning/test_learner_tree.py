"""Attention over a tree by FlexAttention, as on a GPU: its mask, and that it gives what the levels give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.kits.learner import ragged_rows
from TrainingFactory.data.packing import Node, Pack, pack
from TrainingFactory.learning.tree import attention as tree
from TrainingFactory.learning.tree import flex as tree_flex
from TrainingFactory.learning.tree.parts import _alike, plan_parts


def seen(packed: Pack) -> np.ndarray:
    """[N, N], written down from what a row is: the tokens of its path, none of them later."""
    size = len(packed.token_ids)
    table = np.zeros((size, size), bool)
    for node in packed.nodes:
        own = np.arange(node.start, node.start + node.length)
        table[np.ix_(own, own)] = np.tri(node.length, dtype=bool)
        above = node.parent
        while above >= 0:
            up = packed.nodes[above]
            table[np.ix_(own, np.arange(up.start, up.start + up.length))] = True
            above = up.parent
    return table


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("block", [16, 128])
def test_blocks_are_counted_right(seed: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_flex, "BLOCK", block)
    (packed,) = pack(ragged_rows(seed), 100_000)
    size = -(-len(packed.token_ids) // block) * block
    table = np.zeros((size, size), np.int64)
    table[: len(packed.token_ids), : len(packed.token_ids)] = seen(packed)
    wanted = table.reshape(size // block, block, size // block, block).sum((1, 3))
    assert (tree_flex.seen_pairs(packed) == wanted).all()
    mask = tree_flex.block_mask(packed, torch.device("cpu"))
    assert (mask.to_dense()[0, 0].bool().numpy() == (wanted > 0)).all()
    if block == 16:
        assert (wanted == block * block).any()
        whole = mask.full_kv_num_blocks[0, 0].numpy()
        assert (whole == (wanted == block * block).sum(1)).all()
        for row in range(len(wanted)):
            listed = sorted(mask.full_kv_indices[0, 0, row, : whole[row]].tolist())
            assert listed == np.flatnonzero(wanted[row] == block * block).tolist()


def test_flex_attention_equals_levels() -> None:
    (packed,) = pack(ragged_rows(0)[:9], 100_000)
    generator = torch.Generator().manual_seed(0)
    size, heads, kv_heads = len(packed.token_ids), 4, 2
    shapes = [(1, heads, size, 8), (1, kv_heads, size, 8), (1, kv_heads, size, 8)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    plan = tree.plan_tree(packed, torch.device("cpu"))
    module = torch.nn.Module()
    wanted, _ = tree.tree_attention(module, query, key, value, None, tfactory_tree=plan)
    mask = tree_flex.block_mask(packed, torch.device("cpu"))
    found = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.transpose(1, 2), wanted, rtol=1e-4, atol=1e-5)


def test_nodes_of_like_length_go_together_whatever_their_level() -> None:
    nodes = [Node(0, 155, 0, -1, 0)]
    for number, length in enumerate([40, 31, 29, 4, 25, 5, 3, 4, 17, 2]):
        start = nodes[-1].start + nodes[-1].length
        nodes.append(Node(start, length, 155, 0, 1) if number % 2 else Node(start, length, 155, 0, 2))
    own = [part for part in plan_parts(nodes, torch.device("cpu")) if part.own]
    assert [part.queries.rows for part in own] == [3, 8]  # a part for each level would be 3
    far_apart = [Node(0, 4000, 0, -1, 0), *(Node(4000 + 9 * n, 9, 4000, 0, 1) for n in range(200))]
    assert [part.queries.rows for part in plan_parts(far_apart, torch.device("cpu")) if part.own] == [1, 200]


def test_long_nodes_are_padded_by_little() -> None:
    """Attention of a node takes its length squared: with padding at most 16 / 9 of that."""
    lengths = [2000, 1500, 1499, 1000, 999, 700, 300, 299, 200, 100, 100]
    starts = np.cumsum([0, *lengths])
    nodes = [Node(int(start), length, 0, -1, 0) for start, length in zip(starts, lengths, strict=False)]
    rows = [[nodes[number].length for number in part] for part in _alike(nodes)]
    assert sorted(length for row in rows for length in row) == sorted(lengths)
    assert rows[0] == [2000, 1500] and all(min(row) >= 3 / 4 * max(row) for row in rows if max(row) > 256)
    assert rows[-1] == [200, 100, 100]  # short ones may be
