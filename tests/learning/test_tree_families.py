"""Model families whose layers have windows, sinks, capped scores, latent or shared keys: over a prefix tree they have
the logits and the gradients of all weights that their own attention has row by row."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from TrainingFactory.data.packing import Pack, pack
from TrainingFactory.learning import forward
from TrainingFactory.learning.forward import (
    get_output_head,
    get_sharing_problem,
    run_tree,
    use_trees,
)
from TrainingFactory.types import Sample

VOCABULARY = 97
WINDOW = 16
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "ministral": ("ministral", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "qwen2": ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "phi3": ("phi3", {"sliding_window": WINDOW, "partial_rotary_factor": 0.5}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "layer_types": MIXED}),
    "gemma4": (
        "gemma4_text",
        {
            "sliding_window": WINDOW, "layer_types": MIXED, "num_kv_shared_layers": 2, "global_head_dim": 16,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "gpt_oss": ("gpt_oss", {"sliding_window": WINDOW, **EXPERTS}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 12, "v_head_dim": 12}),
    "deepseek_v3, wide values": ("deepseek_v3", {**LATENT, "q_lora_rank": None, "v_head_dim": 24}),
    "llama4": (
        "llama4_text",
        {
            **EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 1, 1, 0], "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "floor_scale": 20,
        },
    ),
}  # fmt: skip
SLOW = ("qwen2", "phi3", "deepseek_v3, wide values", "llama4")


def make_model(family: str, **changes: Any) -> Any:
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(COMMON | options | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for weight in model.parameters():  # weights that leave no layer without effect
        weight.data.uniform_(0.5, 1.5) if weight.dim() == 1 else weight.data.normal_(0, 0.15)
    return model


def two_turn_rows() -> list[list[int]]:
    """A prompt, two first turns, two second turns after each; and a row of its own. All exceed the window."""
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    rows = [words(21)]
    prompt = words(37)
    for length in (25, 31):
        turn = prompt + words(length)
        rows += [turn + words(size) for size in (5, 40)]
    return rows


def one_pack(rows: list[list[int]]) -> Pack:
    samples = []
    for row in rows:
        zeros = [0.0] * len(row)
        samples.append(Sample(row, [False] + [True] * (len(row) - 1), zeros, zeros, zeros, [0] * len(row)))
    (only_pack,) = pack(samples, 100_000)
    return only_pack


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES],
)
def test_tree_equals_rows(family: str) -> None:
    model, rows = make_model(family), two_turn_rows()
    packed = one_pack(rows)
    assert max(node.level for node in packed.nodes) == 2
    loss_weights = [torch.randn(len(row) - 1, VOCABULARY) for row in rows]
    row_logits = []
    for row, weights in zip(rows, loss_weights, strict=True):
        logits = model(torch.tensor([row]), use_cache=False).logits[0, :-1]
        (logits * weights).sum().backward()
        row_logits.append(logits.detach())
    expected = gradients(model)
    assert get_sharing_problem(model) is None
    with use_trees(model):
        states = run_tree(model, packed)[forward._get_row_positions(packed)]
        logits = get_output_head(model)(states)
        (logits * torch.cat(loss_weights)).sum().backward()
    torch.testing.assert_close(logits, torch.cat(row_logits), rtol=1e-4, atol=1e-4)
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_a_wrong_window_is_noticed_however_long() -> None:
    model = make_model("ministral", sliding_window=4096)
    assert get_sharing_problem(model) is None
    layer = model.model.layers[0].self_attn
    layer.sliding_window = 2048  # the model's mask has 4096
    assert "over a tree differ" in (get_sharing_problem(model) or "")
    assert layer.sliding_window == 2048 and model.config.sliding_window == 4096
