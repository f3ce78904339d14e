"""Optimizers, learning-rate schedules and float32 master weights."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from TrainingFactory.learning.processes import Processes

CRITIC_PREFIXES = ("head.", "critic.")  # name prefixes of a learner's weights that are not the policy's


@dataclass(slots=True, frozen=True)
class OptimizerOptions:
    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    critic_learning_rate: float | None = None  # of a head or critic; None: `learning_rate`
    matrix_learning_rate: float = 0.03  # of the matrices that Muon updates; other weights use `learning_rate`
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None  # needed by linear and cosine
    max_grad_norm: float = 1.0  # infinity: no clipping

    def get_lr_factor(self, step: int) -> float:
        """Return the multiplier of the peak learning rates at a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        assert self.total_steps is not None, f"the {self.schedule} schedule needs total_steps"
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


class Muon(torch.optim.Optimizer):
    """Muon with Newton-Schulz iterations in float32, because torch's own bfloat16 version is slow on a CPU."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        processes: Processes | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._processes = processes or Processes()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum_buffer = state.setdefault("momentum", torch.zeros_like(param))
                momentum_buffer.lerp_(param.grad, 1 - group["momentum"])
                update = self._processes.gather(param.grad.lerp(momentum_buffer, group["momentum"]))
                direction = self._processes.take_shard(orthogonalize(update), param)
                param.add_(direction, alpha=-group["lr"] * max(1, param.shape[0] / param.shape[1]) ** 0.5)


def orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return approximately the nearest orthogonal matrix, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.float()
    x = x.T if (is_tall := x.shape[0] > x.shape[1]) else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(matrix.dtype)


def make_optimizers(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    options: OptimizerOptions,
    processes: Processes | None = None,
) -> list[torch.optim.Optimizer]:
    """Group the parameters and return their optimizers. Norms, biases, embeddings and heads get no weight decay. If
    Muon is chosen, Muon updates the policy's inner matrices and AdamW all other weights. Head and critic have their own
    learning rate."""
    muon_matrices, decayed_weights, undecayed_weights, decayed_critic, undecayed_critic = [], [], [], [], []
    for name, param in named_parameters:
        is_inner = param.dim() == 2 and "embed" not in name and "head." not in name
        if name.startswith(CRITIC_PREFIXES):
            (decayed_critic if is_inner else undecayed_critic).append(param)
        elif is_inner and options.name == "muon":
            muon_matrices.append(param)
        else:
            (decayed_weights if is_inner else undecayed_weights).append(param)
    critic_lr = options.critic_learning_rate or options.learning_rate
    groups = [
        {"params": decayed_weights, "weight_decay": options.weight_decay},
        {"params": undecayed_weights, "weight_decay": 0.0},
        {"params": decayed_critic, "weight_decay": options.weight_decay, "lr": critic_lr},
        {"params": undecayed_critic, "weight_decay": 0.0, "lr": critic_lr},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizer_type: Any = torch.optim.AdamW
        if options.name == "adamw_8bit":
            from bitsandbytes.optim.adamw import AdamW8bit as optimizer_type  # pyright: ignore[reportMissingImports]
        elif groups[0]["params"][0].is_cuda:
            optimizer_type = partial(optimizer_type, fused=True)  # one kernel for many weights; CPU: default
        optimizers.append(optimizer_type(groups, lr=options.learning_rate, betas=options.betas))
    if muon_matrices:
        optimizers.append(Muon(muon_matrices, lr=options.matrix_learning_rate, processes=processes))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def check_adamw_8bit(device: str = "auto") -> None:
    """Raise ValueError if this machine cannot run adamw_8bit, before any model is loaded."""
    option = "training.optimizer=adamw_8bit"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"{option} needs bitsandbytes: pip install bitsandbytes, or use adamw")
    if not torch.cuda.is_available() or device in ("cpu", "mps"):
        raise ValueError(f"{option} runs only on CUDA devices; use adamw")


class MixedPrecision:
    """Trains 16-bit weights through float32 master copies, because 16 bits would round small updates away."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        trainable_params = [(name, param) for name, param in named_parameters if param.requires_grad]
        self.names = [name for name, _ in trainable_params]
        self.params = [param for _, param in trainable_params]
        self.masters = [
            param if param.dtype in (torch.float32, torch.float64) else nn.Parameter(param.detach().float())
            for param in self.params
        ]

    def gather_grads(self) -> None:
        """Add the gradients of the 16-bit weights to those of the float32 masters. Call it after every backward pass,
        because sums in 16 bits lose precision."""
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param and param.grad is not None:
                gradient = param.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                param.grad = None

    def clear_grads(self) -> None:
        for param in (*self.params, *self.masters):
            param.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters into the model's weights."""
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                param.copy_(master)
