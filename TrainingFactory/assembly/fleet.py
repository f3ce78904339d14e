"""Engines in other processes: vLLM on this machine, or either engine on a Ray cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.cluster.local import LocalEngineLauncher
from TrainingFactory.cluster.places import EngineLauncher
from TrainingFactory.cluster.ray_places import RayEngineLauncher
from TrainingFactory.cluster.ray_session import RaySession
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.config.schema import ComputeSection
from TrainingFactory.envs.self_play import is_self_play
from TrainingFactory.models.names import TINY_IDS, resolve_model_name
from TrainingFactory.protocols import Sampler
from TrainingFactory.types import EngineSpec

if TYPE_CHECKING:
    from TrainingFactory.learning.policy import WeightPublisher
    from TrainingFactory.models import LoadedModel

Notify = Callable[[str], None]
# Mean log-prob difference that rounding explains: float32 with other kernels, and 16-bit formats.
LOGPROB_TOLERANCE, LOGPROB_TOLERANCE_16_BIT = 0.01, 0.1


def samples_elsewhere(config: TrainingConfig) -> bool:
    """Return whether the sampler is in another process than the learner, so that weights must be published."""
    return config.sampling.engine != "native" or config.compute.backend != "local"


def get_max_open_episodes(config: TrainingConfig) -> int:
    """Return the maximum number of episodes that all engines hold at the same time. With `environment.command`, it is
    also limited by the maximum number of concurrent agent programs."""
    slots = config.sampling.slots * config.compute.samplers
    if config.environment.command is None:
        return slots
    # Imported here, because it imports fastapi: half a second for every command.
    from TrainingFactory.agent_api.agent_program import MAX_PROCESSES

    return min(slots, config.environment.options.get("processes", MAX_PROCESSES))


def get_max_concurrent_episodes(config: TrainingConfig, environment: Any = None) -> int:
    """Return the maximum number of concurrent episodes of a run: the slots of its engines, limited by
    environment.num_workers and by the `max_episodes` of the environment. On a Ray cluster num_workers is the number of
    tool processes and no limit. In self-play, return the number of games, because each has an episode per role."""
    slots, workers = get_max_open_episodes(config), config.environment.num_workers
    slots = min(slots, getattr(environment, "max_episodes", slots))
    max_episodes = slots if workers is None or config.compute.backend == "ray" else min(slots, workers)
    return max(1, max_episodes // 2) if is_self_play(environment) else max_episodes


def check_engines(config: TrainingConfig) -> None:
    """Raise for engine options that contradict each other."""
    sampling, samplers = config.sampling, config.compute.samplers
    problems: list[Problem] = []
    if config.compute.backend != "ray" and samplers > 1:
        text = f"is {samplers}, but there is one engine without Ray; set compute.backend=ray, or leave it out"
        problems.append(Problem(("compute", "samplers"), text))
    if sampling.deterministic and samples_elsewhere(config):
        text = "needs the native engine in the run's process: leave sampling.engine and compute.backend out"
        problems.append(Problem(("sampling", "deterministic"), text))
    if sampling.engine_options and sampling.engine != "vllm":
        text = "are options of vLLM: set sampling.engine=vllm"
        problems.append(Problem(("sampling", "engine_options"), text))
    if problems:
        raise config.wrong(problems)


async def await_engines(sampler: Sampler) -> None:
    """Wait until engines in other processes are ready. Called before episodes begin, because an engine's start takes
    longer than an episode's timeout."""
    if isinstance(sampler, Fleet):
        await sampler.start()


async def join_cluster(config: TrainingConfig, exit_stack: AsyncExitStack) -> None:
    """Connect to the Ray cluster with compute.backend=ray; raise if it can never hold the samplers and learners."""
    compute = config.compute
    if compute.backend == "ray":
        session = RaySession(compute.address, compute.num_gpus)
        exit_stack.push_async_callback(session.close)
        await session.open()
        sampler_gpus = session.pick_gpus(compute.gpus_per_sampler, config.sampling.engine == "vllm")
        bundles = [{"CPU": compute.cpus_per_sampler, "GPU": sampler_gpus}] * compute.samplers
        num_remote_learners = (compute.learners or 1) - 1
        bundles += [{"CPU": 1.0, "GPU": session.pick_gpus(compute.gpus_per_learner)}] * num_remote_learners
        learners_text = f" and learners={compute.learners}" if num_remote_learners else ""
        await session.check_capacity(bundles, f"compute.samplers={compute.samplers}{learners_text}")


def make_training_fleet(
    config: TrainingConfig, publisher: WeightPublisher, length: int, episodes: int, notify: Notify, logs: Path
) -> Fleet:
    """Make the engines of a training run, which load their weights from the publisher and log into `logs`."""
    options = config.sampling.engine_options
    if publisher.adapter_rank is not None:
        from TrainingFactory.sampling.vllm_engine import make_lora_options

        options = make_lora_options(publisher.adapter_rank) | options
    spec = {"dtype": publisher.dtype, "options": options}
    tolerance = LOGPROB_TOLERANCE if publisher.dtype == "float32" else LOGPROB_TOLERANCE_16_BIT
    return _make_fleet(config, publisher.model_folder, length, episodes, spec, notify, tolerance, logs=logs)


def make_serving_fleet(
    config: TrainingConfig, loaded_model: LoadedModel, max_length: int, num_episodes: int, notify: Notify
) -> Fleet:
    """Make engines that load the model from its folder or the hub. A model that neither holds unchanged, such as one
    with an adapter, is saved to a temporary folder first."""
    folder, temporary_folder = None if loaded_model.notes else _find_loadable_model(config), None
    if folder is None:
        temporary_folder = tempfile.TemporaryDirectory(prefix="tfactory-model-")
        folder = temporary_folder.name
        model = loaded_model.model
        if hasattr(model, "merge_and_unload"):  # foreign object
            model = model.merge_and_unload()
        model.save_pretrained(folder)
        loaded_model.tokenizer.save_pretrained(folder)
    spec = {"dtype": config.model.dtype, "options": config.sampling.engine_options, "pushed": False}
    return _make_fleet(config, folder, max_length, num_episodes, spec, notify, owned_object=temporary_folder)


def _find_loadable_model(config: TrainingConfig) -> str | None:
    """Return the hub id or folder from which engines can load the unchanged model; None if there is none."""
    model, name = config.model, resolve_model_name(config.model.name)
    folder = Path(name).expanduser()
    modification = model.adapter or model.tools_format or model.revision
    if modification is not None or model.quantization != "none":
        return None
    if folder.is_dir():
        return str(folder.resolve()) if any(folder.glob("model*.safetensors")) else None
    return None if name in TINY_IDS or folder.exists() or name.startswith("package:") else name


def _make_fleet(
    config: TrainingConfig, model: str, length: int, num_episodes: int, options: dict[str, Any], notify: Notify,
    tolerance: float = LOGPROB_TOLERANCE_16_BIT, owned_object: object = None, logs: Path | None = None,
) -> Fleet:  # fmt: skip
    compute, trust = config.compute, config.model.trust_remote_code
    slots = min(config.sampling.slots, num_episodes)
    device = "auto" if compute.backend == "ray" else config.model.device  # Ray assigns each actor's devices
    engine = config.sampling.engine
    cache_gib = config.sampling.cache_gib
    spec = EngineSpec(
        engine, model, length, slots, device=device, trust_remote_code=trust, cache_gib=cache_gib, **options
    )
    hosts = make_launcher(compute, spec, compute.samplers, compute.gpus_per_sampler, notify, "sampler", logs)
    return Fleet(hosts, compute.samplers, length, notify, tolerance, owned_object, compute.start_timeout)


def make_launcher(
    compute: ComputeSection, spec: EngineSpec, num_engines: int, gpus: float | None, notify: Notify, role: str,
    logs: Path | None = None,
) -> EngineLauncher:  # fmt: skip
    """Return the launcher of `num_engines` engines: local processes, or actors on the Ray cluster. Engines log into
    `logs`."""
    start_timeout = compute.start_timeout
    if compute.backend != "ray":
        return LocalEngineLauncher(spec, start_timeout=start_timeout, notify=notify, folder=logs, role=role)
    session, cpus = RaySession(compute.address, compute.num_gpus), compute.cpus_per_sampler
    return RayEngineLauncher(session, spec, num_engines, gpus, cpus, start_timeout, notify, role, logs)
