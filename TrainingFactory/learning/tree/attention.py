"""Attention over a prefix tree: every token sees the tokens before it on its own path to the top.

The layers around attention see each token of the tree once. Attention itself goes over pairs of a node and
what lies below it on a CPU (`parts.py`), and is one FlexAttention call on a GPU (`flex.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from TrainingFactory.data.packing import Pack
from TrainingFactory.learning.tree.flex import block_mask, flex
from TrainingFactory.learning.tree.parts import Part, attend, plan_parts

ATTENTION = "tfactory_tree"
# What models hand to their attention function and what changes its result.
NOT_HANDLED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


def plan_tree(pack: Pack, device: torch.device) -> list[Part] | Any:
    """Return what travels through the model as a keyword argument: parts, or on a GPU FlexAttention's block mask."""
    return block_mask(pack, device) if device.type == "cuda" else plan_parts(pack.nodes, device)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, d]
    key: torch.Tensor,  # [1, K, N, d]
    value: torch.Tensor,  # [1, K, N, dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    tfactory_tree: list[Part] | Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the tree: [1, N, H, dv]. Dropout of attention weights is not applied."""
    if odd := [name for name in NOT_HANDLED if kwargs.get(name) is not None]:
        raise ValueError(f"tree attention knows no {odd[0]}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if not isinstance(tfactory_tree, list):
        return flex(query, key, value, tfactory_tree, scale).transpose(1, 2), None
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(q, k, v, tfactory_tree, scale)[None], None


# No mask function goes with it: transformers builds no mask for an attention it has no mask function for.
AttentionInterface.register(ATTENTION, tree_attention)
