"""Mixtures of experts: the auxiliary loss against the model's own, and the loads of the experts."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kits.compat import tree_rows
from tests.kits.families import BY_KEY
from tests.kits.learner import far, gradients, make_learner, row_gradients, weighted, weighted_part
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.routers import summarize_loads
from TrainingFactory.models import load_model
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.types import Sample

COEFFICIENT = 0.5
LAYERS = 2


def build(family: str) -> Any:
    return BY_KEY[family].build(num_hidden_layers=LAYERS)


def padded_batch(rows: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row once, padded to the longest: what a trainer without packing computes. ids, attention mask: [n, T]"""
    longest = max(len(row.token_ids) for row in rows)
    ids = torch.tensor([row.token_ids + [0] * (longest - len(row.token_ids)) for row in rows])
    mask = torch.tensor([[1] * len(row.token_ids) + [0] * (longest - len(row.token_ids)) for row in rows])
    return ids, mask


def own_gradients(model: Any, rows: list[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """The model's own auxiliary loss over the padded batch, and the gradients of it and of the task's loss."""
    expected = row_gradients(model, rows, weighted_part)
    ids, mask = padded_batch(rows)
    aux_loss = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    (COEFFICIENT * aux_loss).backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            expected[name] = expected.get(name, torch.zeros_like(param)) + param.grad
    model.zero_grad()
    return float(aux_loss.detach()), expected


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "gpt_oss",
        *(pytest.param(key, marks=pytest.mark.slow) for key in ("mixtral", "granitemoe")),
    ],
)
def test_auxiliary_loss_and_its_gradient_are_the_models_own_over_unpacked_rows(family: str) -> None:
    model, rows = build(family), tree_rows()
    expected_loss, expected = own_gradients(model, rows)
    learner = make_learner(model, router_aux_loss=COEFFICIENT)
    assert learner.sharing
    for budget in (
        100_000,
        120,
    ):  # one pack, in which tokens of common prefixes are computed once; several packs
        batch = make_batch(rows, budget)
        assert (len(batch.packs) > 1) == (budget == 120)
        assert far(gradients(learner, batch), expected) < 1e-4
    metrics = learner.update(make_batch(rows, 120), weighted)
    assert metrics["router_aux_loss"] == pytest.approx(expected_loss, rel=1e-5)


def test_rows_one_by_one_and_checkpointing_give_the_same_gradient() -> None:
    model, rows = build("qwen3_moe"), tree_rows()
    expected = own_gradients(model, rows)[1]
    learner = make_learner(model, router_aux_loss=COEFFICIENT, gradient_checkpointing=True)
    assert far(gradients(learner, make_batch(rows, 120)), expected) < 1e-4
    learner.sharing = False
    assert far(gradients(learner, make_batch(rows, 200, sharing=False)), expected) < 1e-4


@torch.no_grad()
def counted_loads(model: Any, rows: list[Sample]) -> np.ndarray:
    """The tokens of each expert and layer, by the indices that the routers return for one row at a time."""
    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    counts = [Counter[int]() for _ in gates]
    hooks = [
        gate.register_forward_hook(
            lambda _, __, output, count=count: count.update(output[2].flatten().tolist())
        )
        for gate, count in zip(gates, counts, strict=True)
    ]
    for row in rows:
        model(torch.tensor([row.token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.array([[count[expert] for expert in range(8)] for count in counts])


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_loads_of_the_experts_count_every_row(family: str) -> None:
    model, rows = build(family), tree_rows()
    bias_name = "e_score_correction_bias"
    for name, bias in model.named_buffers():
        if name.endswith(bias_name):
            bias[3] = 100.0  # chosen by every token
    loads = counted_loads(model, rows)
    biases = {name: bias.clone() for name, bias in model.named_buffers() if name.endswith(bias_name)}
    assert bool(biases) == (family == "glm4_moe")
    learner = make_learner(model)
    metrics = learner.update(make_batch(rows, 120), weighted)
    tokens = sum(len(row.token_ids) for row in rows)
    assert loads.sum() == 2 * tokens * len(loads)  # two experts each
    largest = [layer.max() / layer.mean() for layer in loads]
    assert metrics["experts/max_load"] == pytest.approx(np.mean(largest))
    assert metrics["experts/max_load_worst_layer"] == pytest.approx(max(largest))
    entropies = [-sum(n / layer.sum() * math.log(n / layer.sum()) for n in layer if n) for layer in loads]
    assert metrics["experts/entropy"] == pytest.approx(np.mean(entropies) / math.log(8))
    assert metrics["experts/unused"] == pytest.approx((loads == 0).mean())
    assert "router_aux_loss" not in metrics
    for name, bias in model.named_buffers():  # no loss trains it, and nothing else changes it
        assert name not in biases or torch.equal(bias, biases[name])


def test_metrics_of_even_and_of_one_sided_loads() -> None:
    even, one_sided = np.full((2, 4), 5.0), np.array([[8.0, 0, 0, 0]] * 2)
    assert summarize_loads(even) == pytest.approx(
        {"experts/max_load": 1, "experts/max_load_worst_layer": 1, "experts/entropy": 1, "experts/unused": 0}
    )
    assert summarize_loads(one_sided)["experts/max_load"] == 4
    assert summarize_loads(one_sided)["experts/unused"] == 0.75


def test_coefficient_is_the_models_own_unless_it_is_set(caplog: pytest.LogCaptureFixture) -> None:
    model = BY_KEY["gpt_oss"].build(num_hidden_layers=LAYERS, router_aux_loss_coef=0.9)
    own, off = (make_learner(model, router_aux_loss=value).routers for value in (None, 0.0))
    assert own is not None and own.coefficient == 0.9 and "router_aux_loss_coef=0.9" in caplog.text
    assert off is not None and off.coefficient == 0
    biased = make_learner(
        build("glm4_moe"), router_aux_loss=None
    ).routers  # balanced by a bias instead of a loss
    assert biased is not None and biased.coefficient == 0


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3"])
def test_coefficient_without_a_loss_of_the_family_is_an_error(family: str) -> None:
    with pytest.raises(ValueError, match=f"training.router_aux_loss is 0.01.*{family}"):
        make_learner(build(family), router_aux_loss=0.01)


def test_no_hooks_outside_an_update_and_none_on_dense_models() -> None:
    assert make_learner(router_aux_loss=None).routers is None
    model = build("qwen3_moe")
    make_learner(model, router_aux_loss=0.1).update(make_batch(tree_rows(), 120), weighted)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_bias_that_chooses_experts_stays_in_float32(tmp_path: Path) -> None:
    model = build("glm4_moe")
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias += 4 + torch.linspace(0, 0.01, len(bias))  # differences below the precision of bfloat16
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    loaded = dict(load_model(str(tmp_path), dtype="bfloat16", device="cpu").model.named_buffers())
    biases = {name: bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}
    assert biases and all(torch.equal(loaded[name], bias) for name, bias in biases.items())
