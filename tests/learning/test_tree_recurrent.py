"""Recurrent layers over a prefix tree: each node begins with its parent's last state, values and gradients included."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.kits.families import BY_KEY
from tests.kits.learner import gradients, ragged_rows, row_gradients, sample, weighted_part, words
from TrainingFactory.data.packing import make_batch, pack
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.tree.recurrent import plan_segments
from TrainingFactory.types import Sample

SLOW = ["qwen3_next", "falcon_h1", "nemotron_h", "granitemoehybrid", "kimi_linear", "minimax"]


def build(key: str) -> Any:
    return BY_KEY[key].build()


def short_nodes() -> list[Sample]:
    """Rows that fork again after a single token: that node has no call of its own."""
    rng = random.Random(1)
    prompt, tokens = words(rng, 20), words(rng, 2)
    rows = [[*prompt, tokens[0], *words(rng, size)] for size in [1, 3] * 13]
    return [sample(rng, row, context=15) for row in [*rows, [*prompt, tokens[1]], prompt + words(rng, 70)]]


def compare(model: Any, rows: list[Sample], limit: float, **options: Any) -> None:
    learner = Learner(model, OptimizerOptions(learning_rate=1e-3), **options)
    assert learner.sharing
    model.eval()
    expected = row_gradients(model, rows, weighted_part)
    actual = gradients(learner, make_batch(rows))
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((actual[name] - gradient).abs().max()) < limit * scale, name


@pytest.mark.parametrize(
    "key", ["lfm2", "qwen3_5", *(pytest.param(key, marks=pytest.mark.slow) for key in SLOW)]
)
def test_gradients_equal_those_of_single_rows(key: str) -> None:
    # transformers computes delta rules and Mamba in float32, convolutions in the model's precision.
    model, limit = build(key), 2e-3
    if key == "lfm2":
        model, limit = model.double(), 1e-5
    compare(model, short_nodes(), limit)
    if key == "lfm2":
        compare(model, ragged_rows(0)[:9], limit)


def test_gradient_checkpointing_runs_the_same_segments_again() -> None:
    compare(build("lfm2").double(), short_nodes(), 1e-5, gradient_checkpointing=True)


def test_after_an_update_the_layers_are_the_model_s_own() -> None:
    model = build("lfm2")
    learner = Learner(model, OptimizerOptions(learning_rate=1e-3))
    ids = torch.tensor([words(random.Random(0), 12)])
    model.eval()
    before = model(input_ids=ids, use_cache=False).logits
    gradients(learner, make_batch(short_nodes()))
    model.eval()
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    assert not any("tfactory_segments" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("seed", range(3))
def test_segments_cover_every_token_once(seed: int) -> None:
    rows = ragged_rows(seed) if seed else short_nodes()
    (packed,) = pack(rows, 100_000)
    seen: set[int] = set()
    path: dict[int, list[int]] = {}  # the tokens behind the last state of a segment
    ids = packed.token_ids
    for batch in plan_segments(packed.nodes, torch.device("cpu")):
        width = batch.tokens.shape[1]
        assert width > 1
        for row, tokens in enumerate(batch.tokens.tolist()):
            before = path[batch.parents[row]] if batch.parents else []
            if batch.saved_segments:
                path[batch.saved_segments[row]] = before + tokens
            for kept in [at - row * width for at in batch.output_indices.tolist() if at // width == row]:
                history = ids[before + tokens[: kept + 1]]
                assert len(history) == packed.positions[tokens[kept]] + 1
        kept_tokens = batch.tokens.flatten()[batch.output_indices]
        assert torch.equal(kept_tokens, batch.output_tokens) and seen.isdisjoint(kept_tokens.tolist())
        seen.update(kept_tokens.tolist())
    assert seen == set(range(len(ids)))
