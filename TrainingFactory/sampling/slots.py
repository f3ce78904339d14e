"""The keys and values of every slot, and the attention function that reads and writes them.

Legend: S slots, C capacity in tokens, N tokens of one forward, R dense rows, P chunk rows of up to T tokens,
H query heads, Hkv key heads, G = H / Hkv, d head size (keys and values may differ).

One forward has a single flat row of N tokens: first R dense rows of one token each, row i from slot i, then
the tokens of P chunks (prompts and replies being prefilled), one chunk after the other. Linear layers see
the flat tokens without padding; attention sees each part in its own shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from TrainingFactory.sampling.view import refuse

ATTENTION = "tfactory_slots"


@dataclass(slots=True)
class Layer:
    """The cache of one attention layer. Zeros, never uninitialised memory: a NaN would survive its mask."""

    keys: torch.Tensor  # [S+1, C, Hkv, d]; the last slot takes the writes of padding tokens
    values: torch.Tensor  # [S+1, C, Hkv, dv]

    def write(self, where: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store [1, Hkv, N, d] at the flat positions `where` [N] = slot * C + position."""
        for cache, new in ((self.keys, keys), (self.values, values)):
            cache.flatten(0, 1).flatten(1).index_copy_(0, where, new[0].transpose(0, 1).flatten(1))


@dataclass(slots=True)
class Shape:
    """What the probe saw of one layer's keys and values."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device


class SlotCache:
    """Keys and values of S slots for every layer. Capacity grows, up to what `max_length` needs."""

    def __init__(self, slots: int, capacity: int, shapes: list[Shape]) -> None:
        self.slots = slots
        self.capacity = capacity
        self.layers = [
            Layer(*(torch.zeros(slots + 1, capacity, s.heads, size, dtype=s.dtype, device=s.device)
                    for size in (s.key_size, s.value_size)))
            for s in shapes
        ]  # fmt: skip

    def grow(self, capacity: int) -> None:
        for layer in self.layers:
            layer.keys = self._wider(layer.keys, capacity)
            layer.values = self._wider(layer.values, capacity)
        self.capacity = capacity

    @staticmethod
    def _wider(old: torch.Tensor, capacity: int) -> torch.Tensor:
        new = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
        new[:, : old.shape[1]] = old
        return new

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """The first `length` positions of slots `sources` to `targets`; all read before any is written."""
        for layer in self.layers:
            for cache in (layer.keys, layer.values):
                head = cache[:, :length]
                head.index_copy_(0, targets, head.index_select(0, sources))


@dataclass(slots=True)
class Chunks:
    """The prefilling part of a forward."""

    slots: torch.Tensor | slice  # [P], or a slice where that saves the copy
    mask: torch.Tensor  # [P, 1, T, width], additive
    width: int  # how many cached positions are looked at
    pad: torch.Tensor | None = None  # [P * T]: the flat token of each padded place; None: no padding
    unpad: torch.Tensor | None = None  # [tokens]: the padded place of each flat token
    folded: dict[int, torch.Tensor] = field(default_factory=dict)  # the mask repeated for G query heads

    def folded_mask(self, groups: int) -> torch.Tensor:
        """[P, 1, G * T, width]"""
        if groups not in self.folded:
            self.folded[groups] = self.mask.repeat(1, 1, groups, 1)
        return self.folded[groups]


@dataclass(slots=True)
class StepContext:
    """Travels through the model as a keyword argument, from the engine to the attention function."""

    cache: SlotCache | None = None  # None: the probe that learns the shapes
    where: torch.Tensor | None = None  # [N] flat cache positions to write
    rows: int = 0  # R
    mask: torch.Tensor | None = None  # [R, 1, 1, width], additive
    width: int = 0  # how many cached positions the dense rows look at
    trunk: int = 0  # how many leading ones hold the same tokens in all of them
    trunk_slot: int = 0  # one of them
    chunks: Chunks | None = None
    shapes: list[Shape] = field(default_factory=list)  # filled by the probe


def dense_attention(query: torch.Tensor, layer: Layer, step: StepContext, scale: Any) -> torch.Tensor:
    """Row i against slot i: [1, H, R, d] -> [R, H, dv]. The query heads that share a key head become the
    query positions of one call, so that keys are neither repeated nor copied."""
    rows, heads, kv_heads = step.rows, query.shape[1], layer.keys.shape[2]
    q = query[0].transpose(0, 1).unflatten(1, (kv_heads, heads // kv_heads))  # [R, Hkv, G, d]
    k = layer.keys[:rows, : step.width].transpose(1, 2)  # [R, Hkv, width, d]
    v = layer.values[:rows, : step.width].transpose(1, 2)
    if step.trunk:
        return trunk_attention(q, k, v, step, scale).flatten(1, 2)
    return scaled_dot_product_attention(q, k, v, attn_mask=step.mask, scale=scale).flatten(1, 2)


def trunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepContext, scale: Any
) -> torch.Tensor:
    """The same, where all rows begin alike: the keys of the trunk are read once for all rows instead of once
    for each. Two softmaxes are merged by the logarithms of their sums. CPU only. [R, Hkv, G, d] -> same."""
    assert step.mask is not None
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows, trunk = q.shape[0], slice(0, step.trunk)
    one = slice(step.trunk_slot, step.trunk_slot + 1)
    together = q.transpose(0, 1).flatten(1, 2)[None]  # [1, Hkv, R * G, d]
    shared, shared_sum = flash(together, k[one, :, trunk], v[one, :, trunk], scale=scale)
    shared = shared[0].unflatten(1, (rows, -1)).transpose(0, 1)  # [R, Hkv, G, d]
    shared_sum = shared_sum[0].unflatten(1, (rows, -1)).transpose(0, 1)  # [R, Hkv, G]
    rest = slice(step.trunk, None)
    mask = step.mask[..., rest]
    own, own_sum = flash(q, k[:, :, rest], v[:, :, rest], attn_mask=mask, scale=scale)
    weight = torch.sigmoid(shared_sum - own_sum)[..., None]  # float32, as the merge is
    return torch.lerp(own.float(), shared.float(), weight).to(own.dtype)


def chunk_attention(query: torch.Tensor, layer: Layer, chunks: Chunks, scale: Any) -> torch.Tensor:
    """Chunks against their slots: [1, H, tokens, d] -> [tokens, H, dv]."""
    kv_heads = layer.keys.shape[2]
    groups = query.shape[1] // kv_heads
    q = query[0].transpose(0, 1)  # [tokens, H, d]
    if chunks.pad is not None:
        q = q.index_select(0, chunks.pad)
    length = chunks.mask.shape[2]
    q = q.reshape(-1, length, kv_heads, groups, q.shape[-1]).permute(0, 2, 3, 1, 4)  # [P, Hkv, G, T, d]
    k = layer.keys[chunks.slots, : chunks.width].transpose(1, 2)  # [P, Hkv, width, d]
    v = layer.values[chunks.slots, : chunks.width].transpose(1, 2)
    mask = chunks.folded_mask(groups)
    out = scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, scale=scale)
    out = out.unflatten(2, (groups, length)).permute(0, 3, 1, 2, 4)  # [P, T, Hkv, G, dv]
    out = out.flatten(2, 3).flatten(0, 1)
    return out if chunks.unpad is None else out.index_select(0, chunks.unpad)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, d]
    key: torch.Tensor,  # [1, Hkv, N, d]
    value: torch.Tensor,  # [1, Hkv, N, dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    tfactory_step: StepContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function. [1, N, H, dv] out."""
    if tfactory_step is None:
        raise refuse(_kind(module), "it does not hand keyword arguments on to its attention function")
    step = tfactory_step
    if step.cache is None:
        return _probe(module, query, key, value, attention_mask, step, kwargs), None
    assert step.where is not None
    layer = step.cache.layers[int(module.layer_idx)]  # pyright: ignore[reportArgumentType]
    layer.write(step.where, key, value)
    parts = []
    if step.rows:
        parts.append(dense_attention(query[:, :, : step.rows], layer, step, scaling))
    if step.chunks is not None:
        parts.append(chunk_attention(query[:, :, step.rows :], layer, step.chunks, scaling))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _kind(module: torch.nn.Module) -> str:
    return getattr(module.config, "model_type", type(module).__name__)


def _probe(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, step: StepContext, kwargs: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Note the shapes, and refuse what this attention does not do."""
    kind = _kind(module)
    reasons = {
        "sliding_window": "its attention has a sliding window",
        "softcap": "its attention scores are soft-capped",
        "s_aux": "its attention has sinks",
        "position_bias": "its attention has a position bias",
    }
    for name, reason in reasons.items():
        if kwargs.get(name) is not None:
            raise refuse(kind, reason)
    if attention_mask is not None:
        raise refuse(kind, "it builds an attention mask of its own")
    if getattr(module, "layer_idx", None) != len(step.shapes):
        raise refuse(kind, "its attention layers are not numbered one after the other")
    step.shapes.append(Shape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype, key.device))
    # A zero result of the right shape; what it means to the layers above does not matter here.
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


# No mask function goes with it: transformers builds no mask for an attention it has no mask function for.
AttentionInterface.register(ATTENTION, slot_attention)
