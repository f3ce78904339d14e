"""FSDP2 training: several processes train one model, each with a shard of every weight. The caller initialises
torch.distributed. All processes gather a layer's weights together, so packs are assigned in rounds by size: a round
takes as long as its largest pack, and a process without a pack computes a tiny dummy that adds nothing to the loss.

The float32 shards are trained. For a bfloat16 model, layers compute with bfloat16 copies and gradients are summed in
float32, as `MixedPrecision` does in a single process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from TrainingFactory.data.packing import Batch, Pack, pack
from TrainingFactory.learning.forward import get_causal_lm
from TrainingFactory.learning.processes import Processes
from TrainingFactory.types import Sample


class ShardedProcesses(Processes):
    """Collectives over all ranks of torch.distributed. `offloads_frozen` keeps frozen models in CPU memory."""

    def __init__(self, device: torch.device, offloads_frozen: bool = False) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._device, self._offloads_frozen = device, offloads_frozen and device.type == "cuda"
        self._select_device()
        self._mesh = init_device_mesh(device.type, (self.world_size,))
        self._root_modules: dict[int, _RootModule] = {}

    def shard(self, model: Any, head: nn.Module | None = None) -> None:
        self._select_device()
        causal_lm: Any = get_causal_lm(model)
        if getattr(causal_lm, "is_quantized", False):  # third-party object
            raise ValueError(
                "model.quantization: cannot shard a quantized model. Set it to none, or compute.learners to 1"
            )
        is_frozen = not any(param.requires_grad for param in model.parameters())
        offload_policy = CPUOffloadPolicy() if is_frozen and self._offloads_frozen else OffloadPolicy()
        root = self._root_modules[id(model)] = _RootModule(model, head)
        layer_types = set(causal_lm._no_split_modules or ())
        # Children before parents; the root last, with all weights outside the layers.
        for module in reversed(list(causal_lm.modules())):
            if type(module).__name__ in layer_types:
                self._shard_module(module, offload_policy)
        for module in (root,) if head is None else (head, root):
            self._shard_module(module, offload_policy)

    def _shard_module(self, module: nn.Module, offload: OffloadPolicy) -> None:
        unsharded_params = (param for param in module.parameters() if not isinstance(param, DTensor))
        trainable_params = [param for param in unsharded_params if param.requires_grad]
        dtypes = {param.dtype for param in trainable_params}
        if len(dtypes) > 1:
            raise ValueError(
                f"Cannot shard {type(module).__name__}: its trained weights have several dtypes "
                f"({', '.join(sorted(map(str, dtypes)))}). Set model.dtype to float32 or bfloat16"
            )
        compute_dtype = next(iter(dtypes - {torch.float32, torch.float64}), None)
        for param in trainable_params if compute_dtype is not None else ():
            param.data = param.data.float()
        reduce_dtype = None if compute_dtype is None else torch.float32
        precision = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
        # Reshard after every forward, even the root's: without a backward it would keep using the old weights.
        sharded_module: Any = fully_shard(
            module, mesh=self._mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=offload
        )
        sharded_module.set_gradient_divide_factor(1.0)  # losses are already divided by the counts of the step
        sharded_module.set_force_sum_reduction_for_comms(True)

    def run(self, model: Any, function: Callable[[], Any]) -> Any:
        self._select_device()
        return self._root_modules[id(model)](function)

    def pack_batch(self, make: Callable[[int], Batch], token_budget: int) -> Batch:
        batch = make(token_budget)
        if not (remainder := len(batch.packs) % self.world_size):
            return batch
        num_tokens = sum(len(pack.token_ids) for pack in batch.packs)
        tokens_per_pack = num_tokens / (len(batch.packs) - remainder + self.world_size)
        candidates = [make(min(token_budget, int(tokens_per_pack * slack))) for slack in (1.02, 1.15, 1.4)]
        return min(
            [batch, *candidates], key=lambda candidate: sum_round_tokens(candidate.packs, self.world_size)
        )

    def take_local_packs(self, packs: Sequence[Pack]) -> list[Pack]:
        sorted_packs = sorted(packs, key=lambda pack: len(pack.token_ids), reverse=True)
        local_packs = sorted_packs[self.rank :: self.world_size]
        return (
            local_packs
            if len(local_packs) * self.world_size >= len(packs)
            else [*local_packs, _make_dummy_pack()]
        )

    def exchange_fields(self, packs: Sequence[Pack], field_names: Sequence[str]) -> None:
        local_pack_ids = {id(pack) for pack in self.take_local_packs(packs)}
        field_sizes = [len(pack.target) for pack in packs for _ in field_names]
        arrays = [
            getattr(pack, field_name) if id(pack) in local_pack_ids else np.zeros(len(pack.target))
            for pack in packs
            for field_name in field_names
        ]
        flat_values = torch.from_numpy(np.concatenate([np.zeros(0), *arrays]).astype(np.float32))
        dist.all_reduce(flat_values)  # each number is nonzero in at most one process
        field_values = iter(flat_values.split(field_sizes))
        for filled_pack in packs:
            for field_name in field_names:
                setattr(filled_pack, field_name, next(field_values).numpy())

    def sum_metrics(self, metric_sums: dict[str, float]) -> dict[str, float]:
        metric_totals: dict[str, float] = defaultdict(float)
        for rank_sums in self._all_gather(metric_sums):
            for name, value in rank_sums.items():
                metric_totals[name] += value
        return dict(metric_totals)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(array.copy())
        dist.all_reduce(tensor)
        return tensor.numpy()

    def broadcast_text(self, text: str) -> str:
        return self._all_gather(text)[0]

    def _all_gather(self, local_value: Any) -> list[Any]:
        self._select_device()
        gathered_values: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered_values, local_value)
        return gathered_values

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._select_device()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def take_shard(self, tensor: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
        self._select_device()
        if not isinstance(template, DTensor):
            return tensor
        local_tensor = tensor.to(template.device)
        return distribute_tensor(local_tensor, template.device_mesh, template.placements, src_data_rank=None)

    def gather_state(self, model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gather the weights one by one into rank 0's CPU memory. For a PEFT model, gather only the adapter."""
        weights = model.state_dict(keep_vars=True)  # tied weights are one object
        is_adapter = isinstance(model, PeftModel)
        adapter_state = (
            get_peft_model_state_dict(model, weights, save_embedding_layers=False) if is_adapter else weights
        )
        tensors_by_id = {id(tensor): tensor for tensor in weights.values()}
        for tensor in {id(tensor): tensor for tensor in adapter_state.values()}.values():
            full_tensor = self.gather(tensor.detach())
            if self.rank == 0:
                needs_cast = tensor.requires_grad and not is_adapter
                tensors_by_id[id(tensor)] = (full_tensor.to(dtype) if needs_cast else full_tensor).cpu()
        return {name: tensors_by_id[id(tensor)] for name, tensor in weights.items()}

    def _select_device(self) -> None:
        if self._device.type == "cuda":  # the current device is a per-thread setting
            torch.cuda.set_device(self._device.index or 0)


class _RootModule(nn.Module):
    """Runs a callable inside `forward`, so that FSDP gathers the weights it uses and reduces their gradients."""

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def sum_round_tokens(packs: Sequence[Pack], world_size: int) -> int:
    """Return the sum over all rounds of the tokens of the round's largest pack. In a round, each process
    takes one pack."""
    return sum(sorted((len(pack.token_ids) for pack in packs), reverse=True)[::world_size])


def _make_dummy_pack() -> Pack:
    """Return a pack without rows that still runs every part of the model."""
    zeros = [0.0, 0.0]
    (dummy_pack,) = pack([Sample([0, 0], [False, True], zeros, zeros, zeros, [0, 0])])
    return replace(dummy_pack, rows=np.zeros(0, np.int64))
