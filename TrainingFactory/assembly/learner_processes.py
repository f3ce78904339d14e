"""A learner in several processes: who starts them, what they are told, and what they do."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from TrainingFactory import __version__
from TrainingFactory.assembly import sampler as build_sampler
from TrainingFactory.assembly.fleet import elsewhere
from TrainingFactory.assembly.learner import check_sharded, make_algorithm
from TrainingFactory.cluster.launcher import launched, launcher_notes
from TrainingFactory.cluster.ray_session import RaySession, require_ray
from TrainingFactory.cluster.ray_workers import RayWorker
from TrainingFactory.common.event_loop import run as run_anywhere
from TrainingFactory.common.workers import Worker, WorkerDied, WorkerError
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.protocols import Algorithm, Policy
from TrainingFactory.runs.folder import TrainingReport
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.training.interrupts import Interrupts

if TYPE_CHECKING:
    from TrainingFactory.cluster.ranks import Group, Ranks
    from TrainingFactory.learning.policy import LocalPolicy
    from TrainingFactory.models import LoadedModel

T = TypeVar("T")
SERVE = "TrainingFactory.assembly.learner_processes:serve_started"
PACKAGES = ("torch", "transformers", "peft", "numpy")


def with_learners(config: TrainingConfig, say: Callable[[str], None]) -> TrainingConfig:
    """Return the config with the number of processes that train: that of a launcher, if one has started this."""
    for note in launcher_notes():
        say(f"note: {note}")
    there, asked = launched(), config.compute.learners
    count = (asked or 1) if there is None else there.count
    if asked not in (None, count):
        text = (
            f"it is {asked}, the launcher has started {count} processes: set it to {count}, or leave it out"
        )
        raise config.wrong([Problem(("compute", "learners"), text)])
    if count > 1 and ":" in config.model.device:
        text = f"it is {config.model.device}, and each of {count} learners has its own: take cuda or auto"
        raise config.wrong([Problem(("model", "device"), text)])
    if count == 1:
        return config
    check_sharded(config)
    return config.model_copy(update={"compute": config.compute.model_copy(update={"learners": count})})


class Learners:
    """The processes of a run's learner: this one alone, or also others that do what it does. `written` is the config
    that processes of a launcher have read too; None where they have not."""

    def __init__(self, written: TrainingConfig | None) -> None:
        self._written, self._config = written, TrainingConfig()
        self._ranks: Ranks | None = None

    async def _open(
        self, config: TrainingConfig, held: AsyncExitStack, folder: Path, interrupts: Interrupts
    ) -> None:
        """Start the others, or wait for those of a launcher, and see that they are as this one is."""
        self._config, count, note = config, config.compute.learners or 1, ""
        if count == 1:
            return
        from TrainingFactory.cluster.ranks import Group, Ranks

        # Under a launcher not all have read the config: each goes by whether there are GPUs.
        cuda = _device(config if launched() is None else TrainingConfig()).type == "cuda"
        if launched() is not None:
            group = await in_thread(Group, 0, count, None, os.environ["MASTER_ADDR"], cuda)
        else:
            note = f", with a log in {folder}" if config.compute.backend == "local" else ""
            group = await self._started(held, folder, count, cuda)
        self._ranks = ranks = Ranks(group, interrupts.fail, note)
        held.push_async_callback(ranks.close)
        await ranks.hello()
        mine, wrong = facts(self._written), list[str]()
        for rank, about in ranks.about.items():
            theirs = about["facts"]
            other = sorted(key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key])
            told = ", ".join(f"{key} {theirs[key]} (here {mine[key]})" for key in other)
            wrong += [f"learner {rank} on {about['host']} has {told}"] * bool(other)
        if wrong:
            raise ValueError(f"all learners need the same versions and the same config: {'; '.join(wrong)}")

    async def _started(self, held: AsyncExitStack, folder: Path, count: int, cuda: bool) -> Group:
        import torch

        from TrainingFactory.cluster.ranks import FIRST, Group, listening

        compute, host, workers = self._config.compute, "127.0.0.1", list[Any]()
        if compute.backend == "ray":  # which shows each its own device alone
            host, workers = await self._actors(held, count)
        elif cuda and (there := torch.cuda.device_count()) < count:
            text = f"compute.learners is {count}, and this machine has {there} GPUs, one for each: take fewer, or"
            raise ValueError(f"{text} several machines by compute.backend=ray or torchrun")
        for rank in range(1, count if compute.backend == "local" else 1):
            log = held.enter_context((folder / f"learner-{rank}.log").open("ab"))
            workers.append(Worker(SERVE, stderr=log, start_seconds=compute.start_timeout))
        store, port = listening(host)
        begun = list[asyncio.Task[str]]()
        for rank, worker in enumerate(workers, 1):
            held.push_async_callback(worker.close)
            device = rank if compute.backend == "local" else 0
            begun.append(asyncio.create_task(_end_of(worker, [rank, count, port, host, cuda, device])))
        joining = asyncio.create_task(in_thread(Group, 0, count, store, host, cuda))
        await asyncio.wait({joining, *begun}, timeout=compute.start_timeout, return_when=FIRST)
        if not joining.done():
            ended = [f"learner {rank} {task.result()}" for rank, task in enumerate(begun, 1) if task.done()]
            told = "; ".join(ended) or f"compute.start_timeout={compute.start_timeout:g} s are over"
            logs = "" if compute.backend == "ray" else f"; logs are in {folder}"
            raise ValueError(f"compute.learners={count} could not be started: {told}{logs}")
        return joining.result()

    async def _actors(self, held: AsyncExitStack, count: int) -> tuple[str, list[Any]]:
        """Return the address of this machine in a Ray cluster, and an actor for each other process."""
        compute = self._config.compute
        session = RaySession(compute.address, compute.num_gpus)
        await session.open()
        held.push_async_callback(session.close)
        ray, gpus = require_ray(), session.gpus(compute.gpus_per_learner)
        bundles, asked = [{"CPU": 1.0, "GPU": gpus}] * (count - 1), f"compute.learners={count}"
        group = await session.placed(bundles, asked, compute.start_timeout)
        held.callback(session.unplace, group)
        given = {"group": group, "num_cpus": 1, "num_gpus": gpus}
        made = [RayWorker(SERVE, what=f"learner {n + 1}", bundle=n, **given) for n in range(count - 1)]
        return await in_thread(ray.util.get_node_ip_address), made

    async def load(self, own: Callable[[], T], *given: Any) -> T:
        """Open with what is `given`, and load the model in all processes at the same time."""
        await self._open(*given)
        if self._ranks is None:
            return await in_thread(own)
        return await self._ranks.call("prepare", [self._config], lambda: in_thread(own))

    async def policy(
        self, loaded: LoadedModel, algorithm: Algorithm, steps: int, played: bool
    ) -> tuple[LocalPolicy, Policy]:
        """Make the policy of this process, and that of all; `played`: there is something that samples."""
        ranks, whole = self._ranks, None
        if ranks is not None and played and not elsewhere(self._config):
            place = _device(self._config)  # of an engine here, whose copy is made before weights are sharded
            whole = await in_thread(lambda: deepcopy(loaded.model).to(place))
        given = self._config, loaded, algorithm, steps, played, whole
        make = partial(in_thread, build_sampler.make_published, *given)
        if ranks is None:
            own = await make()
            return own, own
        ranks.own = await ranks.call("build", [steps, played], make)
        return ranks.own, cast(Policy, ranks)

    async def end(self, report: TrainingReport) -> None:
        """Let the others end, with the report for those that a launcher has started."""
        if self._ranks is not None:
            await self._ranks.close(report)


async def _end_of(worker: Any, place: list[Any]) -> str:
    """Let it serve, and return how it ended."""
    try:
        return await worker.ask(place, None) or "ended"
    except (WorkerDied, WorkerError) as error:
        return str(error)


def _device(config: TrainingConfig) -> Any:
    from TrainingFactory.models.loading import pick_device

    return pick_device(config.model.device)


def facts(config: TrainingConfig | None) -> dict[str, Any]:
    """Return what must be equal in all processes: versions, and what the user wrote into the config."""
    found: dict[str, Any] = {"Python": platform.python_version(), "TrainingFactory": __version__}
    found |= {name: version(name) for name in PACKAGES}
    for section, part in ({} if config is None else config.model_dump(mode="json")).items():
        keys = part.items() if isinstance(part, dict) else enumerate(part)
        found |= {f"{section}.{key}": value for key, value in keys}
    return found


class Rank:
    """A process that serves: it has the learner that rank 0 has, over its own share of the weights."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._policy: Any = None

    async def call(self, method: str, *args: Any) -> None:
        ours = {"prepare": self._prepare, "build": self._build}
        await (in_thread(ours[method], *args) if method in ours else getattr(self._policy, method)(*args))

    def _prepare(self, config: TrainingConfig) -> None:
        if _device(config).type == "cuda":
            model = config.model.model_copy(update={"device": f"cuda:{self._device}"})
            config = config.model_copy(update={"model": model})
        self._config, self._loaded = config, build_sampler.load_trained(config)

    def _build(self, steps: int, played: bool) -> None:
        given = self._config, self._loaded, make_algorithm(self._config), steps, played
        self._policy = build_sampler.make_published(*given)


def serve_started(place: list[Any]) -> None:
    """Serve in a process that `Learners` has started."""
    *shape, device = place
    asyncio.run(_serve(shape, device, None))


def served(config: TrainingConfig | None) -> TrainingReport | None:
    """Serve until the run has ended where a launcher says that this process is not the first, and return what the run
    reports; None elsewhere. `config` is what the user wrote."""
    there = launched()
    if there is None or there.rank == 0:
        return None
    logging.disable(logging.WARNING)  # rank 0 says the same
    cuda = _device(TrainingConfig()).type == "cuda"
    shape = there.rank, there.count, None, os.environ["MASTER_ADDR"], cuda
    if (report := run_anywhere(lambda: _serve(shape, there.device, config))) is None:
        raise SystemExit(1)  # rank 0 says why
    return report


async def _serve(shape: Sequence[Any], device: int, config: TrainingConfig | None) -> TrainingReport | None:
    from TrainingFactory.cluster.ranks import Group, serve

    # The group stays open: after collectives a process that has closed it aborts at its end.
    return await serve(await in_thread(Group, *shape), Rank(device).call, facts(config))
