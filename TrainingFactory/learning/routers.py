"""Routers of a mixture of experts: how many tokens each expert gets, and the auxiliary loss that balances them.

The loss is that of Switch Transformer as transformers defines it for a family: E * sum_e f_e * P_e, where f_e is the
share of tokens whose k most likely experts include e, P_e the mean probability of e, both over the tokens of all rows
and all layers. f_e has no gradient. If it is counted over the whole update first, the loss is a sum over tokens, and
its gradient does not depend on packs, micro-batches and processes. A token of a common prefix counts once per row."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.data.packing import Pack

log = logging.getLogger(__name__)

# Names of the second argument of transformers' expert modules.
INDEX_PARAMETERS = {"top_k_index", "router_indices"}
LARGE_COEFFICIENT = 0.1  # gpt-oss-20b's config has 0.9, which can exceed the loss of the algorithm


@dataclass(slots=True)
class Routing:
    """Outputs of all routers in one forward pass over T tokens, layer by layer."""

    # [T, E] with gradient; empty if the family has no loss.
    logits: list[torch.Tensor] = field(default_factory=list)
    experts: list[torch.Tensor] = field(default_factory=list)  # [T, k] experts that compute each token


class Routers:
    """The routers of `model`. `coefficient` is that of the auxiliary loss; None: the model's own."""

    def __init__(self, model: PreTrainedModel, coefficient: float | None) -> None:
        self.layers = find_expert_modules(model)
        self._top_k = _get_balanced_top_k(model)
        if coefficient and not self._top_k:
            raise ValueError(
                f"training.router_aux_loss is {coefficient:g}, but a {model.config.model_type!r} model defines no "
                "auxiliary loss. Remove the option"
            )
        text_config = model.config.get_text_config()  # third-party object
        default_coefficient = getattr(text_config, "router_aux_loss_coef", None) or 0.0
        if coefficient is None and self._top_k and default_coefficient > LARGE_COEFFICIENT:
            log.warning(
                "The model's config sets router_aux_loss_coef=%g, which is large next to the loss of an algorithm. Set "
                "training.router_aux_loss to choose another coefficient, such as 0.001", default_coefficient,
            )  # fmt: skip
        own_coefficient = default_coefficient if coefficient is None else coefficient
        self.coefficient = own_coefficient if self._top_k else 0.0
        self._gates, self._logits_index = _find_gates(model) if self.coefficient else ([], 0)

    @contextmanager
    def record_routing(self) -> Iterator[Routing]:
        """Record the routing of a forward pass inside the block. No hooks remain after the block. Therefore neither
        backward passes that run the layers again nor the sampler, which shares the modules, are recorded."""
        routing = Routing()

        def add_logits(module: Any, args: Any, output: Any) -> None:
            routing.logits.append(output[self._logits_index] if isinstance(output, tuple) else output)

        def add_experts(module: Any, args: Any, kwargs: Any) -> None:
            expert_ids = (
                args[1] if len(args) > 1 else next(kwargs[name] for name in INDEX_PARAMETERS & kwargs.keys())
            )
            routing.experts.append(expert_ids.detach())

        hooks = [gate.register_forward_hook(add_logits) for gate in self._gates]
        hooks += [
            module.register_forward_pre_hook(add_experts, with_kwargs=True) for module in self.layers.values()
        ]
        try:
            yield routing
        finally:
            for hook in hooks:
                hook.remove()

    def count_loads(self, routing: Routing, weights: np.ndarray) -> np.ndarray:
        """Return how many tokens each expert of each layer computes. [layers, E]"""
        counts = [_count_tokens_by_expert(experts, weights, module.num_experts) for experts, module in
                  zip(routing.experts, self.layers.values(), strict=True)]  # fmt: skip
        return torch.stack(counts).cpu().numpy()

    def count_balance(self, routing: Routing, weights: np.ndarray) -> np.ndarray:
        """Return the number of tokens for which each expert is among the k most likely ones, summed over layers; the
        last entry is the number of tokens times layers. [E + 1]"""
        expert_counts = torch.stack(
            [
                _count_tokens_by_expert(logits.topk(self._top_k).indices, weights, logits.shape[-1])
                for logits in routing.logits
            ]
        ).sum(0)
        return np.append(expert_counts.cpu().numpy(), weights.sum() * len(routing.logits))

    def compute_aux_loss(self, routing: Routing, weights: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        """Return a forward pass's share of the auxiliary loss, without its coefficient. `counts` are the
        `count_balance` of the whole update."""
        first_logits = routing.logits[0]
        load_shares = torch.from_numpy(counts[:-1] / counts[-1]).to(first_logits.device, torch.float32)
        token_weights = _pad_weights(weights, len(first_logits)).to(first_logits.device)
        layer_losses = [logits.float().softmax(-1) @ load_shares @ token_weights for logits in routing.logits]
        return torch.stack(layer_losses).sum() * (first_logits.shape[-1] / counts[-1])


def measure_changed_routes(first_routing: Routing, second_routing: Routing, num_tokens: int) -> float:
    """Return the share of (token, layer) pairs that two forward passes over the same tokens route to different experts.
    Only the first `tokens` of each layer count; padding may follow."""
    shares = [
        (first[:num_tokens].sort(-1).values != second[:num_tokens].sort(-1).values).any(-1).float().mean()
        for first, second in zip(first_routing.experts, second_routing.experts, strict=True)
    ]
    return float(torch.stack(shares).mean())


def find_routers(model: PreTrainedModel, coefficient: float | None) -> Routers | None:
    """Return the routers of a mixture of experts; None for other models."""
    return Routers(model, coefficient) if coefficient or find_expert_modules(model) else None


def count_token_rows(pack: Pack, shares_prefixes: bool) -> np.ndarray:
    """Return how many rows contain each token that a forward pass over the pack computes, in its order. Padding of rows
    counts 0; padding at the end may be missing."""
    if not len(pack.rows):  # another process's turn: a pack that must not count
        return np.zeros(len(pack.token_ids), np.float32)
    if shares_prefixes:
        row_counts, lengths = np.array([(node.num_rows, node.length) for node in pack.nodes]).T
        return np.repeat(row_counts, lengths).astype(np.float32)
    lengths = np.array([node.length for node in pack.nodes])
    return (np.arange(lengths.max()) < lengths[:, None]).astype(np.float32).ravel()


def summarize_loads(loads: np.ndarray) -> dict[str, float]:
    """Return the metrics of the experts' loads [layers, E]: the largest load over the mean, and the entropy over its
    maximum, both averaged over layers; and the share of experts without tokens."""
    shares = loads / np.maximum(loads.sum(1, keepdims=True), 1)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(1) / np.log(loads.shape[1])
    max_loads = shares.max(1) * loads.shape[1]
    return {
        "experts/max_load": float(max_loads.mean()),
        "experts/max_load_worst_layer": float(max_loads.max()),
        "experts/entropy": float(entropy.mean()),
        "experts/unused": float((loads == 0).mean()),
    }


def find_expert_modules(model: torch.nn.Module) -> dict[str, Any]:
    """Return the modules that compute the routed experts of a layer, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "num_experts")
        and INDEX_PARAMETERS & inspect.signature(module.forward).parameters.keys()
    }


def count_routing_biases(model: torch.nn.Module) -> int:
    """Return the number of routers with an untrained bias for the choice of experts."""
    names = [*dict(model.named_buffers()), *dict(model.named_parameters())]
    return sum(name.endswith("e_score_correction_bias") for name in names)


def _get_balanced_top_k(model: PreTrainedModel) -> int:
    """Return the number k of experts per token in the family's auxiliary loss; 0: transformers defines none, or another
    loss."""
    loss_function: Any = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    top_k, num_experts = getattr(model, "num_experts_per_tok", None), getattr(model, "num_experts", None)
    if loss_function is None or not top_k or not num_experts:
        return 0
    generator, num_tokens = torch.Generator().manual_seed(0), 10
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    counts = _count_tokens_by_expert(logits.topk(top_k).indices, np.ones(num_tokens, np.float32), num_experts)
    expected_loss = num_experts * float((counts / num_tokens * logits.softmax(-1).mean(0)).sum())
    if abs(expected_loss - float(loss_function((logits,), num_experts, top_k))) > 1e-4 * expected_loss:
        log.warning(
            "The auxiliary loss of a %r model is not supported; training without it", model.config.model_type
        )
        return 0
    return top_k


def _find_gates(model: PreTrainedModel) -> tuple[list[Any], int]:
    """Return the modules whose outputs transformers records as router logits, and the logits' place in them."""
    decoder: Any = model.base_model
    recorder = type(decoder)._can_record_outputs["router_logits"]
    gates = [
        module
        for name, module in model.named_modules()
        if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
    ]
    return gates, recorder.index


def _count_tokens_by_expert(experts: torch.Tensor, weights: np.ndarray, num_experts: int) -> torch.Tensor:
    """Return the weighted number of tokens by expert. `chosen` [T, k] -> [E]. Expert numbers of E and above are
    ignored."""
    experts = experts.reshape(-1, experts.shape[-1])
    values = _pad_weights(weights, len(experts)).to(experts.device)[:, None].expand_as(experts).reshape(-1)
    counts = values.new_zeros(num_experts + 1, dtype=torch.float64)
    return counts.index_add_(0, experts.reshape(-1).clamp(max=num_experts), values.double())[:num_experts]


def _pad_weights(weights: np.ndarray, num_tokens: int) -> torch.Tensor:
    return torch.from_numpy(np.pad(weights, (0, num_tokens - len(weights))))
