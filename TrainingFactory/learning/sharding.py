"""Several processes that train one model, each with a shard of every weight (FSDP2); torch.distributed is initialised
before. Packs are dealt out by cost in rounds, because all processes gather the weights of a layer together: a round
takes as long as its largest pack, and who has no pack left computes a tiny one that counts nothing.

Shards in float32 are what is trained. Where the model is in bfloat16, layers compute with copies in bfloat16, and
gradients are added up in float32: what `MixedPrecision` does in one process.
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
from TrainingFactory.learning.forward import causal_model
from TrainingFactory.learning.processes import Processes
from TrainingFactory.types import Sample


class Sharded(Processes):
    """All processes of torch.distributed. `offload` keeps models without trained weights, such as a reference, in the
    memory of the CPU."""

    def __init__(self, device: torch.device, offload: bool = False) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._device, self._offload = device, offload and device.type == "cuda"
        self._enter()
        self._mesh = init_device_mesh(device.type, (self.count,))
        self._roots: dict[int, _Root] = {}

    def shard(self, model: Any, head: nn.Module | None = None) -> None:
        self._enter()
        causal: Any = causal_model(model)
        if getattr(causal, "is_quantized", False):  # foreign object
            raise ValueError(
                "model.quantization: a quantised model cannot be sharded: take none, or one learner"
            )
        frozen = not any(param.requires_grad for param in model.parameters())
        offload = CPUOffloadPolicy() if frozen and self._offload else OffloadPolicy()
        root = self._roots[id(model)] = _Root(model, head)
        layers = set(causal._no_split_modules or ())
        # Children before parents; the root last, with all that no layer has.
        for module in reversed(list(causal.modules())):
            if type(module).__name__ in layers:
                self._divide(module, offload)
        for module in (root,) if head is None else (head, root):
            self._divide(module, offload)

    def _divide(self, module: nn.Module, offload: OffloadPolicy) -> None:
        own = [
            param for param in module.parameters() if not isinstance(param, DTensor) and param.requires_grad
        ]
        kinds = {param.dtype for param in own}
        if len(kinds) > 1:
            raise ValueError(
                f"{type(module).__name__} trains weights in {' and '.join(sorted(map(str, kinds)))}, which cannot be "
                "sharded together: set model.dtype to float32 or bfloat16"
            )
        low = next(iter(kinds - {torch.float32, torch.float64}), None)
        for param in own if low is not None else ():
            param.data = param.data.float()
        policy = MixedPrecisionPolicy(
            low, torch.float32 if low is not None else None, cast_forward_inputs=False
        )
        # After every forward, also of the root: without a backward it would go on with old weights.
        made: Any = fully_shard(
            module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy, offload_policy=offload
        )
        made.set_gradient_divide_factor(1.0)  # losses are divided by the counts of the step
        made.set_force_sum_reduction_for_comms(True)

    def run(self, model: Any, call: Callable[[], Any]) -> Any:
        self._enter()
        return self._roots[id(model)](call)

    def packed(self, make: Callable[[int], Batch], token_budget: int) -> Batch:
        batch = make(token_budget)
        if not (over := len(batch.packs) % self.count):
            return batch
        tokens = sum(len(each.token_ids) for each in batch.packs)
        even = tokens / (len(batch.packs) - over + self.count)
        tries = [make(min(token_budget, int(even * slack))) for slack in (1.02, 1.15, 1.4)]
        return min([batch, *tries], key=lambda each: rounds_cost(each.packs, self.count))

    def deal(self, packs: Sequence[Pack]) -> list[Pack]:
        ordered = sorted(packs, key=lambda each: len(each.token_ids), reverse=True)
        own = ordered[self.rank :: self.count]
        return own if len(own) * self.count >= len(ordered) else [*own, _nothing()]

    def exchange(self, packs: Sequence[Pack], names: Sequence[str]) -> None:
        mine = {id(each) for each in self.deal(packs)}
        sizes = [len(each.target) for each in packs for _ in names]
        found = [
            getattr(each, name) if id(each) in mine else np.zeros(len(each.target))
            for each in packs
            for name in names
        ]
        flat = torch.from_numpy(np.concatenate([np.zeros(0), *found]).astype(np.float32))
        dist.all_reduce(flat)  # of numbers that all but one process have as 0
        parts = iter(flat.split(sizes))
        for each in packs:
            for name in names:
                setattr(each, name, next(parts).numpy())

    def total(self, sums: dict[str, float]) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for each in self._gathered(sums):
            for name, figure in each.items():
                found[name] += figure
        return dict(found)

    def agree(self, text: str) -> str:
        return self._gathered(text)[0]

    def _gathered(self, value: Any) -> list[Any]:
        self._enter()
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        self._enter()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def share(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self._enter()
        if not isinstance(like, DTensor):
            return tensor
        given = tensor.to(like.device)
        return distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)

    def state_of(self, model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gather weight by weight into the first process's memory; of an adapter, without what is under it."""
        state = model.state_dict(keep_vars=True)  # tied weights are one object
        adapter = isinstance(model, PeftModel)
        chosen = get_peft_model_state_dict(model, state, save_embedding_layers=False) if adapter else state
        found = {id(tensor): tensor for tensor in state.values()}
        for tensor in {id(tensor): tensor for tensor in chosen.values()}.values():
            whole = self.whole(tensor.detach())
            if self.rank == 0:
                found[id(tensor)] = (whole.to(dtype) if tensor.requires_grad and not adapter else whole).cpu()
        return {name: found[id(tensor)] for name, tensor in state.items()}

    def _enter(self) -> None:
        if self._device.type == "cuda":  # which device is the current one goes by thread
            torch.cuda.set_device(self._device.index or 0)


class _Root(nn.Module):
    """Runs a call inside its forward, so that whatever it uses of the model has its weights, and its gradients go to
    where they belong."""

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def rounds_cost(packs: Sequence[Pack], count: int) -> int:
    """Count the tokens of the largest pack of every round, in which each process takes one."""
    return sum(sorted((len(each.token_ids) for each in packs), reverse=True)[::count])


def _nothing() -> Pack:
    """Make a pack that takes every way through the model, and has no rows."""
    zeros = [0.0, 0.0]
    (made,) = pack([Sample([0, 0], [False, True], zeros, zeros, zeros, [0, 0])])
    return replace(made, rows=np.zeros(0, np.int64))
