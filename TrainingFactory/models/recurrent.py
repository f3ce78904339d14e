"""Recurrent layers of hybrid models: gated delta rules, Mamba, lightning attention, short convolutions.

transformers gives such a layer a cache, from which it reads the state before its first token and in which it leaves the
state after its last one. `RowStates` takes the place of that cache, so that engine and learner decide where the rows of
a call begin. Installed kernels (flash-linear-attention, causal-conv1d, mamba-ssm) are chosen by transformers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

PASSIVE_LAYERS = {"mlp", "moe"}  # layer types without attention or state
# Attributes that attention layers and decoder layers do not have.
RECURRENT_ATTRIBUTES = ("conv_kernel_size", "slope_rate")
CACHE_ARGUMENTS = ("cache_params", "past_key_values")


class RowStates:
    """The states of the P rows of one call of a recurrent layer. Without states, the rows begin with this call's first
    token."""

    record_past = False

    def __init__(
        self, layer_index: int, conv: torch.Tensor | None = None, recurrent: torch.Tensor | None = None
    ) -> None:
        self.conv_states, self.recurrent_states = [conv], [recurrent]  # the last inputs [P, C, K]; [P, ...]
        self.layers = {layer_index: self}

    @property
    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.conv_states[0], self.recurrent_states[0]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return any(state is not None for state in self.tensors)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0
    ) -> torch.Tensor:
        """Store the last inputs [P, C, K], and return all inputs of the convolution [P, C, K + T]."""
        previous_inputs = self.conv_states[state_idx]
        inputs = conv_states if previous_inputs is None else torch.cat((previous_inputs, conv_states), -1)
        padding = max(conv_kernel_size - inputs.shape[-1], 0)
        self.conv_states[state_idx] = pad(inputs, (padding, 0))[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    # MiniMax names the cache of its lightning attention differently.
    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        self.recurrent_states[0] = state


def is_recurrent(module: nn.Module) -> bool:
    """Return whether the module is a layer that carries a state from token to token."""
    return isinstance(getattr(module, "layer_idx", None), int) and any(
        hasattr(module, attribute) for attribute in RECURRENT_ATTRIBUTES
    )


def find_recurrent_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_recurrent(module)]


def find_kernel_packages(model: nn.Module) -> list[str]:
    """Return the packages whose functions transformers has chosen for the recurrent layers, such as `fla`; without
    them, it computes the layers in torch."""
    packages = set[str]()
    for module in {type(layer).__module__ for layer in find_recurrent_layers(model)}:
        for function in vars(sys.modules[module]).values():
            if inspect.isfunction(function) and "implementation" in function.__code__.co_freevars:
                implementation = inspect.getclosurevars(function).nonlocals["implementation"]
                packages.add(implementation.__module__.partition(".")[0])
    return sorted(packages - {"transformers"})


@functools.cache
def get_cache_argument(layer_class: type[nn.Module]) -> str:
    """Return the name of the argument with which the layer's forward takes the cache."""
    parameters = inspect.signature(layer_class.forward).parameters
    return next(name for name in CACHE_ARGUMENTS if name in parameters)


def find_unsupported_types(model: Any, supported_types: set[str]) -> list[str]:
    """Return the model's layer types that are neither in `supported_types` nor types of recurrent layers."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    recurrent_indices = {layer.layer_idx for layer in find_recurrent_layers(model)}
    return sorted(
        {str(layer_type) for index, layer_type in enumerate(layer_types) if index not in recurrent_indices}
        - supported_types
        - PASSIVE_LAYERS
    )
