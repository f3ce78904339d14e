"""Divide the GPUs of a run (`compute.num_gpus`) among learners and samplers, where the config does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.learner import check_sharded
from TrainingFactory.cluster.launcher import launched
from TrainingFactory.config import TrainingConfig


def visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def with_all_gpus(
    config: TrainingConfig, say: Callable[[str], None], visible: Callable[[], int] = visible_gpus
) -> TrainingConfig:
    """Return the config with learners and samplers for all of `compute.num_gpus`. A config that sets either of them, a
    launcher and a run on the CPU stay as they are."""
    compute, count = config.compute, config.compute.num_gpus or 1
    chosen = compute.learners is not None or "samplers" in compute.model_fields_set
    if count == 1 or chosen or launched() is not None or config.model.device == "cpu":
        return config
    there = visible() if compute.backend == "local" else count
    if not there:
        say(f"note: compute.num_gpus={count}, and this machine shows no GPU: the run uses the CPU")
        return config
    if there < count:
        raise ValueError(
            f"compute.num_gpus is {count}, but this machine shows {there} GPUs. Set compute.num_gpus={there}, or "
            "compute.backend=ray and compute.address for GPUs of several machines"
        )
    found = divide(config, count)
    told = ", ".join(f"compute.{key}={value}" for key, value in found.items())
    say(
        f"the run uses {count} GPUs: {told}; set compute.learners and compute.samplers to divide them otherwise"
    )
    return config.model_copy(update={"compute": compute.model_copy(update=found)})


def divide(config: TrainingConfig, count: int) -> dict[str, Any]:
    """Return the keys of `compute` that use all GPUs. On this machine every GPU gets a learner, and the first one
    samples too; with Ray half of them sample, as far as a sampler's GPUs go into that."""
    compute = config.compute
    samples = KINDS[config.training.algorithm].samples and compute.gpus_per_sampler != 0
    width = compute.gpus_per_sampler or config.sampling.engine_options.get("tensor_parallel_size", 1)
    samplers = max(1, int(count // 2 // width)) if compute.backend == "ray" and samples else 0
    learners = int(count - samplers * width)
    if learners < 1:
        raise ValueError(
            f"compute.num_gpus is {count}, but a sampler takes {width:g} GPUs and a learner one. Raise "
            "compute.num_gpus, or lower compute.gpus_per_sampler and sampling.engine_options.tensor_parallel_size"
        )
    if learners > 1:
        try:
            check_sharded(config)
        except ValueError as error:
            raise ValueError(
                f"compute.num_gpus is {count}, but {error}. Set compute.learners=1 to train on one GPU, and "
                f"compute.backend=ray with compute.samplers={int((count - 1) // width)} to sample on the others"
            ) from error
    found: dict[str, Any] = {"learners": learners}
    if compute.backend == "ray":
        found["gpus_per_learner"] = 1.0
        if samplers:
            found |= {"samplers": samplers, "gpus_per_sampler": float(width)}
        if compute.address is None:  # a Ray that is started for the run has all but the first learner's
            found["num_gpus"] = count - 1
    return found
