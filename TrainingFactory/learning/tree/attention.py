"""Attention over a prefix tree: every token attends to the tokens before it on its own path to the root.

All other layers compute each token of the tree once. On a CPU, attention runs over pairs of a node and its descendants
(`parts.py`); on a GPU it is one FlexAttention call (`flex.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from TrainingFactory.data.packing import Pack
from TrainingFactory.learning.tree.flex import block_mask, flex
from TrainingFactory.learning.tree.parts import TreePart, attend, plan_parts

ATTENTION = "tfactory_tree"
# Arguments that some models pass to their attention function and that would change its result.
UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


def plan_tree(pack: Pack, device: torch.device) -> list[TreePart] | Any:
    """Return the `tfactory_tree` argument that the model passes to its attention: parts, or a block mask on a GPU."""
    return block_mask(pack, device) if device.type == "cuda" else plan_parts(pack.nodes, device)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, d]
    key: torch.Tensor,  # [1, K, N, d]
    value: torch.Tensor,  # [1, K, N, dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    tfactory_tree: list[TreePart] | Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention outputs [1, N, H, dv]. Attention dropout is not applied."""
    if unsupported := [name for name in UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]:
        raise ValueError(f"tree attention does not support {unsupported[0]}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if not isinstance(tfactory_tree, list):
        return flex(query, key, value, tfactory_tree, scale).transpose(1, 2), None
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(q, k, v, tfactory_tree, scale)[None], None


# No mask function is registered: transformers then builds no mask for this attention.
AttentionInterface.register(ATTENTION, tree_attention)
