"""Cache of the keys and values of every slot, and the attention function that reads and writes it.

Legend: S slots, C capacity in tokens, N tokens of one forward, R dense rows, P rows of a part, T tokens of its
longest row, n all its tokens, H query heads, Hkv key heads, G = H / Hkv, d head size (of values dv).

One forward has a single flat row of N tokens: first the R dense rows, row i from slot i (one token each, or one token
and its guesses), then the chunks to prefill. Attention gets each part in its own shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from TrainingFactory.sampling.cache.view import unsupported_model

ATTENTION = "tfactory_slots"


@dataclass(slots=True)
class LayerCache:
    """Cache of one attention layer. Initialised with zeros, because NaN in unused memory would survive the mask."""

    keys: torch.Tensor  # [S+1, C, Hkv, d]; padding tokens are written to the last slot
    values: torch.Tensor  # [S+1, C, Hkv, dv]

    def write(
        self,
        cache_positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        source: torch.Tensor | None,
    ) -> None:
        """Write [1, Hkv, N, d] to `cache_positions` = slot * C + position. `source`: the token for each; None: token i
        for i."""
        for cache, new in ((self.keys, keys), (self.values, values)):
            tokens = new[0].transpose(0, 1).flatten(1)
            tokens = tokens if source is None else tokens.index_select(0, source)
            cache.flatten(0, 1).flatten(1).index_copy_(0, cache_positions, tokens)


@dataclass(slots=True)
class LayerShape:
    """Shape of one layer's keys and values, as the probe recorded it."""

    queries: int  # query heads
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device


class SlotCache:
    """Keys and values of S slots for every layer. The capacity grows on demand."""

    def __init__(self, slots: int, capacity: int, shapes: list[LayerShape]) -> None:
        self.slots = slots
        self.capacity = capacity
        self.layers = [
            LayerCache(*(torch.zeros(slots + 1, capacity, s.heads, size, dtype=s.dtype, device=s.device)
                    for size in (s.key_size, s.value_size)))
            for s in shapes
        ]  # fmt: skip

    def grow(self, capacity: int) -> None:
        for layer in self.layers:
            padding = (0, 0, 0, 0, 0, capacity - self.capacity)  # zeros at the end of each slot
            layer.keys, layer.values = pad(layer.keys, padding), pad(layer.values, padding)
        self.capacity = capacity

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `sources` to `targets`, reading all before writing any."""
        for layer in self.layers:
            for cache in (layer.keys, layer.values):
                head = cache[:, :length]
                head.index_copy_(0, targets, head.index_select(0, sources))


@dataclass(slots=True)
class AttentionPart:
    """One part of a forward: P rows of up to T tokens, each with its own slot; a row may be empty."""

    slots: torch.Tensor | slice  # [P], or a slice if that avoids a copy
    mask: torch.Tensor  # [P, 1, T, width], additive
    width: int  # number of cached positions that attention reads
    pad: torch.Tensor | None = None  # [P * T]: the flat token at each padded position; None: no padding
    unpad: torch.Tensor | None = None  # [n]: the padded position of each flat token
    trunk: int = 0  # length of the prefix that all rows share; 0: rows are read separately
    trunk_slot: int = 0  # slot of one of these rows
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)  # the mask repeated for G query heads

    def cached(self, cache: torch.Tensor) -> torch.Tensor:
        """[S+1, C, Hkv, d] -> [P, Hkv, width - trunk, d]"""
        cache = cache[:, self.trunk : self.width]
        # `index_select` copies whole rows, several times as fast as indexing
        rows = cache[self.slots] if isinstance(self.slots, slice) else cache.index_select(0, self.slots)
        return rows.transpose(1, 2)

    def fold(self, q: torch.Tensor) -> torch.Tensor:
        """[n, Hkv, G, d] -> [P, Hkv, G * T, d]: query heads with the same key head become query positions."""
        length = self.mask.shape[2]
        q = q if self.pad is None else q.index_select(0, self.pad)
        if length == 1:
            return q
        return q.unflatten(0, (-1, length)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    def unfold(self, output: torch.Tensor) -> torch.Tensor:
        """[P, Hkv, G * T, d] -> [n, Hkv, G, d]"""
        length = self.mask.shape[2]
        if length > 1:
            output = output.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        return output if self.unpad is None else output.index_select(0, self.unpad)

    def folded_mask(self, groups: int) -> torch.Tensor:
        """Return the mask as [P, 1, G * T, width], or in a shape that broadcasts to it."""
        if self.mask.shape[2] == 1:
            return self.mask
        if groups not in self._masks:
            self._masks[groups] = self.mask.repeat(1, 1, groups, 1)
        return self._masks[groups]


@dataclass(slots=True)
class Tiles:
    """Work of the GPU attention kernel: in each tile, up to `tokens` tokens attend to the keys of one slot."""

    tokens: int
    count: int
    members: torch.Tensor | None = None  # [count * tokens] flat tokens, negative: none; None: row i, slot i
    slots: torch.Tensor | None = None  # [count]
    ends: torch.Tensor | None = None  # [count] first key that is not read
    begins: torch.Tensor | None = None  # [count] first key that is read; None: 0


@dataclass(slots=True)
class StepContext:
    """Inputs of the attention function, which the engine passes through the model as a keyword argument."""

    cache: SlotCache | None = None  # None: the probe that records the shapes
    cache_positions: torch.Tensor | None = None  # [N] flat cache positions to write
    source: torch.Tensor | None = None  # [N] the computed token for each of them; None: token i for i
    dense: AttentionPart | None = None
    tokens: int = 0  # tokens of the dense part
    chunks: AttentionPart | None = None
    shapes: list[LayerShape] = field(default_factory=list)  # filled by the probe
    # With the GPU kernels, instead of the two parts:
    attend: Callable[[torch.Tensor, LayerCache, StepContext, float], torch.Tensor] | None = None
    positions: torch.Tensor | None = None  # [N]
    rows: Tiles | None = None  # the dense part
    groups: Tiles | None = None  # dense rows with a shared prefix, over the keys of that prefix
    pieces: Tiles | None = None  # the chunks


def part_attention(query: torch.Tensor, layer: LayerCache, part: AttentionPart, scale: Any) -> torch.Tensor:
    """[1, H, n, d] -> [n, H, dv]"""
    q = query[0].transpose(0, 1).unflatten(1, (layer.keys.shape[2], -1))  # [n, Hkv, G, d]
    k, v = part.cached(layer.keys), part.cached(layer.values)
    mask = part.folded_mask(q.shape[2])[..., part.trunk :]
    if part.trunk:
        return trunk_attention(q, k, v, mask, layer, part, scale).flatten(1, 2)
    output = scaled_dot_product_attention(part.fold(q), k, v, attn_mask=mask, scale=scale)
    return part.unfold(output).flatten(1, 2)


def trunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, layer: LayerCache, part: AttentionPart,
    scale: Any,
) -> torch.Tensor:  # fmt: skip
    """Attend to the rows' shared prefix once and to the rest per row; merge both by their log-sum-exps. CPU only."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    slot = slice(part.trunk_slot, part.trunk_slot + 1)
    prefix = (cache[slot, : part.trunk].transpose(1, 2) for cache in (layer.keys, layer.values))
    all_queries = q.transpose(0, 1).flatten(1, 2)[None]  # [1, Hkv, n * G, d]
    shared, shared_sum = flash(all_queries, *prefix, scale=scale)
    shared = shared[0].unflatten(1, (q.shape[0], -1)).transpose(0, 1)  # [n, Hkv, G, d]
    shared_sum = shared_sum[0].unflatten(1, (q.shape[0], -1)).transpose(0, 1)[..., None]  # [n, Hkv, G, 1]
    rest, rest_sum = flash(part.fold(q), k, v, attn_mask=mask, scale=scale)
    rest, rest_sum = part.unfold(rest), part.unfold(rest_sum[..., None])
    weight = torch.sigmoid(shared_sum - rest_sum)  # float32, like the merge
    return torch.lerp(rest.float(), shared.float(), weight).to(rest.dtype)


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
    """Write keys and values to the cache and attend, as transformers' attention function; return [1, N, H, dv]."""
    if tfactory_step is None:
        raise unsupported_model(_kind(module), "it does not pass keyword arguments to its attention function")
    step = tfactory_step
    if step.cache is None:
        return _probe(module, query, key, value, attention_mask, step, kwargs), None
    assert step.cache_positions is not None
    layer = step.cache.layers[int(module.layer_idx)]  # pyright: ignore[reportArgumentType]
    layer.write(step.cache_positions, key, value, step.source)
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
    """Record the shapes; raise ValueError for kinds of attention that are not supported."""
    kind = _kind(module)
    reasons = {
        "sliding_window": "its attention has a sliding window",
        "softcap": "its attention scores are soft-capped",
        "s_aux": "its attention has sinks",
        "position_bias": "its attention has a position bias",
    }
    for name, reason in reasons.items():
        if kwargs.get(name) is not None:
            raise unsupported_model(kind, reason)
    if attention_mask is not None:
        raise unsupported_model(kind, "it builds its own attention mask")
    if getattr(module, "layer_idx", None) != len(step.shapes):
        raise unsupported_model(kind, "its attention layers are not numbered consecutively")
    sizes = query.shape[1], key.shape[1], key.shape[-1], value.shape[-1]
    step.shapes.append(LayerShape(*sizes, key.dtype, key.device))
    # Zeros of the right shape, because the probe ignores the values.
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


# Without a registered mask function, transformers builds no mask for this attention.
AttentionInterface.register(ATTENTION, slot_attention)
