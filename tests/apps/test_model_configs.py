"""Sizes of the models that plans and forecasts know: against cards, built models and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.families import BY_KEY
from TrainingFactory.apps.doctor.examination import forecast
from TrainingFactory.apps.plan.planning import RunPlanner
from TrainingFactory.apps.plan.shapes import MODEL_CONFIGS, find_shape
from TrainingFactory.assembly.memory import mlp_width
from TrainingFactory.config import TrainingConfig
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.models.names import SUPPORTED_MODELS

# Active weights in billions, of cards that count the embeddings.
ACTIVE = {
    "Qwen/Qwen3-30B-A3B": 3.3,
    "Qwen/Qwen3-235B-A22B": 22.1,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 12.9,
}
SHORT_NAMES = {hub_id: name for name, hub_id in SUPPORTED_MODELS.items()}


QUICK = (
    "openai/gpt-oss-20b",
    "google/gemma-3-1b-it",
    "LiquidAI/LFM2-1.2B",
    "allenai/OLMoE-1B-7B-0125-Instruct",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODEL_CONFIGS],
)
def test_weights_of_a_model_are_those_of_its_card(name: str) -> None:
    shape = find_shape(name, None)
    assert shape.params / 1e9 == pytest.approx(MODEL_CONFIGS[name]["billions"], rel=0.011)
    assert shape.active / 1e9 == pytest.approx(ACTIVE.get(name, shape.active / 1e9), rel=0.02)
    assert 0 < shape.active <= shape.total
    assert find_shape("other", SHORT_NAMES[name])[1:] == shape[1:]  # --model-size


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "olmoe"])
def test_local_mixture_of_experts(family: str, tmp_path: Path) -> None:
    model: Any = BY_KEY[family].build()
    model.config.save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path), None)
    assert shape.total == sum(weight.numel() for weight in model.parameters())
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    assert (
        shape.total - shape.active == sum(weight.numel() for weight in experts) * 6 // 8
    )  # 2 of 8 are active
    for experts in (None, True, False):
        adapted = add_lora(BY_KEY[family].build(), r=3, experts=experts)
        size = sum(weight.numel() for name, weight in adapted.named_parameters() if "lora_" in name)
        assert shape.adapter(3, experts) == size
    assert shape.intermediate_size == mlp_width(model.config)


def test_width_of_the_mlp_counts_active_and_shared_experts() -> None:
    config = BY_KEY["glm4_moe"].config()  # 2 of 8 experts and a shared one, each 16 wide
    assert mlp_width(config) == 3 * 16
    assert mlp_width(BY_KEY["mixtral"].config()) == 2 * 48
    assert mlp_width(BY_KEY["qwen3"].config()) == 48


def test_plan_and_forecast_of_a_mixture_of_experts() -> None:
    config = TrainingConfig(model={"name": "qwen3-30b-a3b"}, lora={"enabled": True, "experts": False})
    facts = forecast(config, None, "h200").facts
    assert "30,532,122,624 weights, 3,3" in facts["model"]
    planner = RunPlanner(config, 8, "h200", None)
    moe, dense = planner.costs(1, 8.0), RunPlanner(config, 8, "h200", "32B").costs(1, 8.0)
    assert moe.compute < dense.compute / 8  # a token passes a tenth of the weights
    assert moe.read * planner.width == pytest.approx(
        dense.read * RunPlanner(config, 8, "h200", "32B").width * 30.53 / 32.76, rel=0.02
    )


def test_unknown_sizes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown size.*qwen3-30b-a3b"):
        find_shape("somebody/Model-8B-A1B", None)  # not that of a dense model with 8B
    config = BY_KEY["deepseek_v3"].config().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ValueError, match="latent attention"):
        find_shape(str(tmp_path), None)
