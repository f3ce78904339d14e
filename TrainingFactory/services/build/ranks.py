"""A learner in several processes: who starts them, what they are told, and what they do."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from TrainingFactory import __version__
from TrainingFactory.cluster.launcher import launched, launcher_notes
from TrainingFactory.cluster.ray_session import RaySession, require_ray
from TrainingFactory.cluster.ray_workers import RayWorker
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.protocols import Algorithm, Policy
from TrainingFactory.running import run as run_anywhere
from TrainingFactory.services.build import sampler as build_sampler
from TrainingFactory.services.build.fleet import elsewhere
from TrainingFactory.services.build.learner import check_sharded, make_algorithm, make_policy, make_trainable
from TrainingFactory.services.runs.folder import TrainingReport
from TrainingFactory.services.training.interrupts import Interrupts
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.workers import Worker, WorkerDied, WorkerError

if TYPE_CHECKING:
    from TrainingFactory.cluster.ranks import Group, Ranks
    from TrainingFactory.learning.policy import LocalPolicy
    from TrainingFactory.models import LoadedModel

T = TypeVar("T")
SERVE = "TrainingFactory.services.build.ranks:serve_started"
PACKAGES = ("torch", "transformers", "peft", "numpy")


def with_learners(config: TrainingConfig, say: Callable[[str], None]) -> TrainingConfig:
    """Return the config with the number of processes that train: that of a launcher, if one has started this."""
    for note in launcher_notes():
        say(f"note: {note}")
    there, count, wrong = launched(), config.compute.learners or 1, list[Problem]()
    if there is not None and config.compute.learners not in (None, there.count):
        text = f"it is {count}, and the launcher has started {there.count} processes; leave it out, or make it equal"
        wrong.append(Problem(("compute", "learners"), text))
    count = count if there is None else there.count
    if count > 1 and ":" in config.model.device:
        text = f"it is {config.model.device}, and each of {count} learners has a device of its own: take cuda or auto"
        wrong.append(Problem(("model", "device"), text))
    if wrong:
        raise config.wrong(wrong)
    if count > 1:
        check_sharded(config)
    return config.model_copy(update={"compute": config.compute.model_copy(update={"learners": count})})


class Learners:
    """The processes of a run's learner: this one alone, or also others that do what it does. `written` is the config
    that processes of a launcher have read too; None where they have not."""

    def __init__(self, written: TrainingConfig | None) -> None:
        self._written, self._config = written, TrainingConfig()
        self._ranks: Ranks | None = None
        self._whole: Any = None  # the model of an engine in this process: the learner's is sharded

    async def open(
        self, config: TrainingConfig, held: AsyncExitStack, folder: Path, interrupts: Interrupts
    ) -> None:
        """Start the others, or wait for those of a launcher, and see that they are as this one is."""
        self._config, count, note = config, config.compute.learners or 1, ""
        if count == 1:
            return
        from TrainingFactory.cluster.ranks import Group, Ranks
        from TrainingFactory.models.loading import pick_device

        cuda = pick_device(config.model.device).type == "cuda"
        if launched() is not None:
            group = await in_thread(Group, 0, count, None, os.environ["MASTER_ADDR"], cuda)
            if threading.current_thread() is threading.main_thread():
                loop = asyncio.get_running_loop()  # a launcher that ends everybody waits a while
                stop = partial(loop.call_soon_threadsafe, interrupts.ask)
                signal.signal(signal.SIGTERM, lambda *_: loop.is_closed() or stop())
        else:
            note = f", with a log in {folder}" if config.compute.backend == "local" else ""
            group = await self._started(held, folder, count, cuda)
        self._ranks = ranks = Ranks(group, interrupts.fail, note)
        held.push_async_callback(ranks.close)
        await ranks.hello()
        mine, wrong = facts(self._written), list[str]()
        for rank, about in ranks.about.items():
            theirs = about["facts"]
            other = [key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]]
            told = ", ".join(f"{key} {theirs[key]} (here {mine[key]})" for key in sorted(other))
            wrong += [f"learner {rank} on {about['host']} has {told}"] * bool(other)
        if wrong:
            text = "all processes of a learner need the same versions and the same config: "
            raise ValueError(text + "; ".join(wrong))

    async def _started(self, held: AsyncExitStack, folder: Path, count: int, cuda: bool) -> Group:
        from TrainingFactory.cluster.ranks import FIRST, Group, listening

        compute, host, workers = self._config.compute, "127.0.0.1", list[Any]()
        if compute.backend == "ray":
            host, workers = await self._actors(held, count)
        else:
            check_devices(count, cuda)
            for rank in range(1, count):
                log = held.enter_context((folder / f"learner-{rank}.log").open("ab"))
                workers.append(Worker(SERVE, stderr=log, start_seconds=compute.start_timeout))
        store, port = listening(host)
        place = {"count": count, "host": host, "port": port, "cuda": cuda}
        begun = list[asyncio.Task[str]]()
        for rank, worker in enumerate(workers, 1):
            held.push_async_callback(worker.close)
            device = rank if compute.backend == "local" else 0  # Ray shows each its own alone
            begun.append(asyncio.create_task(_end_of(worker, place | {"rank": rank, "device": device})))
        joining = asyncio.create_task(in_thread(Group, 0, count, store, host, cuda))
        await asyncio.wait({joining, *begun}, timeout=compute.start_timeout, return_when=FIRST)
        if not joining.done():
            ended = [f"learner {rank} {task.result()}" for rank, task in enumerate(begun, 1) if task.done()]
            late = f"it took longer than compute.start_timeout={compute.start_timeout:g} s"
            logs = "" if compute.backend == "ray" else f"; logs are in {folder}"
            raise ValueError(
                f"compute.learners={count} could not be started: {'; '.join(ended) or late}{logs}"
            )
        return joining.result()

    async def _actors(self, held: AsyncExitStack, count: int) -> tuple[str, list[RayWorker]]:
        """Return the address of this machine in a Ray cluster, and an actor for each other process."""
        compute, ray = self._config.compute, require_ray()
        session = RaySession(compute.address, compute.num_gpus)
        await session.open()
        held.push_async_callback(session.close)
        gpus, cpus = compute.gpus_per_learner, compute.cpus_per_learner
        gpus = float("GPU" in ray.cluster_resources()) if gpus is None else gpus
        bundles, asked = [{"CPU": cpus, "GPU": gpus}] * (count - 1), f"compute.learners={count}"
        group = await session.placed(bundles, asked, compute.start_timeout)
        held.callback(session.unplace, group)
        inside = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        made = [
            RayWorker(
                SERVE,
                what=f"learner {n + 1}",
                num_cpus=cpus,
                num_gpus=gpus,
                scheduling_strategy=inside(group, n),
            )
            for n in range(count - 1)
        ]
        return await in_thread(ray.util.get_node_ip_address), made

    async def load(self, own: Callable[[], T]) -> T:
        """Load the model in all processes at the same time."""
        return await self._do("prepare", [self._config.model_dump(mode="json")], lambda: in_thread(own))

    async def policy(
        self, loaded: LoadedModel, algorithm: Algorithm, steps: int
    ) -> tuple[LocalPolicy, Policy]:
        """Make the policy of this process, and that of all."""
        config, ranks = self._config, self._ranks
        if ranks is not None and not elsewhere(config):
            self._whole = await in_thread(deepcopy, loaded.model)
        given = config, loaded, algorithm, steps, ranks is not None
        own = await self._do("build", [steps], lambda: in_thread(make_policy, *given))
        if ranks is None:
            return own, own
        from TrainingFactory.cluster.ranks import SharedPolicy

        return own, SharedPolicy(own, ranks)

    async def publisher(self, own: LocalPolicy) -> None:
        """Make what writes or gathers the weights for samplers that do not share them."""
        given = self._config, own, self._whole
        await self._do("publisher", [], lambda: in_thread(build_sampler.add_publisher, *given))

    async def end(self, report: TrainingReport) -> None:
        """Let the others end, with the report for those that a launcher has started."""
        if self._ranks is not None:
            fields = {name: getattr(report, name) for name in TrainingReport.__slots__}
            await self._ranks.close(fields | {"run": str(report.run)})

    async def _do(self, method: str, args: list[Any], own: Callable[[], Awaitable[T]]) -> T:
        return await (own() if self._ranks is None else self._ranks.call(method, args, own))


async def _end_of(worker: Any, place: dict[str, Any]) -> str:
    """Let it serve, and return how it ended."""
    try:
        await worker.ask(place, None)
        return "ended"
    except (WorkerDied, WorkerError) as error:
        return str(error)


def check_devices(count: int, cuda: bool) -> None:
    """Raise where this machine has fewer GPUs than learners."""
    import torch

    if cuda and (there := torch.cuda.device_count()) < count:
        raise ValueError(
            f"compute.learners is {count}, and this machine has {there} GPUs, one for each: take fewer, or several "
            "machines by compute.backend=ray or torchrun"
        )


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
        self._loaded: Any = None
        self._policy: Any = None

    async def call(self, method: str, *args: Any) -> None:
        ours = {"prepare": self._prepare, "build": self._build, "publisher": self._publisher}
        await (in_thread(ours[method], *args) if method in ours else getattr(self._policy, method)(*args))

    def _prepare(self, written: Mapping[str, Any]) -> None:
        from TrainingFactory.models.loading import pick_device

        config = TrainingConfig(**written)
        if pick_device(config.model.device).type == "cuda":
            model = config.model.model_copy(update={"device": f"cuda:{self._device}"})
            config = config.model_copy(update={"model": model})
        self._config, self._loaded = config, build_sampler.load(config)
        make_trainable(config, self._loaded)

    def _build(self, steps: int) -> None:
        algorithm = make_algorithm(self._config)
        self._policy = make_policy(self._config, self._loaded, algorithm, steps, True)

    def _publisher(self) -> None:
        build_sampler.add_publisher(self._config, self._policy, None)


def serve_started(place: Mapping[str, Any]) -> None:
    """Serve in a process that `Learners` has started."""
    import torch.distributed as dist

    store = dist.TCPStore(place["host"], place["port"], None, False)
    shape = place["rank"], place["count"], store, place["host"], place["cuda"]
    asyncio.run(_serve(shape, place["device"], None))


def served(config: TrainingConfig | None) -> TrainingReport | None:
    """Serve until the run has ended where a launcher says that this process is not the first, and return what the run
    reports; None elsewhere. `config` is what the user wrote."""
    there = launched()
    if there is None or there.rank == 0:
        return None
    from TrainingFactory.models.loading import pick_device

    logging.disable(logging.WARNING)  # rank 0 says the same
    cuda = pick_device("auto" if config is None else config.model.device).type == "cuda"
    shape = there.rank, there.count, None, os.environ["MASTER_ADDR"], cuda
    report = run_anywhere(lambda: _serve(shape, there.device, config))
    if report is None:
        raise SystemExit(1)  # rank 0 says why
    return TrainingReport(**report | {"run": Path(report["run"])})


async def _serve(shape: tuple[Any, ...], device: int, config: TrainingConfig | None) -> dict[str, Any] | None:
    from TrainingFactory.cluster.ranks import Group, serve

    group = await in_thread(Group, *shape)
    try:
        return await serve(group, Rank(device).call, facts(config))
    finally:
        group.close()
