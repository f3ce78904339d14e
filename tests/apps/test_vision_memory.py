"""The doctor and the plan know what images cost: tokens, the tower's weights, encoded images and activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.vision_models import FAMILIES, picture, save_vision_model, vision_model
from TrainingFactory.apps.doctor.examination import examine, forecast
from TrainingFactory.apps.plan.planning import RunPlanner
from TrainingFactory.apps.plan.shapes import estimate_learner_bytes, find_shape
from TrainingFactory.apps.plan.workload import workload_from_groups
from TrainingFactory.assembly.memory import (
    estimate_model_memory,
    get_activation_bytes,
    get_attention_widths,
    get_image_bytes,
)
from TrainingFactory.common.image_tokens import find_image
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.tower_shape import ImageUse, measure_described_tower, measure_loaded_tower
from TrainingFactory.models.vision import CACHE_BYTES, find_tower_parameters
from TrainingFactory.runs.tracking import PlainLines
from TrainingFactory.types import Completion, Message, Task, Trajectory, Turn

SCREEN: dict[str, Any] = {
    "model": {"name": "builtin:tiny-vl", "max_length": 512},
    "environment": {"environment_id": "screen", "options": {"cell": 32}},
    "training": {"batch_size": 2, "group_size": 2, "max_steps": 3},
    "sampling": {"max_tokens": 6, "slots": 4},
    "data": {"count": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_has_the_sizes_of_the_model(family: str) -> None:
    loaded = vision_model(family)
    vision, tower = loaded.vision, measure_loaded_tower(loaded.model)
    assert vision is not None and tower is not None
    assert tower == measure_described_tower(loaded.model.config.to_dict())
    assert tower.num_weights == sum(weight.numel() for _, weight in find_tower_parameters(loaded.model))
    tokens = find_image(max(vision.get_image_ids(picture(1))))
    rows = vision._encode_cached(loaded.model, tokens)
    assert rows[0].numel() == tower.num_outputs
    if family in (
        "gemma3",
        "internvl",
        "gemma4",
        "gemma4_moe",
    ):  # their tower adds a token of its own, or pads
        return
    inputs = vision._make_inputs(loaded.model, tokens)
    pixels = inputs["pixel_values"]
    patch = loaded.model.config.vision_config.patch_size
    patches = len(pixels) if pixels.dim() == 2 else pixels.numel() / 3 / patch**2
    if family != "llava_onevision":  # unpads the tiles
        assert patches == tokens.num_tokens * tower.patches


def test_a_trained_tower_keeps_what_is_estimated() -> None:
    """The bytes that autograd saves in the tower, of tensors that are no weights."""
    loaded = vision_model("qwen3_vl")
    tower = measure_loaded_tower(loaded.model)
    assert tower is not None and loaded.vision is not None
    tokens = find_image(loaded.vision.get_image_ids(picture(2, 256, 256))[0])
    inputs = loaded.vision._make_inputs(loaded.model, tokens)
    weights = {weight.untyped_storage().data_ptr() for weight in loaded.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    trained = [weight for _, weight in find_tower_parameters(loaded.model)]
    try:
        for weight in trained:
            weight.requires_grad_(True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = loaded.model.model.get_image_features(**inputs, return_dict=True)
    finally:
        for weight in trained:
            weight.requires_grad_(False)
    assert output.pooler_output
    estimate = get_activation_bytes(tower, int(tokens.num_tokens * tower.patches), False, 4)
    assert 0.6 < sum(kept.values()) / estimate < 1.4


def test_bytes_of_images() -> None:
    config = TrainingConfig(model={"name": "builtin:tiny-vl", "image_tokens": 256})
    tower = measure_loaded_tower(vision_model("qwen3_vl").model)
    assert tower is not None
    images = ImageUse(tokens_per_image=100, token_share=0.5, num_images=3)
    parts = get_image_bytes(config, tower, images, 1000, 4)
    assert parts["encoded images"] == 4 * tower.num_outputs * (3 * 100 + 500)
    assert parts["vision activations"] == get_activation_bytes(
        tower._replace(num_hidden_layers=1), 400, False, 4
    )
    trained = config.model_copy(update={"model": config.model.model_copy(update={"train_tower": True})})
    assert get_image_bytes(trained, tower, images, 1000, 4)["vision activations"] == get_activation_bytes(
        tower, 2000, False, 4
    )
    most = get_image_bytes(config, tower, ImageUse.make_largest(256), 0, 4)
    assert most["encoded images"] == CACHE_BYTES


def test_memory_of_a_text_run_has_no_images() -> None:
    from TrainingFactory.models import load_model

    parts = estimate_model_memory(
        TrainingConfig(), load_model("builtin:tiny", device="cpu").model, frozenset(), 64
    )
    assert not parts.keys() & {"encoded images", "vision activations"}


def test_dry_run_reports_tokens_and_memory_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = examine(TrainingConfig(**SCREEN), PlainLines()).facts
    assert facts["images"].startswith("2 different ones of 32 tokens, the largest 128x64; at most 1 in a row")
    assert "encoded images" in facts["memory"] and "vision activations" in facts["memory"]
    capped = TrainingConfig(**SCREEN | {"model": SCREEN["model"] | {"image_tokens": 16}})
    assert " of 10 tokens" in examine(capped, PlainLines()).facts["images"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tokens"), [("qwen3_5", 12), ("qwen3_5_moe", 12), ("gemma4", 60), ("gemma4_moe", 60)]
)
def test_dry_run_of_a_family(
    family: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"name": save_vision_model(family, tmp_path / "model"), "max_length": 512}
    sections = SCREEN | {"model": model, "environment": {"environment_id": "charts"}}  # which need no tools
    facts = examine(TrainingConfig(**sections), PlainLines()).facts
    assert f"2 different ones of {tokens} tokens" in facts["images"]
    assert "encoded images" in facts["memory"] and "cache" in facts["memory"]


def test_widths_of_layers_that_differ() -> None:
    """Gemma 4 has 4 heads of 32 in windowed layers, of 64 in the others, where 26B-A4B has half of the keys."""
    widths = [
        get_attention_widths(vision_model(key).model.config.text_config) for key in ("gemma4", "gemma4_moe")
    ]
    assert widths == [((128 + 256) // 2, (64 + 128) // 2), ((128 + 256) // 2, (64 + 64) // 2)]


def test_a_recorded_run_shows_its_images() -> None:
    vision = vision_model("qwen3_vl").vision
    assert vision is not None
    first, second = (
        vision.get_image_ids(picture(1)),
        vision.get_image_ids(picture(2, 32, 32)),
    )  # 12 and 4 tokens
    turns = [
        Turn([1, *first], Completion([4], [0.0], "stop"), Message("assistant")),
        Turn([1, *first, 4, *second, 5], Completion([7], [0.0], "stop"), Message("assistant")),
    ]
    workload = workload_from_groups([[Trajectory(Task("t", "?"), "g", turns=turns)]])
    assert workload.prompt_image_tokens == 12 and workload.reply_image_tokens == 4
    assert workload.image_tokens == 8 and workload.images == pytest.approx(2)
    assert workload.image_share == 16 / 20


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl", "gemma4",
        *(pytest.param(key, marks=pytest.mark.slow) for key in ("qwen3_5", "qwen3_5_moe", "gemma4_moe")),
    ],
)  # fmt: skip
def test_forecast_counts_the_tower(family: str, tmp_path: Path) -> None:
    model = vision_model(family).model
    model.config.save_pretrained(tmp_path)
    seen = TrainingConfig(model={"name": str(tmp_path), "vision": True})
    tower = find_shape(str(tmp_path), None).tower
    assert tower is not None
    diagnosis = forecast(seen, None, "h100")
    assert f"a vision tower of {tower.num_weights:,}" in diagnosis.facts["model"]
    assert "model.image_tokens=1024" in diagnosis.facts["images"]
    blind = forecast(TrainingConfig(model={"name": str(tmp_path)}), None, "h100")
    assert "vision tower" not in blind.facts["model"] and "encoded images" not in blind.facts["memory"]
    shape = find_shape(str(tmp_path), None)
    train = TrainingConfig(model={"name": str(tmp_path), "vision": True, "train_tower": True})
    extra = estimate_learner_bytes(shape, train, frozenset(), 1)["optimizer"]
    assert extra - estimate_learner_bytes(shape, seen, frozenset(), 1)["optimizer"] == 8 * tower.num_weights
    assert shape.params + tower.num_weights == pytest.approx(
        sum(weight.numel() for weight in model.parameters()), rel=0.02
    )


def test_plan_counts_image_tokens(tmp_path: Path) -> None:
    config = TrainingConfig(**SCREEN)
    plain = RunPlanner(config, 1)
    seen = RunPlanner(config, 1, rates=["prompt_images=1", "reply_images=2", "image_tokens=100", "turns=3"])
    turns = float(seen.workload.turns.mean())
    assert seen.workload.prompt_tokens == plain.workload.prompt_tokens + 100
    assert seen.workload.image_share * seen.workload.num_tokens == pytest.approx(100 + 200 * (turns - 1))
    assert seen.images.num_images == pytest.approx((1 + 2 * (turns - 1)) * 3 * 2 * 2)
    assert plain.images.token_share == 0 and plain.figures["image_tokens"].value == 1024
    assert seen.estimate_costs(1, 2).prompts > plain.estimate_costs(1, 2).prompts
    trained = TrainingConfig(**SCREEN | {"model": SCREEN["model"] | {"train_tower": True}})
    rates = ["prompt_images=1", "image_tokens=100"]
    assert (
        RunPlanner(trained, 1, rates=rates).estimate_costs(1, 2).update
        > RunPlanner(config, 1, rates=rates).estimate_costs(1, 2).update
    )
    with pytest.raises(ValueError, match="runs with images use one GPU"):
        RunPlanner(config, 2)
    with pytest.raises(ValueError, match="the tower of Qwen3-4B is unknown"):
        RunPlanner(TrainingConfig(model={"name": "qwen3-4b", "vision": True}), 1)
