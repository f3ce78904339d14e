"""Keep the keys and values of every slot, and the attention function that reads and writes them.

Legend: S slots, C capacity in tokens, N tokens of one forward, R dense rows, P rows of a part, T tokens of its
longest row, n tokens of it in all, H query heads, Hkv key heads, G = H / Hkv, d head size (of values dv).

One forward has a single flat row of N tokens: first the R dense rows, row i from slot i (one token each, or one and
the guesses that follow it), then the chunks being prefilled. Attention sees each part in its own shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from TrainingFactory.sampling.cache.view import refuse

ATTENTION = "tfactory_slots"


@dataclass(slots=True)
class Layer:
    """Caches one attention layer. Zeros, never uninitialised memory: a NaN would survive its mask."""

    keys: torch.Tensor  # [S+1, C, Hkv, d]; the last slot takes the writes of padding tokens
    values: torch.Tensor  # [S+1, C, Hkv, dv]

    def write(
        self, where: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor | None
    ) -> None:
        """Store [1, Hkv, N, d] at `where` = slot * C + position; `source`: the token of each, if not one to each."""
        for cache, new in ((self.keys, keys), (self.values, values)):
            tokens = new[0].transpose(0, 1).flatten(1)
            tokens = tokens if source is None else tokens.index_select(0, source)
            cache.flatten(0, 1).flatten(1).index_copy_(0, where, tokens)


@dataclass(slots=True)
class Shape:
    """Holds what the probe saw of one layer's keys and values."""

    queries: int  # query heads
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
            more = (0, 0, 0, 0, 0, capacity - self.capacity)  # zeros after the places of each slot
            layer.keys, layer.values = pad(layer.keys, more), pad(layer.values, more)
        self.capacity = capacity

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `sources` to `targets`; all are read before any is written."""
        for layer in self.layers:
            for cache in (layer.keys, layer.values):
                head = cache[:, :length]
                head.index_copy_(0, targets, head.index_select(0, sources))


@dataclass(slots=True)
class Part:
    """Holds one part of a forward: P rows of up to T tokens, each against its own slot; some may have none."""

    slots: torch.Tensor | slice  # [P], or a slice where that saves the copy
    mask: torch.Tensor  # [P, 1, T, width], additive
    width: int  # how many cached positions are looked at
    pad: torch.Tensor | None = None  # [P * T]: the flat token of each padded place; None: no padding
    unpad: torch.Tensor | None = None  # [n]: the padded place of each flat token
    trunk: int = 0  # how many leading positions hold the same tokens in all rows
    trunk_slot: int = 0  # the slot of one of these rows
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)  # the mask repeated for G query heads

    def seen(self, cache: torch.Tensor) -> torch.Tensor:
        """[S+1, C, Hkv, d] -> [P, Hkv, width - trunk, d]"""
        cache = cache[:, self.trunk : self.width]
        # `index_select` copies whole rows, several times as fast as indexing does
        rows = cache[self.slots] if isinstance(self.slots, slice) else cache.index_select(0, self.slots)
        return rows.transpose(1, 2)

    def fold(self, q: torch.Tensor) -> torch.Tensor:
        """[n, Hkv, G, d] -> [P, Hkv, G * T, d]: query heads that share a key head become query positions."""
        length = self.mask.shape[2]
        q = q if self.pad is None else q.index_select(0, self.pad)
        if length == 1:
            return q
        return q.unflatten(0, (-1, length)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    def unfold(self, out: torch.Tensor) -> torch.Tensor:
        """[P, Hkv, G * T, d] -> [n, Hkv, G, d]"""
        length = self.mask.shape[2]
        if length > 1:
            out = out.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        return out if self.unpad is None else out.index_select(0, self.unpad)

    def folded_mask(self, groups: int) -> torch.Tensor:
        """[P, 1, G * T, width], or what broadcasts to it"""
        if self.mask.shape[2] == 1:
            return self.mask
        if groups not in self._masks:
            self._masks[groups] = self.mask.repeat(1, 1, groups, 1)
        return self._masks[groups]


@dataclass(slots=True)
class Tiles:
    """Says who looks at which keys, for the GPU's kernel: each tile is up to `tokens` tokens at one slot's keys."""

    tokens: int
    count: int
    members: torch.Tensor | None = None  # [count * tokens] flat tokens, under 0: none; None: row i, at slot i
    slots: torch.Tensor | None = None  # [count]
    ends: torch.Tensor | None = None  # [count] keys from here on are not looked at
    begins: torch.Tensor | None = None  # [count] nor those before; None: 0


@dataclass(slots=True)
class StepContext:
    """Travels through the model as a keyword argument, from the engine to the attention function."""

    cache: SlotCache | None = None  # None: the probe that learns the shapes
    where: torch.Tensor | None = None  # flat cache positions to write
    source: torch.Tensor | None = None  # of each of them: the token that goes there; None: one to each
    dense: Part | None = None
    tokens: int = 0  # how many of the N belong to the dense part
    chunks: Part | None = None
    shapes: list[Shape] = field(default_factory=list)  # filled by the probe
    # With the GPU's kernel, in place of the two parts:
    attend: Callable[[torch.Tensor, Layer, StepContext, float], torch.Tensor] | None = None
    positions: torch.Tensor | None = None  # [N]
    rows: Tiles | None = None  # the dense part
    groups: Tiles | None = None  # rows of it that begin alike, at the keys that they share
    pieces: Tiles | None = None  # the chunks


def part_attention(query: torch.Tensor, layer: Layer, part: Part, scale: Any) -> torch.Tensor:
    """[1, H, n, d] -> [n, H, dv]"""
    q = query[0].transpose(0, 1).unflatten(1, (layer.keys.shape[2], -1))  # [n, Hkv, G, d]
    k, v = part.seen(layer.keys), part.seen(layer.values)
    mask = part.folded_mask(q.shape[2])[..., part.trunk :]
    if part.trunk:
        return trunk_attention(q, k, v, mask, layer, part, scale).flatten(1, 2)
    out = scaled_dot_product_attention(part.fold(q), k, v, attn_mask=mask, scale=scale)
    return part.unfold(out).flatten(1, 2)


def trunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, layer: Layer, part: Part, scale: Any
) -> torch.Tensor:  # fmt: skip
    """Read keys that all rows begin with once; two softmaxes are merged by the logarithms of their sums. CPU only."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    one = slice(part.trunk_slot, part.trunk_slot + 1)
    head = (cache[one, : part.trunk].transpose(1, 2) for cache in (layer.keys, layer.values))
    together = q.transpose(0, 1).flatten(1, 2)[None]  # [1, Hkv, n * G, d]
    shared, shared_sum = flash(together, *head, scale=scale)
    shared = shared[0].unflatten(1, (q.shape[0], -1)).transpose(0, 1)  # [n, Hkv, G, d]
    shared_sum = shared_sum[0].unflatten(1, (q.shape[0], -1)).transpose(0, 1)[..., None]  # [n, Hkv, G, 1]
    own, own_sum = flash(part.fold(q), k, v, attn_mask=mask, scale=scale)
    own, own_sum = part.unfold(own), part.unfold(own_sum[..., None])
    weight = torch.sigmoid(shared_sum - own_sum)  # float32, as the merge is
    return torch.lerp(own.float(), shared.float(), weight).to(own.dtype)


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
    """Store keys and values and attend, as transformers' attention function. [1, N, H, dv] out."""
    if tfactory_step is None:
        raise refuse(_kind(module), "it does not hand keyword arguments on to its attention function")
    step = tfactory_step
    if step.cache is None:
        return _probe(module, query, key, value, attention_mask, step, kwargs), None
    assert step.where is not None
    layer = step.cache.layers[int(module.layer_idx)]  # pyright: ignore[reportArgumentType]
    layer.write(step.where, key, value, step.source)
    if step.attend is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return step.attend(query[0].transpose(0, 1).contiguous(), layer, step, scale).unsqueeze(0), None
    parts = []
    if step.dense is not None:
        parts.append(part_attention(query[:, :, : step.tokens], layer, step.dense, scaling))
    if step.chunks is not None:
        parts.append(part_attention(query[:, :, step.tokens :], layer, step.chunks, scaling))
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
    sizes = query.shape[1], key.shape[1], key.shape[-1], value.shape[-1]
    step.shapes.append(Shape(*sizes, key.dtype, key.device))
    # A zero result of the right shape; what it means to the layers above does not matter here.
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


# No mask function goes with it: transformers builds no mask for an attention it has no mask function for.
AttentionInterface.register(ATTENTION, slot_attention)
