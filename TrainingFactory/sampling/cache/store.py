"""Keys and values of all layers, in pages, and the device's copy of the page tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from TrainingFactory.sampling.cache.pages import PAGE, CachePages

GPU_MEMORY_SHARE, CPU_MEMORY_SHARE = 0.9, 0.5  # of the free memory, if the engine is given no size


@dataclass(slots=True)
class LayerShape:
    """Shape and properties of an attention layer's keys and values, which the engine's probe run records."""

    num_queries: int  # query heads
    num_key_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device
    layer: int = 0
    window: int | None = None  # sliding window, in tokens
    softcap: float | None = None  # largest absolute score
    has_sinks: bool = False  # an additional score per head that takes probability
    is_latent: bool = False  # values are the first `value_size` numbers of the keys
    source_layer: int | None = None  # layer whose keys and values this one reads; None: its own

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.softcap is None and not self.has_sinks

    @property
    def token_bytes(self) -> int:
        num_values = self.key_size if self.is_latent else self.key_size + self.value_size
        return 0 if self.source_layer is not None else self.num_key_heads * num_values * self.dtype.itemsize


@dataclass(slots=True)
class LayerCache:
    """Cache of one attention layer. Initialized with zeros, because NaN in unused memory would survive the mask."""

    keys: torch.Tensor  # [pages + 1, PAGE, Hkv, d]; padding tokens are written to the last page
    values: torch.Tensor  # [pages + 1, PAGE, Hkv, dv]
    table: int  # index of the layer's page table
    shape: LayerShape

    def write(
        self,
        cache_positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        source_tokens: torch.Tensor | None,
    ) -> None:
        """Write keys and values [1, Hkv, N, d] to `cache_positions` of the pool. `source_tokens` is the token to write
        at each of these positions; None: token i at the i-th position."""
        tensors = ((self.keys, keys),) if self.shape.is_latent else ((self.keys, keys), (self.values, values))
        for cache, new_states in tensors:
            tokens = new_states[0].transpose(0, 1).flatten(1)
            tokens = tokens if source_tokens is None else tokens.index_select(0, source_tokens)
            cache.flatten(0, 1).flatten(1).index_copy_(0, cache_positions, tokens)


class PagedCache:
    """Keys and values of every layer in the pages of `CachePages`."""

    def __init__(self, pages: CachePages, shapes: Sequence[LayerShape]) -> None:
        self.pages = pages
        self.fixed = pages.fixed
        device = shapes[0].device
        windows = [table.window for table in pages.tables]
        self.layers: list[LayerCache] = []
        self.by_layer: dict[int, LayerCache] = {}
        self.owners: dict[int, int] = {}  # the layer that writes the keys and values of each layer
        for shape in shapes:
            self.owners[shape.layer] = shape.layer if shape.source_layer is None else shape.source_layer
            if shape.source_layer is not None:
                self.by_layer[shape.layer] = self.by_layer[shape.source_layer]
                self.layers.append(self.by_layer[shape.source_layer])
                continue
            table = windows.index(shape.window)
            num_pages = pages.tables[table].num_pages + 1
            keys = _make_zeros((num_pages, PAGE, shape.num_key_heads, shape.key_size), shape)
            values = (
                keys[..., : shape.value_size]
                if shape.is_latent
                else _make_zeros((num_pages, PAGE, shape.num_key_heads, shape.value_size), shape)
            )
            self.layers.append(LayerCache(keys, values, table, shape))
            self.by_layer[shape.layer] = self.layers[-1]
        # On a CPU, these are the host's arrays. Kernels read 32-bit entries.
        on_cpu = device.type == "cpu"
        self._host_tables = pages.tables
        self.tables = [
            torch.from_numpy(table.entries) if on_cpu else torch.from_numpy(table.entries).int().to(device)
            for table in pages.tables
        ]
        for table in pages.tables:
            table.changed_slots.clear()

    def upload_tables(self) -> None:
        """Copy the changed entries of the page tables to the device."""
        if self._host_tables is not self.pages.tables:  # they were cleared
            self._host_tables = self.pages.tables
            for index, table in enumerate(self.pages.tables):
                page_ids = torch.from_numpy(table.entries)
                if self.tables[index].device.type == "cpu":
                    self.tables[index] = page_ids
                else:
                    self.tables[index].copy_(page_ids)
                table.changed_slots.clear()
        for device_table, table in zip(self.tables, self.pages.tables, strict=True):
            if table.changed_slots and device_table.device.type != "cpu":
                slots = np.fromiter(table.changed_slots, np.int64)
                rows = torch.from_numpy(np.column_stack((slots, table.entries[slots])))
                rows = rows.pin_memory().to(device_table.device, non_blocking=True)
                device_table.index_copy_(0, rows[:, 0], rows[:, 1:].int())
            table.changed_slots.clear()

    def copy_pages(self) -> None:
        """Execute the pending page copies on the device. Slots that share or exchange prefixes request them."""
        for index, copies in enumerate(self.pages.take_copies()):
            if not copies.targets:
                continue
            device = self.tables[index].device
            sources, targets = (torch.tensor(pages, device=device) for pages in copies)
            for layer in {id(layer): layer for layer in self.layers if layer.table == index}.values():
                for cache in (layer.keys,) if layer.shape.is_latent else (layer.keys, layer.values):
                    cache.index_copy_(0, targets, cache.index_select(0, sources))

    def gather(
        self, layer: LayerCache, states: torch.Tensor, slots: torch.Tensor | slice, begin: int, end: int
    ) -> torch.Tensor:
        """Return the tokens [P, end - begin, Hkv, d] of the slots; `begin` and `end` are multiples of PAGE."""
        if self.fixed:  # a view, if `slots` is a slice
            rows = states[:-1].unflatten(0, (self.pages.num_slots, -1)).flatten(1, 2)[:, begin:end]
            # `index_select` copies whole rows, several times as fast as indexing
            return rows[slots] if isinstance(slots, slice) else rows.index_select(0, slots)
        pages = self.tables[layer.table][slots, begin // PAGE : end // PAGE]
        return states.index_select(0, pages.flatten()).unflatten(0, pages.shape).flatten(1, 2)


def _make_zeros(tensor_shape: Sequence[int], shape: LayerShape) -> torch.Tensor:
    """Return a tensor of zeros. On a CPU, the operating system commits its memory only when it is first written."""
    if shape.device.type != "cpu":
        return torch.zeros(*tensor_shape, dtype=shape.dtype, device=shape.device)
    num_bytes = int(np.prod(tensor_shape)) * shape.dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(shape.dtype).view(*tensor_shape)


def list_windows(shapes: Sequence[LayerShape]) -> list[int | None]:
    """Return the distinct sliding windows of the layers, one for each page table. None, for layers without a window,
    comes first."""
    windows = {shape.window for shape in shapes}
    return sorted(windows, key=lambda window: -1 if window is None else window)


def get_free_memory(device: torch.device) -> int:
    """Return the free bytes of a device that an engine may use by default."""
    if device.type == "cuda":
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(GPU_MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] + cached_bytes))
    return int(CPU_MEMORY_SHARE * psutil.virtual_memory().available)
