"""Layer inputs in CPU memory: the same gradients, and nothing else is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kits.engine import tiny
from tests.kits.families import BY_KEY
from tests.kits.learner import gradients, make_learner, ragged_rows, weighted
from TrainingFactory.assembly.memory import get_activation_bytes
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.training.preflight import check_options


@pytest.fixture
def copied_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of tensors that are copied to CPU memory."""
    shapes: list[tuple[int, ...]] = []
    original = torch.autograd.graph.save_on_cpu

    def recording(pin_memory: bool = False) -> Any:
        hooks = original(pin_memory)
        pack = hooks.pack_hook

        def record(tensor: torch.Tensor) -> Any:
            shapes.append(tuple(tensor.shape))
            return pack(tensor)

        hooks.pack_hook = record
        return hooks

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", recording)
    return shapes


@pytest.mark.parametrize("kind", ["dense", "adapter", "experts"])
def test_gradients_are_equal_and_only_layer_inputs_are_copied(
    kind: str, copied_shapes: list[tuple[int, ...]]
) -> None:
    model = {"dense": tiny, "adapter": lambda: add_lora(tiny(), r=4), "experts": BY_KEY["qwen3_moe"].build}[
        kind
    ]()
    options: dict[str, Any] = {"router_aux_loss": 0.1} if kind == "experts" else {}
    rows = ragged_rows(1)[:6]
    plain = gradients(make_learner(model, **options), make_batch(rows))
    options |= {"gradient_checkpointing": True, "activation_offload": True}
    learner, batch = make_learner(model, **options), make_batch(rows)
    assert not copied_shapes
    offloaded = gradients(learner, batch)
    assert offloaded.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(offloaded[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    tokens, width = len(batch.packs[0].token_ids), learner.causal_lm.config.hidden_size
    layers = learner.causal_lm.config.num_hidden_layers
    # Besides the layers' inputs, the operations of the final norm save theirs.
    large = [shape for shape in copied_shapes if shape == (1, tokens, width)]
    assert len(large) in (layers + 2, layers + 3)  # fewer if its weight is frozen
    assert len(batch.packs) == 1 and len(copied_shapes) <= len(large) + 6


def test_nothing_is_copied_without_the_option_or_a_gradient(copied_shapes: list[tuple[int, ...]]) -> None:
    batch = make_batch(ragged_rows(1)[:4])
    make_learner(gradient_checkpointing=True).update(batch, weighted)
    make_learner(gradient_checkpointing=True, activation_offload=True).annotate(batch, frozenset({"old"}))
    assert not copied_shapes


def test_estimate_of_offloaded_activations() -> None:
    config = BY_KEY["qwen3"].config()
    kept, offloaded = (get_activation_bytes(config, 1000, True, 2, offload) for offload in (False, True))
    assert kept - offloaded == 1000 * 2 * (config.num_hidden_layers - 2) * config.hidden_size
    assert get_activation_bytes(config, 1000, False, 2, True) == get_activation_bytes(config, 1000, False, 2)


def test_offload_needs_checkpointing() -> None:
    config = TrainingConfig(training={"activation_offload": True})
    with pytest.raises(ValueError, match=r"training\.gradient_checkpointing=true"):
        check_options(config, False)
