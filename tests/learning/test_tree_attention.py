"""Attention over random trees, with random windows, chunks, caps and sinks, against dense attention with a mask."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from tests.kits.learner import ragged_rows
from TrainingFactory.data.packing import Pack, pack
from TrainingFactory.learning.tree import capped, reach
from TrainingFactory.learning.tree import flex as tree_flex
from TrainingFactory.learning.tree.attention import TreePlan
from TrainingFactory.learning.tree.flex import attend_on_gpu, make_block_mask, pad_to_blocks
from TrainingFactory.learning.tree.parts import attend
from TrainingFactory.learning.tree.reach import AttentionRange

CPU = torch.device("cpu")
KEY_HEADS = 2
GROUPS = 2


def visible_pairs(packed: Pack, limit: AttentionRange | None) -> torch.Tensor:
    """[N, N], written down from the rows: the earlier tokens of the path that are in the window or in the chunk."""
    parents = np.full(len(packed.token_ids), -1)
    for node in packed.nodes:
        parents[node.start : node.start + node.length] = np.arange(node.start, node.start + node.length) - 1
        above = packed.nodes[node.parent] if node.parent >= 0 else None
        parents[node.start] = -1 if above is None else above.start + above.length - 1
    table = np.zeros((len(parents), len(parents)), bool)
    for query, parent in enumerate(parents):
        table[query, query] = True
        if parent >= 0:
            table[query] |= table[parent]
    distance = packed.positions[:, None] - packed.positions
    if limit is not None and limit.is_chunked:
        chunks = packed.positions // limit.size
        table &= chunks[:, None] == chunks
    elif limit is not None:
        table &= distance < limit.size
    return torch.from_numpy(table)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[N, H, d], [N, K, d], [N, K, dv] -> [N, H, dv]"""
    k, v = (states.repeat_interleave(GROUPS, 1) for states in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)


def random_inputs(packed: Pack, rng: random.Random) -> list[torch.Tensor]:
    """Return queries, keys, values and sinks."""
    torch.manual_seed(rng.randrange(1 << 30))
    size, heads = len(packed.token_ids), KEY_HEADS * GROUPS
    width, value_width = rng.choice([(8, 8), (12, 8), (8, 12)])
    shapes = [(size, heads, width), (size, KEY_HEADS, width), (size, KEY_HEADS, value_width), (heads,)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


LIMITS = [None, *(AttentionRange(size, is_chunked) for size in (2, 30, 75) for is_chunked in (False, True))]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_parts_equal_dense_attention(limit: AttentionRange | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(str(limit))
    monkeypatch.setattr(reach, "MAX_PIECE_TOKENS", rng.choice([5, 20, 512]))
    monkeypatch.setattr(capped, "BLOCK_SCORES", rng.choice([5000, 1 << 22]))
    for cap, with_sinks in ((None, False), (1.5, False), (None, True), (1.5, True)):
        (packed,) = pack(ragged_rows(rng.randrange(1000))[:6], 100_000)
        q, k, v, logits = inputs = random_inputs(packed, rng)
        sinks = logits if with_sinks else None
        plan: Any = TreePlan(packed, CPU).get_plan(limit)
        expected = dense(q, k, v, visible_pairs(packed, limit), 0.7, cap, sinks)
        actual = attend(q, k, v, plan, 0.7, cap, sinks)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        weights = torch.randn(expected.shape)
        learned = inputs if with_sinks else inputs[:3]
        gradients = [torch.autograd.grad((out * weights).sum(), learned) for out in (actual, expected)]
        for gradient, dense_gradient in zip(*gradients, strict=True):
            assert (gradient - dense_gradient).norm() <= 1e-4 * dense_gradient.norm()


def test_keys_out_of_the_window_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "MAX_PIECE_TOKENS", 10)
    (packed,) = pack(ragged_rows(0), 100_000)
    scores = [
        sum(part.queries.pad_states(torch.ones(len(packed.token_ids))).numel() * part.keys.pad_states(
            torch.ones(len(packed.token_ids))).shape[1] for part in TreePlan(packed, CPU).get_plan(limit))
        for limit in (AttentionRange(10), None)
    ]  # fmt: skip
    assert scores[0] < scores[1] / 2


def test_a_window_that_no_row_exceeds_costs_nothing() -> None:
    (packed,) = pack(ragged_rows(0), 100_000)
    plan = TreePlan(packed, CPU)
    longest = int(packed.positions.max()) + 1
    assert plan.get_plan(AttentionRange(longest)) is plan.get_plan(None)
    assert plan.get_plan(AttentionRange(longest - 1)) is not plan.get_plan(None)


@pytest.mark.parametrize("limit", [AttentionRange(40), AttentionRange(60, is_chunked=True)], ids=str)
def test_flex_attention_equals_dense_attention(
    limit: AttentionRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_flex, "_compile_flex", lambda: torch_flex.flex_attention)
    rng = random.Random(0)
    (packed,) = pack(ragged_rows(1)[:6], 100_000)
    packed = pad_to_blocks(packed)
    mask = make_block_mask(packed, CPU, limit)
    q, k, v, sinks = (tensor.detach() for tensor in random_inputs(packed, rng))
    visible = visible_pairs(packed, limit)
    query, key, value = (states.transpose(0, 1)[None] for states in (q, k, v))
    for cap, logits in ((None, None), (1.5, sinks)):
        expected = dense(q, k, v, visible, 0.7, cap, logits)
        actual = attend_on_gpu(query, key, value, mask, 0.7, cap, logits)[0].transpose(0, 1)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "limit", [AttentionRange(7), AttentionRange(40), AttentionRange(60, is_chunked=True)], ids=str
)
def test_blocks_within_reach(limit: AttentionRange, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is listed as full has no masked pair, one that is not listed no visible one."""
    monkeypatch.setattr(tree_flex, "BLOCK_SIZE", 16)
    (packed,) = pack(ragged_rows(0), 100_000)
    packed = pad_to_blocks(packed)
    mask = make_block_mask(packed, CPU, limit)
    visible = visible_pairs(packed, limit)
    blocks = len(visible) // 16
    pairs = visible.view(blocks, 16, blocks, 16).sum((1, 3))
    listed = mask.to_dense()[0, 0].bool()
    assert (listed | (pairs == 0)).all() and listed.sum() < visible_blocks(packed)
    for row in range(blocks):
        full = mask.full_kv_indices[0, 0, row, : int(mask.full_kv_num_blocks[0, 0, row])]
        assert (pairs[row, full] == 256).all()
    places = torch.arange(len(visible))
    assert (mask.mask_mod(0, 0, places[:, None], places) == visible).all()


def visible_blocks(packed: Pack) -> int:
    return int((tree_flex.count_visible_pairs(packed) > 0).sum())
