"""Optimisers and schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.kits.engine import tiny
from TrainingFactory.learning.optim import Muon, OptimizerOptions, make_optimizers, orthogonalize


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
def test_orthogonal_keeps_directions_and_levels_lengths(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonalize(matrix)
    sizes = torch.linalg.svdvals(made)
    assert float(sizes.min()) > 0.6 and float(sizes.max()) < 1.3
    # the same singular vectors as the matrix has
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ made @ right.T
    assert float((inside - torch.diag(torch.diagonal(inside))).abs().max()) < 1e-4
    assert torch.equal(orthogonalize(matrix * 1000), made) or torch.allclose(
        orthogonalize(matrix * 1000), made, atol=1e-3
    )


def test_a_step_of_muon_by_hand() -> None:
    weight = nn.Parameter(torch.zeros(6, 3))
    gradient = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    optimizer = Muon([weight], lr=0.1, momentum=0.9)
    for _ in range(2):
        weight.grad = gradient.clone()
        optimizer.step()
    # momentum 0.1 g, then 0.19 g; Nesterov 0.1 g + 0.9 m: all along g, so both steps are its orthogonal form
    torch.testing.assert_close(
        weight.detach(), -2 * 0.1 * math.sqrt(2) * orthogonalize(gradient), atol=1e-4, rtol=1e-3
    )


def test_who_is_trained_how() -> None:
    model = tiny("gqa_bias")
    names = {id(param): name for name, param in model.named_parameters()}

    def named(group: dict[str, Any]) -> set[str]:
        return {names[id(param)] for param in group["params"]}

    (adamw,) = make_optimizers(model.named_parameters(), OptimizerOptions(weight_decay=0.1))
    decayed, plain = adamw.param_groups
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert all("proj.weight" in name for name in named(decayed)) and len(named(decayed)) == 14
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= named(plain)
    assert named(decayed) | named(plain) == set(names.values())
    options = OptimizerOptions("muon", learning_rate=1e-3, matrix_learning_rate=0.02)
    rest, muon = make_optimizers(model.named_parameters(), options)
    assert isinstance(muon, Muon) and named(muon.param_groups[0]) == named(decayed)
    assert named(rest.param_groups[0]) == named(plain)
    assert (rest.param_groups[0]["peak_lr"], muon.param_groups[0]["peak_lr"]) == (1e-3, 0.02)


def test_schedules() -> None:
    constant = OptimizerOptions(warmup_steps=4)
    assert [constant.get_lr_factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = OptimizerOptions(schedule="linear", warmup_steps=2, total_steps=6)
    assert [linear.get_lr_factor(step) for step in range(8)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = OptimizerOptions(schedule="cosine", total_steps=4)
    wanted = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)]
    assert [cosine.get_lr_factor(step) for step in range(5)] == pytest.approx(wanted)


def test_clipping_and_the_rate_of_a_step() -> None:
    """One step of AdamW moves every weight by the rate, whatever the gradient's size; the schedule scales it."""
    from tests.kits.learner import ragged_rows, weighted
    from TrainingFactory.data.packing import make_batch
    from TrainingFactory.learning.learner import Learner

    model = tiny()
    options = OptimizerOptions(learning_rate=1e-3, warmup_steps=4, max_grad_norm=1e-3)
    learner = Learner(model, options)
    before = model.get_parameter("model.norm.weight").detach().clone()
    seen: list[float] = []
    optimizer = learner.optimizers[0]
    optimizer.register_step_pre_hook(lambda *_: seen.append(norm_of(model)))
    figures = learner.update(make_batch(ragged_rows(0)[:4]), weighted)
    assert figures["grad_norm"] > 1e-3 and seen == [pytest.approx(1e-3, rel=1e-3)]
    assert figures["learning_rate"] == pytest.approx(2.5e-4)
    moved = (model.get_parameter("model.norm.weight").detach() - before).abs()
    assert float(moved.median()) == pytest.approx(2.5e-4, rel=1e-2)


def norm_of(model: Any) -> float:
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
