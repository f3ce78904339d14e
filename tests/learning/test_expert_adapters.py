"""Adapters of mixtures of experts: what they change, merged weights, and clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.kits.compat import compare_with_forward, frozen_matrices, tree_rows
from tests.kits.engine import tiny
from tests.kits.families import BY_KEY
from tests.kits.learner import far, gradients, make_learner, row_gradients, weighted, weighted_part
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.publishing import Publisher
from TrainingFactory.learning.routers import find_routers
from TrainingFactory.sampling import NativeEngine


def adapted(family: str, **options: Any) -> Any:
    return add_lora(BY_KEY[family].build(), r=4, alpha=8, **options)


@pytest.mark.parametrize(
    ("family", "experts", "frozen"),
    [
        ("qwen3_moe", None, []),
        ("qwen3_moe", False, ["experts", "routers"]),
        ("glm4_moe", True, ["dense MLPs", "shared experts"]),
        ("gpt_oss", None, ["experts", "routers"]),
        ("gpt_oss", True, ["routers"]),
        ("granitemoe", True, ["routers"]),
        ("lfm2_moe", True, ["convolutions", "routers"]),
        # Families whose default failed: a router that returns two tensors, layers that PEFT rejects.
        ("llama4", None, ["experts", "routers"]),
        ("falcon_h1", None, ["convolutions", "out_proj"]),
        ("nemotron_h", True, ["convolutions", "out_proj", "routers"]),
    ],
)
def test_layers_without_an_adapter(family: str, experts: bool | None, frozen: list[str]) -> None:
    assert frozen_matrices(adapted(family, experts=experts)) == frozen


def test_adapter_of_experts_is_trained_sampled_and_published(tmp_path: Path) -> None:
    model = adapted("gpt_oss", experts=True)
    learner = make_learner(model)
    learner.update(make_batch(tree_rows()), weighted)
    names = [name for name, weight in model.named_parameters() if ".experts." in name and "lora_B" in name]
    assert len(names) == 8  # two fused weights in each of four layers
    assert all(model.get_parameter(name).abs().max() > 0 for name in names)
    model.eval()
    compare_with_forward(model, NativeEngine(model, slots=2, max_length=256), episodes=1)
    publisher = Publisher(learner)  # full weights: engines have no adapters for experts
    weights = publisher.publish(1)
    assert weights.kind == "full"
    ids = torch.tensor([tree_rows()[0].token_ids])
    published = AutoModelForCausalLM.from_pretrained(weights.folder)
    with torch.no_grad():
        torch.testing.assert_close(published(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    publisher.close()
    model.save_pretrained(tmp_path)  # and read back by PEFT
    again = type(model).from_pretrained(BY_KEY["gpt_oss"].build(), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_auxiliary_loss_under_an_adapter_of_experts_and_routers() -> None:
    base, rows = tiny("moe"), tree_rows()
    model = add_lora(base, r=4, alpha=8)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data += 0.05 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(len(name))
            )
    expected = row_gradients(model, rows, weighted_part)
    routers = find_routers(base, None)
    assert routers is not None
    logits: list[list[torch.Tensor]] = []
    for row in rows:
        with routers.record_routing() as routing:
            model(torch.tensor([row.token_ids]), use_cache=False)
        logits.append(routing.logits)
    probabilities = torch.cat([layer.softmax(-1) for row in logits for layer in row])
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2).indices, 1.0)
    (0.5 * 4 * (chosen.mean(0) * probabilities.mean(0)).sum()).backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            expected[name] = expected.get(name, torch.zeros_like(param)) + param.grad
    model.zero_grad()
    learner = make_learner(model, router_aux_loss=0.5)
    assert far(gradients(learner, make_batch(rows, 120)), expected) < 1e-4


@pytest.mark.parametrize(
    ("family", "options", "key"),
    [
        ("qwen3_moe", {"dropout": 0.1}, "lora.dropout=0.1"),
        ("qwen3_moe", {"dora": True}, "lora.dora=true"),
        (
            "qwen3_moe",
            {"dropout": 0.1, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
            "lora.dropout=0.1",
        ),
        ("gpt_oss", {"dropout": 0.1, "experts": True}, "lora.dropout=0.1"),
        ("qwen3", {"experts": True}, "lora.experts is true"),
    ],
)
def test_invalid_options_of_expert_adapters(family: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        adapted(family, **options)


def test_dropout_without_experts() -> None:
    assert frozen_matrices(adapted("qwen3_moe", dropout=0.1, experts=False)) == ["experts", "routers"]
