"""The projections of a fused layer; its kernels are in test_kernels.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear

from tests.kits.engine import tiny

KERNELS, FUSED = (f"TrainingFactory.sampling.gpu.{name}" for name in ("kernels", "fused"))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, where there is no Triton, which its kernels need and its projections do not."""
    monkeypatch.setitem(sys.modules, KERNELS, ModuleType(KERNELS))
    monkeypatch.delitem(sys.modules, FUSED, raising=False)
    yield importlib.import_module(FUSED)
    del sys.modules[FUSED]


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    names = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=names, init_lora_weights=False, **options)
    return get_peft_model(tiny(), config).eval()


def check(fused: Any, model: Any, *, opened: bool) -> None:
    layer = model.base_model.model.model.layers[0]
    attention, down = layer.self_attn, layer.mlp.down_proj
    several = [attention.q_proj, attention.k_proj, attention.v_proj]
    states, inner = torch.randn(5, attention.k_proj.in_features), torch.randn(5, down.in_features)
    onto = states.clone()
    with torch.no_grad():
        expected = [each(states) for each in several]
        for got, wanted in zip(fused.project(states, *several), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
        fused.project(inner, down, add_to=onto)
        torch.testing.assert_close(onto, states + down(inner), atol=1e-5, rtol=1e-4)
    assert (type(fused._split_lora(down).layer) is torch.nn.Linear) == opened


def test_projections_are_what_the_layers_make(fused: Any) -> None:
    model = adapted()
    check(fused, model, opened=True)
    attention = model.base_model.model.model.layers[0].self_attn
    first, second = (getattr(attention, name).lora_A["default"].weight for name in ("q_proj", "v_proj"))
    assert second.data_ptr() == first.data_ptr() + first.nbytes  # one product
    first.data = first.data * -0.5  # replaced: nothing stale is used
    check(fused, model, opened=True)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_do_more_are_called(fused: Any, options: dict[str, Any]) -> None:
    check(fused, adapted(**options), opened=False)


def test_adapters_that_are_off_merged_or_several_are_called(fused: Any) -> None:
    model = adapted()
    with model.disable_adapter():
        check(fused, model, opened=False)
    model.merge_adapter()
    check(fused, model, opened=False)
    model.unmerge_adapter()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    check(fused, model, opened=False)


def test_an_adapter_whose_factor_is_no_plain_layer_is_called(fused: Any) -> None:
    """It would be left out in silence."""
    model = adapted()
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.lora_A["default"].__class__ = type("Wrapped", (torch.nn.Linear,), {})
    check(fused, model, opened=True)
