"""Division of a run's GPUs (`compute.num_gpus`) among learners and samplers, unless the config sets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.learner import check_sharded
from TrainingFactory.cluster.launcher import find_launched_process
from TrainingFactory.config import TrainingConfig


def count_visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def with_gpu_division(
    config: TrainingConfig, notify: Callable[[str], None], count_gpus: Callable[[], int] = count_visible_gpus
) -> TrainingConfig:
    """Return the config with `compute.learners` and `compute.samplers` set to use all of `compute.num_gpus`. Return it
    unchanged if it sets one of these two itself, under a launcher such as torchrun, and on the CPU."""
    compute, gpus = config.compute, config.compute.num_gpus or 1
    is_divided = compute.learners is not None or "samplers" in compute.model_fields_set
    if gpus == 1 or is_divided or find_launched_process() is not None or config.model.device == "cpu":
        return config
    num_visible = count_gpus() if compute.backend == "local" else gpus
    if not num_visible:
        notify(f"note: compute.num_gpus={gpus}, but this machine has no visible GPU: the run uses the CPU")
        return config
    if num_visible < gpus:
        raise ValueError(
            f"compute.num_gpus is {gpus}, but this machine shows {num_visible} GPUs. Set "
            f"compute.num_gpus={num_visible}, or compute.backend=ray and compute.address for GPUs of several machines"
        )
    division = divide_gpus(config, gpus)
    settings = ", ".join(f"compute.{key}={value}" for key, value in division.items())
    notify(
        f"the run uses {gpus} GPUs: {settings}; set compute.learners and compute.samplers to divide them otherwise"
    )
    return config.model_copy(update={"compute": compute.model_copy(update=division)})


def divide_gpus(config: TrainingConfig, gpus: int) -> dict[str, Any]:
    """Return the keys of `compute` that use all GPUs. On one machine every GPU has a learner, and the first also
    samples. With Ray, half of the GPUs sample, rounded down to whole samplers."""
    compute = config.compute
    has_samplers = KINDS[config.training.algorithm].samples and compute.gpus_per_sampler != 0
    sampler_gpus = compute.gpus_per_sampler or config.sampling.engine_options.get("tensor_parallel_size", 1)
    num_samplers = max(1, int(gpus // 2 // sampler_gpus)) if compute.backend == "ray" and has_samplers else 0
    num_learners = int(gpus - num_samplers * sampler_gpus)
    if num_learners < 1:
        raise ValueError(
            f"compute.num_gpus is {gpus}, but a sampler needs {sampler_gpus:g} GPUs and a learner one. Raise "
            "compute.num_gpus, or lower compute.gpus_per_sampler and sampling.engine_options.tensor_parallel_size"
        )
    if num_learners > 1:
        try:
            check_sharded(config)
        except ValueError as error:
            raise ValueError(
                f"compute.num_gpus is {gpus}, but {error}. Set compute.learners=1 to train on one GPU, and "
                f"compute.backend=ray with compute.samplers={int((gpus - 1) // sampler_gpus)} to sample on the others"
            ) from error
    division: dict[str, Any] = {"learners": num_learners}
    if compute.backend == "ray":
        division["gpus_per_learner"] = 1.0
        if num_samplers:
            division |= {"samplers": num_samplers, "gpus_per_sampler": float(sampler_gpus)}
        if compute.address is None:  # the Ray that the run starts manages all GPUs but the first learner's
            division["num_gpus"] = gpus - 1
    return division
