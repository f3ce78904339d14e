"""Attention over a prefix tree: every token attends to the tokens before it on its own path to the root.

All other layers compute each token of the tree once. On a CPU, attention runs over pairs of a node and its descendants
(`parts.py`; `reach.py` with a sliding window); on a GPU it is one FlexAttention call (`flex.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from TrainingFactory.data.packing import Pack
from TrainingFactory.learning.tree.flex import attend_on_gpu, make_block_mask
from TrainingFactory.learning.tree.parts import attend, plan_parts
from TrainingFactory.learning.tree.reach import AttentionRange, plan_ranged_parts

ATTENTION_NAME = "tfactory_tree"
# Arguments that some models pass to their attention function and that would change its result.
UNSUPPORTED_ARGUMENTS = ("position_bias", "head_mask")


class TreePlan:
    """The `tfactory_tree` argument that the model passes to its attention. The parts of the attention (on a GPU: a
    block mask) are planned once per attention range, when the first layer with this range runs."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self.pack, self.device = pack, device
        self._plans: dict[AttentionRange | None, Any] = {}

    def get_plan(self, attention_range: AttentionRange | None) -> Any:
        """Return the parts of the attention, or the block mask on a GPU, for layers with this attention range. None:
        queries attend to their whole path."""
        if attention_range is not None and attention_range.size > self.pack.positions.max():
            attention_range = None
        if attention_range not in self._plans:
            self._plans[attention_range] = self._make_plan(attention_range)
        return self._plans[attention_range]

    def _make_plan(self, attention_range: AttentionRange | None) -> Any:
        if self.device.type == "cuda":
            return make_block_mask(self.pack, self.device, attention_range)
        if attention_range is None:
            return plan_parts(self.pack.nodes, self.device)
        return plan_ranged_parts(self.pack.nodes, self.pack.positions, attention_range, self.device)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, d]
    key: torch.Tensor,  # [1, K, N, d]
    value: torch.Tensor,  # [1, K, N, dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    tfactory_tree: TreePlan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [H] logits of the attention sinks
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention outputs [1, N, H, dv]. Attention dropout is not applied."""
    if unsupported_arguments := [name for name in UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]:
        raise ValueError(f"tree attention does not support {unsupported_arguments[0]}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = _rescale_queries(module, query, tfactory_tree)
    attention_range = AttentionRange(sliding_window) if sliding_window else _get_configured_range(module)
    plan = tfactory_tree.get_plan(attention_range)
    if not isinstance(plan, list):
        return attend_on_gpu(query, key, value, plan, scale, softcap, s_aux).transpose(1, 2), None
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(q, k, v, plan, scale, softcap, s_aux)[None], None


def _get_configured_range(module: Any) -> AttentionRange | None:
    """Return the layer's attention range (sliding window or chunk) by its type in the config, for models that implement
    the range only in their mask. None: no limit."""
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    layer_type = layer_types[module.layer_idx] if layer_types and hasattr(module, "layer_idx") else None
    if layer_type == "sliding_attention":
        return AttentionRange(config.sliding_window)
    if layer_type == "chunked_attention":
        return AttentionRange(config.attention_chunk_size, is_chunked=True)
    return None


def _rescale_queries(module: Any, query: torch.Tensor, plan: TreePlan) -> torch.Tensor:
    """Replace the position-dependent scale of the queries. Llama 4 has scaled them by the index of the token, which in
    a prefix tree differs from its position."""

    def compute_scale(positions: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((positions.float() + 1) / module.floor_scale)) * module.attn_scale + 1

    positions = torch.from_numpy(plan.pack.positions).to(query.device)
    ratio = compute_scale(positions) / compute_scale(torch.arange(len(positions), device=query.device))
    return (query * ratio[:, None]).to(query.dtype)


# No mask function is registered: transformers then builds no mask for this attention.
AttentionInterface.register(ATTENTION_NAME, tree_attention)
