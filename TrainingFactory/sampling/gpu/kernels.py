"""Triton kernels of a step on a GPU. Each row reads its own keys once, and one kernel does the work of many small
kernels of transformers. They round at the same places as transformers.

Legend: H query heads, K key heads, G = H / K, D head size, V vocabulary, T tokens of a tile.
"""

# Triton is not installed beside the CPU build of torch; where it is, its types know neither constexpr nor num_warps.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from TrainingFactory.sampling.cache.attention import StepContext, Tiles
from TrainingFactory.sampling.cache.pages import PAGE
from TrainingFactory.sampling.cache.store import LayerCache

LOG2E = 1.4426950408889634
CHUNK_TOKENS = 2048  # tokens of the vocabulary that one program sums
LONG_SEQUENCE = 2048  # longest sequence, in tokens, from which on rows of one token read more keys at a time
PROGRAMS = 264  # two for each multiprocessor of a large device
# Small arrays are parts of one packed tensor with any alignment. Without `do_not_specialize_on_alignment`, Triton would
# compile kernels again, half a second each, for each new alignment.


@triton.jit
def _norm(x, add, weight, out, total, size, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    in_bounds, offset = column < size, tl.program_id(0) * size + column
    states = tl.load(x + offset, in_bounds, 0)
    if ADD:
        states = states + tl.load(add + offset, in_bounds, 0)
        tl.store(total + offset, states, in_bounds)
    upcast = states.to(tl.float32)
    upcast = upcast * tl.rsqrt(tl.sum(upcast * upcast) / size + epsilon)
    tl.store(
        out + row * size + column, upcast.to(states.dtype) * tl.load(weight + column, in_bounds, 0), in_bounds
    )


@triton.jit
def _zero_centred_norm(x, weight, out, size, stride, epsilon, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    raw = tl.load(x + row * stride + column, column < size, 0)
    upcast = raw.to(tl.float32)
    upcast = upcast * tl.rsqrt(tl.sum(upcast * upcast) / size + epsilon)
    upcast = upcast * (1.0 + tl.load(weight + column, column < size, 0).to(tl.float32))
    tl.store(out + row * size + column, upcast.to(raw.dtype), column < size)


@triton.jit
def _gate(gate, up, out, size, width, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offset = index // width * stride + index % width
    raw = tl.load(gate + offset, index < size, 0)
    upcast = raw.to(tl.float32)
    tl.store(
        out + index,
        (upcast * tl.sigmoid(upcast)).to(raw.dtype) * tl.load(up + offset, index < size, 0),
        index < size,
    )


@triton.jit
def _rope(x, cos, sin, weight, epsilon, heads, row, BLOCK: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """Return both halves of a token's heads [BLOCK, D / 2], normed and rotated, and their offsets and mask."""
    head, half = tl.arange(0, BLOCK)[:, None], tl.arange(0, D // 2)[None, :]
    offset, in_bounds = head * D + half, (head < heads) & (half < D)
    a, b = tl.load(x + offset, in_bounds, 0), tl.load(x + offset + D // 2, in_bounds, 0)
    if NORM:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        scale = tl.rsqrt((tl.sum(wide_a * wide_a, 1) + tl.sum(wide_b * wide_b, 1)) / D + epsilon)[:, None]
        a = (wide_a * scale).to(a.dtype) * tl.load(weight + half)
        b = (wide_b * scale).to(b.dtype) * tl.load(weight + half + D // 2)
    index_a, index_b = row * D + half, row * D + half + D // 2
    c, d = tl.load(cos + index_a), tl.load(cos + index_b)
    e, f = tl.load(sin + index_a), tl.load(sin + index_b)
    return a * c - b * e, b * d + a * f, offset, in_bounds


@triton.jit(do_not_specialize_on_alignment=["cache_positions"])
def _rotate(
    q, k, v, cos, sin, q_weight, k_weight, cache_positions, keys, values, epsilon, q_stride, stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, kind = tl.program_id(0), tl.program_id(1)
    target = tl.load(cache_positions + row).to(tl.int64) * (K * D)
    if kind == 0:
        a, b, offset, in_bounds = _rope(
            q + row * q_stride, cos, sin, q_weight, epsilon, H, row, BLOCK, D, NORM
        )
        tl.store(q + row * q_stride + offset, a, in_bounds)
        tl.store(q + row * q_stride + offset + D // 2, b, in_bounds)
    elif kind == 1:
        a, b, offset, in_bounds = _rope(k + row * stride, cos, sin, k_weight, epsilon, K, row, BLOCK, D, NORM)
        tl.store(keys + target + offset, a, in_bounds)
        tl.store(keys + target + offset + D // 2, b, in_bounds)
    else:
        full_offset = tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(
            values + target + full_offset,
            tl.load(v + row * stride + full_offset, full_offset < K * D),
            full_offset < K * D,
        )


@triton.jit(
    do_not_specialize=["tokens", "split_index", "splits", "T"],
    do_not_specialize_on_alignment=["positions", "members", "slots", "begins", "ends"],
)
def _attend(
    q, keys, values, out, sums, positions, members, slots, begins, ends, pages, sinks, tokens, per_slot, stride,
    scale, window, split_index, splits, T, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, CAP: tl.constexpr, FIXED: tl.constexpr, LISTED: tl.constexpr,
    BEGINS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    if LISTED:
        token = tl.load(members + tile * T + tl.minimum(m // G, T - 1))
        token = tl.where(m // G < T, token, -1)
        slot, end = tl.load(slots + tile), tl.load(ends + tile)
    else:
        token = tl.where(m // G < T, tile * T + m // G, -1)
        slot, end = tile, per_slot * P
    is_token = token >= 0
    position = tl.load(positions + token, is_token, -1)
    begin = tl.load(begins + tile) if BEGINS else 0
    end = tl.minimum(end, tl.max(position) + 1)
    if WINDOW:
        begin = tl.maximum(begin, tl.min(tl.where(is_token, position, 1 << 30)) + 1 - window)
    tokens_per_split = tl.cdiv(tl.cdiv(end - begin, splits), N) * N
    begin = (begin + split * tokens_per_split).to(tl.int32)
    end = tl.minimum(end, begin + tokens_per_split).to(tl.int32)
    query = (token * H + head * G + m % G) * D
    query_offset = token * stride + (head * G + m % G) * D
    rows = tl.load(q + query_offset[:, None] + d[None, :], is_token[:, None], 0)
    first_page = slot.to(tl.int64) * per_slot  # of the page table, or of the pool if pages are fixed
    base_offset = first_page * P * (K * D) + head * D
    max_score = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    output_sum = tl.zeros([M, D], tl.float32)
    for start in range(begin, end, N):
        key_position = start + n
        in_bounds = key_position < end
        if FIXED:
            cache_offset = base_offset + key_position * (K * D)
        else:
            page = tl.load(pages + first_page + key_position // P, in_bounds, 0).to(tl.int64)
            cache_offset = (page * P + key_position % P) * (K * D) + head * D
        k = tl.load(keys + cache_offset[None, :] + d[:, None], in_bounds[None, :], 0)
        scores = tl.dot(rows, k, input_precision="ieee") * scale
        if CAP > 0.0:  # `scale` includes 1 / CAP; tanh(x) = 2 sigmoid(2 x) - 1
            scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * (CAP * 1.4426950408889634)
        is_visible = in_bounds[None, :] & (key_position[None, :] <= position[:, None])
        if WINDOW:
            is_visible = is_visible & (key_position[None, :] > position[:, None] - window)
        scores = tl.where(is_visible, scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights, decay = tl.exp2(scores - safe_max[:, None]), tl.exp2(max_score - safe_max)
        v = tl.load(values + cache_offset[:, None] + d[None, :], in_bounds[:, None], 0)
        output_sum = output_sum * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total, max_score = total * decay + tl.sum(weights, 1), new_max
    if SINKS:  # only without PARTIAL, where `_merge` adds them
        sink = tl.load(sinks + head * G + m % G).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(sink - tl.where(max_score == float("-inf"), 0.0, max_score))
    output_sum = output_sum / tl.where(total > 0, total, 1.0)[:, None]
    if PARTIAL:
        query += (split_index + split) * tokens * H * D
        tl.store(sums + query // D, max_score + tl.log2(total), is_token)
    tl.store(out + query[:, None] + d[None, :], output_sum.to(out.dtype.element_ty), is_token[:, None])


@triton.jit(do_not_specialize=["tokens", "T", "count"], do_not_specialize_on_alignment=["begins"])
def _merge(
    parts, sums, out, begins, sinks, tokens, T, count, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    GROUPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge partial attention outputs by their log-sum-exps. Part 0 may be a group's shared prefix."""
    token, head, d = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, D)
    in_bounds, row = head < H, tl.program_id(0) * H + tl.arange(0, BLOCK)
    first_part: tl.constexpr = 1 if GROUPED else 0
    max_sum = tl.full([BLOCK], float("-inf"), tl.float32)
    for part in range(first_part, count):
        max_sum = tl.maximum(max_sum, tl.load(sums + part * tokens * H + row, in_bounds, 0.0))
    total, output_sum = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK, D], tl.float32)
    if GROUPED:
        is_grouped = tl.load(begins + token // T + 0 * head, in_bounds, 0) > 0
        group_sum = tl.load(sums + row, is_grouped, float("-inf"))
        max_sum = tl.maximum(max_sum, group_sum)
        total = tl.exp2(group_sum - max_sum)
        output_sum = total[:, None] * tl.load(parts + row[:, None] * D + d[None, :], is_grouped[:, None], 0.0)
    for part in range(first_part, count):
        weight = tl.exp2(tl.load(sums + part * tokens * H + row, in_bounds, 0.0) - max_sum)
        offset = (part * tokens * H + row)[:, None] * D + d[None, :]
        output_sum += weight[:, None] * tl.load(parts + offset, in_bounds[:, None], 0.0)
        total += weight
    if SINKS:
        total += tl.exp2(tl.load(sinks + head, in_bounds, 0.0).to(tl.float32) * 1.4426950408889634 - max_sum)
    output_sum = output_sum / total[:, None]
    tl.store(out + row[:, None] * D + d[None, :], output_sum.to(out.dtype.element_ty), in_bounds[:, None])


@triton.jit(do_not_specialize_on_alignment=["temperature", "masses"])
def _mass(logits, temperature, tops, masses, V, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * V + index, index < V, float("-inf")).to(tl.float32)
    if SCALED:
        row_temperature = tl.load(temperature + row).to(tl.float32)
        x = x / tl.where(row_temperature > 0, row_temperature, 1.0)
    chunk_max = tl.max(x)
    safe = tl.where(chunk_max == float("-inf"), 0.0, chunk_max)
    tl.store(tops + row * chunks + chunk, chunk_max)
    tl.store(masses + row * chunks + chunk, tl.sum(tl.exp(x - safe)))


@triton.jit(do_not_specialize_on_alignment=["temperature", "uniform", "masses"])
def _choose_tokens(
    logits, temperature, uniform, maxima, masses, out, V, chunks,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the chunk of the vocabulary, then the token in it, with float64 sums, like `picking.draw`."""
    row, c, index = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, CHUNK)
    chunk_maxima = tl.load(maxima + row * chunks + c, c < chunks, float("-inf"))
    max_logit = tl.max(chunk_maxima)
    mass = tl.load(masses + row * chunks + c, c < chunks, 0.0) * tl.exp(chunk_maxima - max_logit)
    mass = tl.where(c < chunks, mass, 0.0).to(tl.float64)
    chunk_ends = tl.cumsum(mass)
    total = tl.max(chunk_ends)
    target_mass = tl.load(uniform + row) * total
    chunk = tl.minimum(tl.sum((chunk_ends <= target_mass).to(tl.int32)), chunks - 1)
    mass_before = tl.max(tl.where(c < chunk, chunk_ends, 0.0))
    mass_share = (target_mass - mass_before) / tl.sum(tl.where(c == chunk, mass, 0.0))
    below_one = tl.full([], 1.0, tl.float64) - tl.full([], 2.0**-40, tl.float64)
    mass_share = tl.minimum(tl.maximum(mass_share, 0.0), below_one)
    row_temperature = 1.0
    if SCALED:
        row_temperature = tl.load(temperature + row).to(tl.float32)
        chunk = tl.where(row_temperature > 0, chunk, tl.argmax(chunk_maxima, 0))
    in_bounds = chunk * CHUNK + index < V
    x = tl.load(logits + row.to(tl.int64) * V + chunk * CHUNK + index, in_bounds, float("-inf")).to(
        tl.float32
    )
    if SCALED:
        x = x / tl.where(row_temperature > 0, row_temperature, 1.0)
    token_ends = tl.cumsum(tl.exp(x - tl.max(x)).to(tl.float64))
    token = tl.sum((token_ends <= mass_share * tl.max(token_ends)).to(tl.int32))
    if SCALED:
        token = tl.where(row_temperature > 0, token, tl.argmax(x, 0))
    token = tl.minimum(token, CHUNK - 1)
    chosen_logit = tl.sum(tl.where(index == token, x, 0.0))
    tl.store(out + row, tl.minimum(chunk * CHUNK + token, V - 1).to(tl.float64))
    tl.store(out + tl.num_programs(0) + row, (chosen_logit - max_logit).to(tl.float64) - tl.log(total))


# -- calls


def norm(x: torch.Tensor, module: Any, add: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of x + `add` [N, E], and the sum itself. Without `add`, the sum is x."""
    output, total = torch.empty_like(x), x if add is None else torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _norm[(len(x),)](
        x, add, module.weight, output, total, x.shape[1], module.variance_epsilon, add is not None, block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return output, total


def apply_zero_centred_norm(x: torch.Tensor, module: Any) -> torch.Tensor:
    """Return the RMSNorm of x [..., E] with the weights 1 + `module.weight`."""
    flat_x, output = x.reshape(-1, x.shape[-1]), x.new_empty(x.shape)
    block = triton.next_power_of_2(flat_x.shape[1])
    _zero_centred_norm[(len(flat_x),)](
        flat_x, module.weight, output, flat_x.shape[1], flat_x.stride(0), module.eps, block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return output


def apply_gate(first: torch.Tensor, up_states: torch.Tensor) -> torch.Tensor:
    """Return silu(first) * up_states; both may be columns of one tensor."""
    gated, size = first.new_empty(first.shape), first.numel()
    _gate[(triton.cdiv(size, 1024),)](first, up_states, gated, size, first.shape[1], first.stride(0), 1024)
    return gated


def norm_rotate_and_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], layer: LayerCache,
    cache_positions: torch.Tensor, norms: tuple[Any, Any],
) -> None:  # fmt: skip
    """Apply the norm and the rotary embedding to q [N, H * D] in place. Write k, with norm and rotary embedding, and v
    to the cache. q, k and v may be columns of one tensor."""
    heads, head_size = layer.keys.shape[2:]
    q_norm, k_norm = norms
    _rotate[(len(q), 3)](
        q, k, v, *cos_sin, q_norm and q_norm.weight, k_norm and k_norm.weight, cache_positions, layer.keys,
        layer.values, q_norm.variance_epsilon if q_norm else 0.0, q.stride(0), k.stride(0), q.shape[1] // head_size,
        heads, head_size, triton.next_power_of_2(max(q.shape[1] // head_size, heads)), q_norm is not None,
    )  # fmt: skip


def attend(
    q: torch.Tensor, layer: LayerCache, step: StepContext, scale: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the attention outputs [N, H, D] of the queries [N, H, D] over the cache."""
    output = q.new_empty(q.shape)
    num_dense = step.num_dense
    if step.row_tiles is not None:
        rows, group_tiles = step.row_tiles, step.group_tiles
        # A row's window has its own begin, and other rows may have released it.
        if layer.shape.window is not None:
            rows, group_tiles = replace(rows, begins=None), None
        programs = layer.keys.shape[2] * rows.num_tiles
        splits = min(8, triton.next_power_of_2(triton.cdiv(PROGRAMS, programs))) if programs < PROGRAMS else 1
        num_groups = int(group_tiles is not None)
        if num_groups + splits == 1:
            _run_tiles(q, layer, step, rows, scale, output, sinks)
        else:
            partial_outputs = q.new_empty(num_groups + splits, num_dense, *q.shape[1:], dtype=torch.float32)
            log_sums = q.new_empty(num_groups + splits, num_dense, q.shape[1], dtype=torch.float32)
            if group_tiles is not None:
                _run_tiles(q, layer, step, group_tiles, scale, partial_outputs, None, log_sums)
            _run_tiles(q, layer, step, rows, scale, partial_outputs, None, log_sums, num_groups, splits)
            _merge[(num_dense,)](
                partial_outputs, log_sums, output, rows.begins, sinks, num_dense, rows.tokens, num_groups + splits,
                *q.shape[1:], triton.next_power_of_2(q.shape[1]), group_tiles is not None, sinks is not None,
            )  # fmt: skip
    if step.chunk_tiles is not None:
        _run_tiles(q, layer, step, step.chunk_tiles, scale, output, sinks)
    return output


def _run_tiles(
    q: torch.Tensor, layer: LayerCache, step: StepContext, tiles: Tiles, scale: float, out: torch.Tensor,
    sinks: torch.Tensor | None, sums: torch.Tensor | None = None, part_index: int = 0, splits: int = 1,
) -> None:  # fmt: skip
    assert step.cache is not None
    heads, head_size = layer.keys.shape[2:]
    pages, shape = step.cache.tables[layer.table], layer.shape
    has_members = tiles.members is not None
    num_rows = max(16, triton.next_power_of_2(tiles.tokens * (q.shape[1] // heads)))
    # Tuned on an H200: many small programs for rows of one token, which are bound by memory, unless rows are long.
    has_few_rows, is_long = num_rows == 16, pages.shape[1] * PAGE >= LONG_SEQUENCE
    max_values = 2048 if q.element_size() > 2 else 4096 if has_few_rows and not is_long else 8192
    block_keys = min(64, max(16, max_values // head_size))
    _attend[(tiles.num_tiles, heads, splits)](
        q, layer.keys, layer.values, out, sums, step.positions, tiles.members, tiles.slots, tiles.begins,
        tiles.ends, pages, sinks, step.num_dense, pages.shape[1], q.stride(0),
        scale / shape.softcap if shape.softcap else scale * LOG2E, shape.window or 0, part_index, splits, tiles.tokens,
        q.shape[1], heads, head_size, num_rows, block_keys, PAGE, shape.softcap or 0.0, step.cache.fixed, has_members,
        tiles.begins is not None, shape.window is not None, sinks is not None, sums is not None,
        num_warps=2 if has_few_rows and not is_long else 4, num_stages=2 if has_few_rows and is_long else 3,
    )  # fmt: skip


def sample_tokens(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor | None
) -> torch.Tensor:
    """Draw tokens as `picking.pick` does without filters, in one pass over the logits [M, V]."""
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK_TOKENS)
    chunk_maxima, chunk_sums = logits.new_empty(2, rows, chunks, dtype=torch.float32)
    output = logits.new_empty(2, rows, dtype=torch.float64)
    is_scaled = temperature is not None
    _mass[(rows, chunks)](logits, temperature, chunk_maxima, chunk_sums, vocabulary, is_scaled, CHUNK_TOKENS)
    _choose_tokens[(rows,)](
        logits, temperature, uniform, chunk_maxima, chunk_sums, output, vocabulary, chunks, is_scaled, CHUNK_TOKENS,
        triton.next_power_of_2(chunks),
    )  # fmt: skip
    return output
