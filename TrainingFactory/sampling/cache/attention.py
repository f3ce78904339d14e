"""The attention function of the engine, which writes keys and values to the cache and reads them.

Legend: N tokens of one forward, R dense rows, P rows of a part, T tokens of its longest row, n all its tokens,
H query heads, Hkv key heads, G = H / Hkv, d head size (of values dv).

One forward has a single flat row of N tokens: first the R dense rows, row i from slot i (one token each, or one token
and its guesses), then the chunks to prefill. Attention gets each part in its own shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from TrainingFactory.sampling.cache.latent import absorb_keys, expand_values, is_latent
from TrainingFactory.sampling.cache.store import LayerCache, LayerShape, PagedCache
from TrainingFactory.sampling.cache.view import ATTENTION_NAME, make_error

# Of positions [P, T], a width and a window.
MakeMask = Callable[[torch.Tensor, int, int | None], torch.Tensor]


@dataclass(slots=True)
class AttentionPart:
    """Part of a forward: P rows of up to T tokens, each of another slot. Rows may be empty."""

    slots: torch.Tensor | slice  # [P], or a slice if that avoids a copy
    positions: torch.Tensor  # [P, T]
    width: int  # number of cached positions that attention reads
    make_mask: MakeMask
    pad: torch.Tensor | None = None  # [P * T]: the flat token at each padded position; None: no padding
    unpad: torch.Tensor | None = None  # [n]: the padded position of each flat token
    prefix_length: int = 0  # length of the prefix that all rows share; 0: rows are read separately
    prefix_slot: int = 0  # slot of one of these rows
    _masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def fold_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Pad and fold queries [n, Hkv, G, d] to [P, Hkv, G * T, d]: query heads with the same key head become query
        positions."""
        length = self.positions.shape[1]
        q = q if self.pad is None else q.index_select(0, self.pad)
        if length == 1:
            return q
        return q.unflatten(0, (-1, length)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    def unfold_output(self, output: torch.Tensor) -> torch.Tensor:
        """Undo `fold_queries` for an attention output: [P, Hkv, G * T, d] -> [n, Hkv, G, d]"""
        length = self.positions.shape[1]
        if length > 1:
            output = output.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        return output if self.unpad is None else output.index_select(0, self.unpad)

    def get_mask(self, num_groups: int, window: int | None) -> torch.Tensor:
        """Return the additive mask [P, 1, G * T, width], or in a shape that broadcasts to it, for all layers with this
        window."""
        if (num_groups, window) not in self._masks:
            mask = self.make_mask(self.positions, self.width, window)
            self._masks[num_groups, window] = mask if mask.shape[2] == 1 else mask.repeat(1, 1, num_groups, 1)
        return self._masks[num_groups, window]


@dataclass(slots=True)
class Tiles:
    """Tiles of the GPU attention kernel: in each, up to `tokens` tokens attend to the keys of one slot."""

    tokens: int
    num_tiles: int
    members: torch.Tensor | None = None  # [count * tokens] flat tokens, negative: none; None: row i, slot i
    slots: torch.Tensor | None = None  # [count]
    ends: torch.Tensor | None = None  # [count] first key that is not read
    begins: torch.Tensor | None = None  # [count] first key that is read; None: 0


@dataclass(slots=True)
class StepContext:
    """Inputs of the attention function, which the engine passes through the model as a keyword argument."""

    cache: PagedCache | None = None  # None: the probe that records the shapes
    cache_positions: torch.Tensor | None = None  # [tables, N] positions of the pool to write
    source_tokens: torch.Tensor | None = None  # [N] the computed token for each of them; None: token i for i
    dense: AttentionPart | None = None
    num_dense: int = 0  # tokens of the dense part
    chunks: AttentionPart | None = None
    shapes: list[LayerShape] = field(default_factory=list)  # filled by the probe
    recorded_keys: list[torch.Tensor] = field(
        default_factory=list
    )  # by the probe too, to find layers that share them
    # With the GPU kernels, instead of the two parts:
    attend: Callable[..., torch.Tensor] | None = None
    positions: torch.Tensor | None = None  # [N]
    row_tiles: Tiles | None = None  # the dense part
    group_tiles: Tiles | None = None  # dense rows with a shared prefix, over the keys of that prefix
    chunk_tiles: Tiles | None = None  # the chunks


def compute_part_attention(
    query: torch.Tensor, layer: LayerCache, cache: PagedCache, part: AttentionPart, scale: Any,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Compute the attention of one part of a forward from its queries: [1, H, n, d] -> [n, H, dv]"""
    q = query[0].transpose(0, 1).unflatten(1, (layer.keys.shape[2], -1))  # [n, Hkv, G, d]
    shape = layer.shape
    prefix_length = part.prefix_length if shape.is_plain else 0
    k, v = (  # [P, Hkv, width - prefix, d]
        cache.gather(layer, states, part.slots, prefix_length, part.width).transpose(1, 2)
        for states in (layer.keys, layer.values)
    )
    mask = part.get_mask(q.shape[2], shape.window)[..., prefix_length:]
    if prefix_length:
        return attend_with_prefix(q, k, v, mask, layer, cache, part, scale).flatten(1, 2)
    if shape.softcap is None and sinks is None:
        output = scaled_dot_product_attention(part.fold_queries(q), k, v, attn_mask=mask, scale=scale)
    else:
        output = attend_explicitly(part.fold_queries(q), k, v, mask, scale, shape.softcap, sinks)
    return part.unfold_output(output).flatten(1, 2)


def attend_explicitly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: Any, softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attend with soft-capped scores or with sinks [H], in float32: [P, Hkv, G * T, d] -> [P, Hkv, G * T, dv]."""
    scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        groups = sinks.float().view(q.shape[1], -1)  # [Hkv, G]
        sink_scores = groups.repeat_interleave(q.shape[2] // groups.shape[1], 1)[None, :, :, None]
        scores = torch.cat((scores, sink_scores.expand(len(q), -1, -1, -1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def attend_with_prefix(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, layer: LayerCache, cache: PagedCache,
    part: AttentionPart, scale: Any,
) -> torch.Tensor:  # fmt: skip
    """Attend to the rows' shared prefix once and to the rest per row; merge both by their log-sum-exps. CPU only."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    slot = slice(part.prefix_slot, part.prefix_slot + 1)
    prefix_states = (
        cache.gather(layer, states, slot, 0, part.prefix_length).transpose(1, 2)
        for states in (layer.keys, layer.values)
    )
    all_queries = q.transpose(0, 1).flatten(1, 2)[None]  # [1, Hkv, n * G, d]
    prefix_output, prefix_sum = flash(all_queries, *prefix_states, scale=scale)
    prefix_output = prefix_output[0].unflatten(1, (q.shape[0], -1)).transpose(0, 1)  # [n, Hkv, G, d]
    prefix_sum = prefix_sum[0].unflatten(1, (q.shape[0], -1)).transpose(0, 1)[..., None]  # [n, Hkv, G, 1]
    suffix_output, suffix_sum = flash(part.fold_queries(q), k, v, attn_mask=mask, scale=scale)
    suffix_output, suffix_sum = part.unfold_output(suffix_output), part.unfold_output(suffix_sum[..., None])
    prefix_weight = torch.sigmoid(prefix_sum - suffix_sum)  # float32, like the merge
    return torch.lerp(suffix_output.float(), prefix_output.float(), prefix_weight).to(suffix_output.dtype)


def attend_to_slots(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, d]
    key: torch.Tensor,  # [1, Hkv, N, d]
    value: torch.Tensor,  # [1, Hkv, N, dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    tfactory_step: StepContext | None = None,
    s_aux: torch.Tensor | None = None,  # sinks [H]
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write keys and values to the cache and attend, as transformers' attention function; return [1, N, H, dv]."""
    if tfactory_step is None:
        raise make_error(
            _get_model_type(module), "it does not pass keyword arguments to its attention function"
        )
    if is_latent(module):
        latent_query = absorb_keys(module, query)
        output = _attend(
            module, latent_query, key, value, attention_mask, scaling, tfactory_step, s_aux, kwargs
        )
        return expand_values(module, output), None
    return _attend(module, query, key, value, attention_mask, scaling, tfactory_step, s_aux, kwargs), None


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None, step: StepContext, sinks: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    if step.cache is None:
        return _record_shape(module, query, key, value, attention_mask, step, sinks, kwargs)
    assert step.cache_positions is not None
    layer_index: Any = module.layer_idx
    layer = step.cache.by_layer[layer_index]
    if step.cache.owners[layer_index] == layer_index:
        layer.write(step.cache_positions[layer.table], key, value, step.source_tokens)
    if step.attend is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return step.attend(query[0].transpose(0, 1).contiguous(), layer, step, scale, sinks).unsqueeze(0)
    part_outputs = []
    if step.dense is not None:
        queries = query[:, :, : step.num_dense]
        part_outputs.append(compute_part_attention(queries, layer, step.cache, step.dense, scaling, sinks))
    if step.chunks is not None:
        queries = query[:, :, step.num_dense :]
        part_outputs.append(compute_part_attention(queries, layer, step.cache, step.chunks, scaling, sinks))
    return (part_outputs[0] if len(part_outputs) == 1 else torch.cat(part_outputs)).unsqueeze(0)


def _get_model_type(module: torch.nn.Module) -> str:
    return getattr(module.config, "model_type", type(module).__name__)


def _record_shape(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, step: StepContext, sinks: torch.Tensor | None, kwargs: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Record the shapes of the layer's keys and values. Raise ValueError if the engine does not support its kind of
    attention."""
    model_type = _get_model_type(module)
    if kwargs.get("position_bias") is not None:
        raise make_error(model_type, "its attention has a position bias")
    if attention_mask is not None:
        raise make_error(model_type, "it builds its own attention mask")
    layer_index: Any = getattr(module, "layer_idx", None)
    if not isinstance(layer_index, int) or any(shape.layer >= layer_index for shape in step.shapes):
        raise make_error(model_type, "its attention layers are not numbered in call order")
    shape = LayerShape(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], key.dtype, key.device)
    shape.layer = layer_index
    shape.window = _get_window(module, layer_index, kwargs)
    shape.softcap, shape.has_sinks = kwargs.get("softcap"), sinks is not None
    shape.is_latent = is_latent(module)
    layer_keys = zip(step.shapes, step.recorded_keys, strict=True)
    shape.source_layer = next((owner.layer for owner, earlier_key in layer_keys if earlier_key is key), None)
    step.shapes.append(shape)
    step.recorded_keys.append(key)
    # Zeros of the right shape, because the probe ignores the values.
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


def _get_window(module: torch.nn.Module, layer_index: int, kwargs: dict[str, Any]) -> int | None:
    """Return the layer's sliding window: the argument that the layer passes to its attention function, else the value
    in its config. None: the layer has no window."""
    if kwargs.get("sliding_window") is not None:
        return int(kwargs["sliding_window"])
    config: Any = module.config
    layer_types = getattr(config, "layer_types", None)  # foreign object
    if layer_types and layer_types[layer_index] == "sliding_attention":
        return int(config.sliding_window)
    return None


# Without a registered mask function, transformers builds no mask for this attention.
AttentionInterface.register(ATTENTION_NAME, attend_to_slots)
