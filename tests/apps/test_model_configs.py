"""Sizes of the models that plans and forecasts know: against cards, built models and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.kits.families import BY_KEY
from TrainingFactory.apps.doctor.examination import forecast
from TrainingFactory.apps.plan.planning import RunPlanner
from TrainingFactory.apps.plan.shapes import MODEL_CONFIGS, count_shape, find_shape, get_sampler_bytes
from TrainingFactory.assembly.memory import get_mlp_width, get_state_bytes
from TrainingFactory.assembly.states import RecurrentSizes
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
    assert shape.active_weights / 1e9 == pytest.approx(ACTIVE.get(name, shape.active_weights / 1e9), rel=0.02)
    assert 0 < shape.active_weights <= shape.total_weights
    assert find_shape("other", SHORT_NAMES[name])[1:] == shape[1:]  # --model-size


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "olmoe"])
def test_local_mixture_of_experts(family: str, tmp_path: Path) -> None:
    model: Any = BY_KEY[family].build()
    model.config.save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path), None)
    assert shape.total_weights == sum(weight.numel() for weight in model.parameters())
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    assert (
        shape.total_weights - shape.active_weights == sum(weight.numel() for weight in experts) * 6 // 8
    )  # 2 of 8 are active
    for experts in (None, True, False):
        adapted = add_lora(BY_KEY[family].build(), r=3, experts=experts)
        size = sum(weight.numel() for name, weight in adapted.named_parameters() if "lora_" in name)
        assert shape.count_adapter(3, experts) == size
    assert shape.intermediate_size == get_mlp_width(model.config)


def test_width_of_the_mlp_counts_active_and_shared_experts() -> None:
    config = BY_KEY["glm4_moe"].config()  # 2 of 8 experts and a shared one, each 16 wide
    assert get_mlp_width(config) == 3 * 16
    assert get_mlp_width(BY_KEY["mixtral"].config()) == 2 * 48
    assert get_mlp_width(BY_KEY["qwen3"].config()) == 48


def test_plan_and_forecast_of_a_mixture_of_experts() -> None:
    config = TrainingConfig(model={"name": "qwen3-30b-a3b"}, lora={"enabled": True, "experts": False})
    facts = forecast(config, None, "h200").facts
    assert "30,532,122,624 weights, 3,3" in facts["model"]
    planner = RunPlanner(config, 8, "h200", None)
    moe, dense = planner.estimate_costs(1, 8.0), RunPlanner(config, 8, "h200", "32B").estimate_costs(1, 8.0)
    assert moe.compute < dense.compute / 8  # a token passes a tenth of the weights
    assert moe.read * planner.tp_size == pytest.approx(
        dense.read * RunPlanner(config, 8, "h200", "32B").tp_size * 30.53 / 32.76, rel=0.02
    )


def test_unknown_sizes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown size.*qwen3-30b-a3b"):
        find_shape("somebody/Model-8B-A1B", None)  # not that of a dense model with 8B
    config = BY_KEY["deepseek_v3"].config().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ValueError, match="latent attention"):
        find_shape(str(tmp_path), None)


def counted_flops(model: Any, tokens: int) -> int:
    """Return the FLOPs of the matrix products of a forward pass, without the head."""
    model.set_attn_implementation("eager")  # torch does not count the others on a CPU
    ids = torch.arange(tokens)[None] % 50
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False, logits_to_keep=1)
    return counter.get_total_flops() - 2 * model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "nemotron_h", "falcon_h1"])
def test_flops_of_a_hybrid_are_those_of_its_forward_pass(family: str) -> None:
    model: Any = BY_KEY[family].build()
    config = model.config.get_text_config()
    shape = count_shape(family, config.to_dict())
    for tokens in (128, 512):
        found = counted_flops(model, tokens)
        if (
            family == "qwen3_5"
        ):  # solves triangular systems, which torch does not count, instead of multiplying
            width = config.linear_key_head_dim + config.linear_value_head_dim
            found += tokens * 3 * config.linear_num_value_heads * 2 * 64 * width
        assert found == pytest.approx(shape.count_flops(tokens, tokens), rel=0.05)


def test_recurrent_layers_cost_the_same_at_any_context(tmp_path: Path) -> None:
    model: Any = BY_KEY["qwen3_5"].build()
    model.config.save_pretrained(tmp_path)
    shape, config = find_shape(str(tmp_path), None), model.config
    assert shape.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    per_token = (shape.count_flops(1, 3000) - shape.count_flops(1, 1000)) / 2000
    assert per_token == 4 * config.num_attention_heads * config.head_dim  # of one layer in four
    parts, longer = (get_sampler_bytes(shape, 1, 8, length) for length in (1000.0, 2000.0))
    assert parts["cache"] == 2 * 8 * 1000 * config.num_key_value_heads * config.head_dim * 2
    assert longer["cache"] == 2 * parts["cache"]
    assert longer["states"] == parts["states"] == get_state_bytes(config, 8, 2) > 0


def test_plan_and_forecast_of_a_hybrid() -> None:
    config = TrainingConfig(model={"name": "qwen3.5-9b"}, lora={"enabled": True})
    shape = find_shape("qwen3.5-9b", None)
    full_attention = shape._replace(layer_types=(), recurrent=RecurrentSizes())
    planner = RunPlanner(config, 8, rates=["prompt_tokens=20000"])
    hybrid = planner.estimate_costs(1, 8.0)
    planner.shape = full_attention
    dense = planner.estimate_costs(1, 8.0)
    assert hybrid.prompts < 0.8 * dense.prompts and hybrid.update < 0.8 * dense.update
    assert hybrid.row < 0.5 * dense.row  # reads the keys of 8 layers and 24 states, not the keys of 32
    facts = forecast(config, None, "h200").facts
    assert "states" in facts["memory"]
