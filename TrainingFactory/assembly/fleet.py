"""Engines in other processes, as a config asks for them: vLLM on this machine, or either engine on a Ray cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.agent_api.agent_program import MAX_PROCESSES
from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.cluster.local import LocalPlaces
from TrainingFactory.cluster.places import Places
from TrainingFactory.cluster.ray_places import RayPlaces
from TrainingFactory.cluster.ray_session import RaySession
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.config.schema import ComputeSection
from TrainingFactory.models.names import BUILTIN, resolve
from TrainingFactory.protocols import Sampler
from TrainingFactory.types import EngineSpec

if TYPE_CHECKING:
    from TrainingFactory.learning.policy import Publishes
    from TrainingFactory.models import LoadedModel

Say = Callable[[str], None]
# Mean distance of log-probs that rounding explains: of float32 over other kernels, and of two bytes.
TOLERANCE, COARSE = 0.01, 0.1


def elsewhere(config: TrainingConfig) -> bool:
    """Tell whether what samples is in another process than what learns, so that weights must be pushed."""
    return config.sampling.engine != "native" or config.compute.backend != "local"


def at_once(config: TrainingConfig) -> int:
    """Return how many episodes all engines hold, or how many programs play, at the same time."""
    held, place = config.sampling.slots * config.compute.samplers, config.environment
    return held if place.command is None else min(held, place.options.get("processes", MAX_PROCESSES))


def max_concurrent_episodes(config: TrainingConfig) -> int:
    """Return how many episodes a run plays at the same time: environment.num_workers bounds what the engines hold. On a
    cluster it is the number of tool processes instead."""
    held, workers = at_once(config), config.environment.num_workers
    return held if workers is None or config.compute.backend == "ray" else min(held, workers)


def check_engines(config: TrainingConfig) -> None:
    """Raise for what a config says about engines and cannot be, before anything is loaded or started."""
    sampling, samplers, wrong = config.sampling, config.compute.samplers, list[Problem]()
    if config.compute.backend != "ray" and samplers > 1:
        text = f"it is {samplers}, and without compute.backend=ray there is one engine; take both, or none"
        wrong.append(Problem(("compute", "samplers"), text))
    if sampling.deterministic and elsewhere(config):
        text = "it needs the native engine in the run's own process: leave sampling.engine and compute.backend out"
        wrong.append(Problem(("sampling", "deterministic"), text))
    if sampling.engine_options and sampling.engine != "vllm":
        wrong.append(Problem(("sampling", "engine_options"), "they are vLLM's: take sampling.engine=vllm"))
    if wrong:
        raise config.wrong(wrong)


async def await_engines(sampler: Sampler) -> None:
    """Wait for engines in other processes: their start takes longer than an episode may."""
    if isinstance(sampler, Fleet):
        await sampler.start()


async def join_cluster(config: TrainingConfig, held: AsyncExitStack) -> None:
    """Connect to the cluster, if one is asked for, and say at once where it can never hold the samplers."""
    compute = config.compute
    if compute.backend == "ray":
        session = RaySession(compute.address, compute.num_gpus)
        held.push_async_callback(session.close)
        await session.open()
        gpus = session.gpus(compute.gpus_per_sampler, config.sampling.engine == "vllm")
        asked = [{"CPU": compute.cpus_per_sampler, "GPU": gpus}] * compute.samplers
        others = (compute.learners or 1) - 1
        asked += [{"CPU": 1.0, "GPU": session.gpus(compute.gpus_per_learner)}] * others
        learners = f" and learners={compute.learners}" if others else ""
        await session.check(asked, f"compute.samplers={compute.samplers}{learners}")


def pushed_to(
    config: TrainingConfig, publisher: Publishes, length: int, episodes: int, say: Say, logs: Path
) -> Fleet:
    """Make the engines of a training run: their weights come from the publisher, and `logs` keeps their logs."""
    options = config.sampling.engine_options
    if publisher.rank is not None:
        from TrainingFactory.sampling.vllm_engine import lora_options

        options = lora_options(publisher.rank) | options
    given = {"dtype": publisher.dtype, "options": options}
    tolerance = TOLERANCE if publisher.dtype == "float32" else COARSE
    return _fleet(config, publisher.model_folder, length, episodes, given, say, tolerance, logs=logs)


def reading(config: TrainingConfig, loaded: LoadedModel, length: int, episodes: int, say: Say) -> Fleet:
    """Make engines that read the model from where it is, or else from a folder that is written for them."""
    folder, held = _readable(config), None
    if folder is None:
        held = tempfile.TemporaryDirectory(prefix="tfactory-model-")
        folder, whole = held.name, loaded.model
        whole = whole.merge_and_unload() if hasattr(whole, "merge_and_unload") else whole  # foreign object
        whole.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    given = {"dtype": config.model.dtype, "options": config.sampling.engine_options, "pushed": False}
    return _fleet(config, folder, length, episodes, given, say, holds=held)


def _readable(config: TrainingConfig) -> str | None:
    """Return where an engine on any machine finds the model by itself: a hub id, or a folder with whole weights."""
    model, name = config.model, resolve(config.model.name)
    folder = Path(name).expanduser()
    changed = model.adapter or model.tools_format or model.revision
    if changed is not None or model.quantization != "none":
        return None
    if folder.is_dir():
        return str(folder.resolve()) if any(folder.glob("model*.safetensors")) else None
    return None if name == BUILTIN or folder.exists() or name.startswith("package:") else name


def _fleet(
    config: TrainingConfig, model: str, length: int, episodes: int, given: dict[str, Any], say: Say,
    tolerance: float = COARSE, holds: object = None, logs: Path | None = None,
) -> Fleet:  # fmt: skip
    compute, trust = config.compute, config.model.trust_remote_code
    slots = min(config.sampling.slots, episodes)
    device = "auto" if compute.backend == "ray" else config.model.device  # Ray shows each machine's own
    engine = config.sampling.engine
    spec = EngineSpec(engine, model, length, slots, device=device, trust_remote_code=trust, **given)
    made = places(compute, spec, compute.samplers, compute.gpus_per_sampler, say, "sampler", logs)
    return Fleet(made, compute.samplers, length, say, tolerance, holds, compute.start_timeout)


def places(
    compute: ComputeSection, spec: EngineSpec, count: int, gpus: float | None, say: Say, what: str,
    logs: Path | None = None,
) -> Places:  # fmt: skip
    """Return where `count` engines start: in processes of this machine, or in actors on the run's cluster. The folder
    `logs` keeps their logs."""
    seconds = compute.start_timeout
    if compute.backend != "ray":
        return LocalPlaces(spec, start_timeout=seconds, say=say, folder=logs, what=what)
    session, cpus = RaySession(compute.address, compute.num_gpus), compute.cpus_per_sampler
    return RayPlaces(session, spec, count, gpus, cpus, seconds, say, what, logs)
