"""Updates on rows with images, against the model's own forward over pixels."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kits.vision_models import FAMILIES, own_inputs, picture, save_vision_model, vision_model
from TrainingFactory.common.event_loop import run
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models.chat import chat_format
from TrainingFactory.models.loading import load_model
from TrainingFactory.models.vision import find_tower_modules, find_tower_parameters, open_vision
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Message, PlacedImage, Sample, SamplingParams


def row(ids: list[int], trained: list[int], logprobs: list[float] | None = None) -> Sample:
    zeros = [0.0] * (len(ids) + len(trained))
    mask = [False] * len(ids) + [True] * len(trained)
    known = zeros if logprobs is None else [0.0] * len(ids) + logprobs
    return Sample(ids + trained, mask, known, zeros, zeros, [0] * len(zeros))


def make_rows(family: str) -> list[Sample]:
    """Rows that share text, an image, and nothing; one has an image between its trained tokens."""
    loaded = vision_model(family)
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids, vision=loaded.vision)

    def ask(seed: int, width: int = 64) -> list[int]:
        question = "What is it? Look at it and answer with the name."
        return chat.render([Message("user", question, images=[PlacedImage(11, picture(seed, width))])])

    first, rest = ask(0), list(range(300, 312))
    rows = [row(first, rest), row(first, [*rest[:6], 320, 321]), row(ask(1), rest), row(ask(2, 40), rest)]
    long = row(first + rest + ask(1, 40), rest)
    long.loss_mask[len(first) : len(first) + len(rest)] = [True] * len(rest)
    return [*rows, long]


def own_logprobs(family: str, model: Any, sample: Sample) -> torch.Tensor:
    """Return the log-probs of the trained tokens by the model itself."""
    ids = sample.token_ids
    logprobs = model(**own_inputs(vision_model(family), ids)).logits[0].log_softmax(-1)
    places = [place for place, trained in enumerate(sample.loss_mask) if trained]
    return torch.stack([logprobs[place - 1, ids[place]] for place in places])


def compare(family: str, train_tower: bool = False) -> None:
    """Compare log-probs and gradients of all rows together with the model's own, row by row."""
    loaded, rows = vision_model(family), make_rows(family)
    assert loaded.vision is not None
    model, own = copy.deepcopy(loaded.model), copy.deepcopy(loaded.model)
    vision = open_vision(model, loaded.vision.processor, loaded.tokenizer)
    if train_tower:
        vision.is_trained = True
        for each in (model, own):
            for _, weight in find_tower_parameters(each):
                weight.requires_grad_(True)
    learner = Learner(model, OptimizerOptions(), vision=vision)
    batch = make_batch(rows, 10_000, learner.sharing)
    (pack,) = batch.packs
    logprobs, _ = learner.compute_logprobs(pack)
    expected = {number: own_logprobs(family, own, rows[number]) for number in pack.rows.tolist()}
    for number, values in expected.items():
        actual = logprobs[torch.from_numpy(np.flatnonzero(pack.row == number))]
        torch.testing.assert_close(actual, values, rtol=1e-4, atol=1e-5)
    logprobs.sum().backward()
    torch.stack([values.sum() for values in expected.values()]).sum().backward()
    weights = dict(own.named_parameters())
    compared = 0
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            expected_grad = weights[name].grad
            assert expected_grad is not None
            atol = 1e-4 * max(1.0, float(expected_grad.abs().max()))  # Gemma 4 has large gradients
            torch.testing.assert_close(weight.grad, expected_grad, rtol=1e-3, atol=atol, msg=name)
            compared += 1
    assert compared > len(dict(model.named_parameters())) * (0.6 if train_tower else 0.2)
    shared = sum(len(sample.token_ids) for sample in rows) - len(pack.token_ids)
    assert (shared > 0) != loaded.vision.sees_whole_images


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_tree_with_images_equals_rows(family: str) -> None:
    compare(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_with_its_tower_equals_rows(family: str) -> None:
    compare(family, train_tower=True)


def check_agreement(family: str, model: Any, vision: Any) -> None:
    """The learner computes the log-probs that the engine has sampled with."""
    prompts = [sample.token_ids[: sample.loss_mask.index(True)] for sample in make_rows(family)[:3]]

    async def play() -> list[Sample]:
        engine = NativeEngine(model, slots=4, max_length=256, vision=vision)
        params = SamplingParams(max_tokens=8, seed=4)
        turns = [await engine.sample(ids, params) for ids in prompts]
        await engine.close()
        return [row(ids, turn.token_ids, turn.logprobs) for ids, turn in zip(prompts, turns, strict=True)]

    learner = Learner(model, OptimizerOptions(), vision=vision)
    batch = learner.annotate(make_batch(run(play), 10_000, learner.sharing), frozenset({"old"}))
    for pack in batch.packs:
        assert pack.old is not None
        np.testing.assert_allclose(pack.old, pack.logprobs, atol=1e-5)


def test_the_learner_agrees_with_the_engine() -> None:
    loaded = vision_model("qwen3_vl")
    check_agreement("qwen3_vl", copy.deepcopy(loaded.model), loaded.vision)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma4", "gemma4_moe"])
def test_the_learner_agrees_with_the_engine_in_four_bits(family: str, tmp_path: Path) -> None:
    name = save_vision_model(family, tmp_path)
    loaded = load_model(name, vision=True, quantization="4bit", dtype="float32", device="cpu")
    model = add_lora(loaded.model, r=4, excluded_modules=find_tower_modules(loaded.model))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                weight.normal_(0, 0.05)
    check_agreement(family, model, loaded.vision)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma4_moe"])
def test_an_adapter_is_on_the_language_model_alone(family: str) -> None:
    model = copy.deepcopy(vision_model(family).model)
    tower = {name for name, _ in find_tower_parameters(model)}
    assert any("vis" in name for name in tower)
    assert not any("language_model" in name for name in tower)
    adapted = add_lora(model, r=4, excluded_modules=find_tower_modules(model))
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert trained
    assert all("language_model" in name for name in trained)
