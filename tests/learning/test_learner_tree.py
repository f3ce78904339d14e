"""Attention over a tree by FlexAttention, as on a GPU: its mask, and that it gives what the levels give."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoConfig, AutoModelForCausalLM

from tests.kits.engine import tiny
from tests.kits.learner import ragged_rows
from TrainingFactory.data.packing import Pack, TreeNode, pack
from TrainingFactory.learning.forward import run_tree, use_trees
from TrainingFactory.learning.tree import attention as tree
from TrainingFactory.learning.tree import flex as tree_flex
from TrainingFactory.learning.tree.layers import compile_once, use_fused_layers
from TrainingFactory.learning.tree.parts import _group_nodes, plan_parts


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
    monkeypatch.setattr(tree_flex, "BLOCK_SIZE", block)
    (packed,) = pack(ragged_rows(seed), 100_000)
    size = -(-len(packed.token_ids) // block) * block
    table = np.zeros((size, size), np.int64)
    table[: len(packed.token_ids), : len(packed.token_ids)] = seen(packed)
    wanted = table.reshape(size // block, block, size // block, block).sum((1, 3))
    assert (tree_flex.count_visible_pairs(packed) == wanted).all()
    mask = tree_flex.make_block_mask(packed, torch.device("cpu"))
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
    plan = tree.TreePlan(packed, torch.device("cpu"))
    module = torch.nn.Module()
    wanted, _ = tree.tree_attention(module, query, key, value, None, tfactory_tree=plan)
    mask = tree_flex.make_block_mask(packed, torch.device("cpu"))
    found = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.transpose(1, 2), wanted, rtol=1e-4, atol=1e-5)


def test_tokens_of_no_use_fill_the_last_block() -> None:
    (packed,) = pack(ragged_rows(0)[:9], 100_000)
    size, full = len(packed.token_ids), tree_flex.pad_to_blocks(packed)
    assert size % 128 and len(full.token_ids) == len(full.positions) == -(-size // 128) * 128
    table = seen(full)
    assert (table[:size, :size] == seen(packed)).all() and not table[:size, size:].any()
    mask = tree_flex.make_block_mask(full, torch.device("cpu"))
    query = key = torch.arange(len(full.token_ids))
    assert (mask.mask_mod(0, 0, query[:, None], key[None]).numpy() == table).all()
    assert tree_flex.pad_to_blocks(full).nodes == full.nodes


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 9}, "qwen3": {},
    "qwen2": {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
}  # fmt: skip


class OtherLinear(torch.nn.Linear):
    """Is no plain matrix, as LoRA's is none."""


@pytest.mark.parametrize("linear", [torch.nn.Linear, OtherLinear])
@pytest.mark.parametrize(
    ("family", "make"),
    [*((family, None) for family in FAMILIES), pytest.param("qwen3", compile_once, marks=pytest.mark.slow)],
)
def test_fused_layers_give_what_the_layers_give(family: str, make: Any, linear: Any) -> None:
    config = AutoConfig.for_model(
        family, vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, **FAMILIES[family],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # norms of weights that hide nothing
        weight.data.uniform_(0.5, 1.5) if weight.dim() == 1 else weight.data.normal_(0, 0.1)
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = linear
    (packed,) = pack(ragged_rows(0)[:9], 100_000)
    packed.token_ids %= 100
    calls: list[str] = []

    def plain(function: Any) -> Any:
        calls.append(function.__name__)
        return make(function) if make else function

    results = []
    for quick in (False, True):
        model.zero_grad()
        with (
            use_trees(model),
            use_fused_layers(model, tree.tree_attention, plain) if quick else nullcontext(),
        ):
            states = run_tree(model, packed)
            (states * torch.linspace(-1, 1, 32)).sum().backward()
        results.append([states, *(each.grad for each in model.parameters() if each.grad is not None)])
    pieces = ["rms_norm", "rotate", "rotate", "add_norm", "apply_gate"]
    assert calls == (pieces if linear is OtherLinear else ["project_qkv", "compute_layer_output"]) * 2
    for wanted, found in zip(*results, strict=True):
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert "forward" not in model.model.layers[0].__dict__


def test_layers_that_somebody_changed_are_not_fused() -> None:
    model = tiny()
    first, second = model.model.layers[:2]
    first.mlp.register_forward_hook(lambda *_: None)
    with use_fused_layers(model, tree.tree_attention):
        assert "forward" not in first.__dict__ and "forward" in second.__dict__
        with use_fused_layers(
            model, tree.tree_attention
        ):  # a second time: nothing is left to do, or to take back
            pass
        assert "forward" in second.__dict__


def test_nodes_of_like_length_go_together_whatever_their_level() -> None:
    nodes = [TreeNode(0, 155, 0, -1, 0)]
    for number, length in enumerate([40, 31, 29, 4, 25, 5, 3, 4, 17, 2]):
        start = nodes[-1].start + nodes[-1].length
        nodes.append(TreeNode(start, length, 155, 0, 1) if number % 2 else TreeNode(start, length, 155, 0, 2))
    own = [part for part in plan_parts(nodes, torch.device("cpu")) if part.is_causal]
    assert [part.queries.num_rows for part in own] == [3, 8]  # a part for each level would be 3
    far_apart = [TreeNode(0, 4000, 0, -1, 0), *(TreeNode(4000 + 9 * n, 9, 4000, 0, 1) for n in range(200))]
    assert [
        part.queries.num_rows for part in plan_parts(far_apart, torch.device("cpu")) if part.is_causal
    ] == [
        1,
        200,
    ]


def test_long_nodes_are_padded_by_little() -> None:
    """Attention of a node takes its length squared: with padding at most 16 / 9 of that."""
    lengths = [2000, 1500, 1499, 1000, 999, 700, 300, 299, 200, 100, 100]
    starts = np.cumsum([0, *lengths])
    nodes = [TreeNode(int(start), length, 0, -1, 0) for start, length in zip(starts, lengths, strict=False)]
    rows = [[nodes[number].length for number in part] for part in _group_nodes(nodes)]
    assert sorted(length for row in rows for length in row) == sorted(lengths)
    assert rows[0] == [2000, 1500] and all(min(row) >= 3 / 4 * max(row) for row in rows if max(row) > 256)
    assert rows[-1] == [200, 100, 100]  # short ones may be
