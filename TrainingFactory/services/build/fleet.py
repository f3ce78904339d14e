"""Engines in other processes, as a config asks for them: vLLM on this machine, or either engine on a Ray cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.cluster.local import LocalPlaces
from TrainingFactory.cluster.ray_places import RayPlaces
from TrainingFactory.cluster.ray_session import RaySession
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.models.names import BUILTIN, resolve
from TrainingFactory.types import EngineSpec

if TYPE_CHECKING:
    from TrainingFactory.learning.policy import Publishes
    from TrainingFactory.models import LoadedModel

Say = Callable[[str], None]
# Mean distance of log-probs that rounding explains: of float32 over other kernels, and of two bytes.
TOLERANCE, COARSE = 0.01, 0.25


def elsewhere(config: TrainingConfig) -> bool:
    """Tell whether what samples is in another process than what learns, so that weights must be pushed."""
    return config.sampling.engine != "native" or config.compute.backend != "local"


def at_once(config: TrainingConfig) -> int:
    """Return how many episodes all engines hold at the same time."""
    return config.sampling.slots * config.compute.samplers


def check_engines(config: TrainingConfig) -> None:
    """Raise for what a config says about engines and cannot be, before anything is loaded or started."""
    sampling, compute = config.sampling, config.compute
    wrong: list[tuple[str, str, str]] = []
    if compute.backend != "ray" and compute.samplers > 1:
        text = f"it is {compute.samplers}, and without compute.backend=ray there is one engine; take both, or none"
        wrong.append(("compute", "samplers", text))
    if sampling.deterministic and elsewhere(config):
        text = "it needs the native engine in the run's own process: leave sampling.engine and compute.backend out"
        wrong.append(("sampling", "deterministic", text))
    if sampling.engine_options and sampling.engine != "vllm":
        wrong.append(("sampling", "engine_options", "they are arguments of vLLM: take sampling.engine=vllm"))
    if wrong:
        raise config.wrong([Problem((section, key), text) for section, key, text in wrong])


async def join_cluster(config: TrainingConfig, held: AsyncExitStack) -> None:
    """Connect to the cluster, if one is asked for, and say at once where it can never hold the samplers."""
    compute = config.compute
    if compute.backend != "ray":
        return
    session = _session(config)
    held.push_async_callback(session.close)
    await session.open()
    asked = {"CPU": compute.cpus_per_sampler, "GPU": compute.gpus_per_sampler or 0.0}
    await session.check([asked] * compute.samplers, f"compute.samplers={compute.samplers}")


def _session(config: TrainingConfig) -> RaySession:
    return RaySession(config.compute.address, config.compute.num_gpus)


def pushed_to(config: TrainingConfig, publisher: Publishes, length: int, episodes: int, say: Say) -> Fleet:
    """Make the engines of a training run: their weights come from the publisher."""
    options = dict(config.sampling.engine_options)
    if publisher.rank is not None:
        from TrainingFactory.sampling.vllm_engine import lora_options

        options = lora_options(publisher.rank) | options
    spec = _spec(config, publisher.model_folder, length, episodes, publisher.dtype, options)
    return _fleet(config, spec, say, TOLERANCE if publisher.dtype == "float32" else COARSE)


def reading(config: TrainingConfig, loaded: LoadedModel, length: int, episodes: int, say: Say) -> Fleet:
    """Make engines that read the model from where it is, or else from a folder that is written for them."""
    folder, held = _readable(config), None
    if folder is None:
        held = tempfile.TemporaryDirectory(prefix="tfactory-model-")
        folder, whole = held.name, loaded.model
        whole = whole.merge_and_unload() if hasattr(whole, "merge_and_unload") else whole  # foreign object
        whole.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    spec = _spec(config, folder, length, episodes, config.model.dtype, config.sampling.engine_options, False)
    return _fleet(config, spec, say, COARSE, held)


def _readable(config: TrainingConfig) -> str | None:
    """Return where an engine on any machine finds the model by itself: a hub id, or a folder with whole weights."""
    model, name = config.model, resolve(config.model.name)
    if model.adapter is not None or model.quantization != "none" or model.revision is not None:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder.resolve()) if any(folder.glob("model*.safetensors")) else None
    return None if name == BUILTIN or folder.exists() or name.startswith("package:") else name


def _spec(
    config: TrainingConfig, model: str, length: int, episodes: int, dtype: str, options: dict[str, Any],
    pushed: bool = True,
) -> EngineSpec:  # fmt: skip
    on_ray = config.compute.backend == "ray"
    return EngineSpec(
        config.sampling.engine,
        model,
        length,
        slots=min(config.sampling.slots, episodes),
        dtype=dtype,
        device="auto" if on_ray else config.model.device,  # of another machine: Ray shows each its own
        pushed=pushed,
        trust_remote_code=config.model.trust_remote_code,
        options=dict(options),
    )


def _fleet(config: TrainingConfig, spec: EngineSpec, say: Say, tolerance: float, holds: Any = None) -> Fleet:
    compute = config.compute
    if compute.backend == "ray":
        places = RayPlaces(
            _session(config), spec, compute.samplers, compute.gpus_per_sampler, compute.cpus_per_sampler,
            compute.start_timeout, say,
        )  # fmt: skip
    else:
        places = LocalPlaces(spec, start_timeout=compute.start_timeout, say=say)
    return Fleet(places, compute.samplers, spec.max_length, say, tolerance, holds)
