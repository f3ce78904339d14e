"""Learners in several processes: their start, and the code that each of them runs."""

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
from TrainingFactory.assembly import sampler as sampler_assembly
from TrainingFactory.assembly.fleet import samples_elsewhere
from TrainingFactory.assembly.learner import check_sharded, make_algorithm
from TrainingFactory.cluster.launcher import find_launched_process, list_launcher_notes
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
    from TrainingFactory.cluster.ranks import RankGroup, ShardedPolicy
    from TrainingFactory.learning.policy import LocalPolicy
    from TrainingFactory.models import LoadedModel

T = TypeVar("T")
SERVE_FUNCTION = "TrainingFactory.assembly.learner_processes:serve_started_rank"
VERSIONED_PACKAGES = ("torch", "transformers", "peft", "numpy")


def with_learner_count(config: TrainingConfig, notify: Callable[[str], None]) -> TrainingConfig:
    """Return the config with the number of learner processes. Under a launcher such as torchrun it is the launcher's
    number of processes."""
    for note in list_launcher_notes():
        notify(f"note: {note}")
    launched_process, num_requested = find_launched_process(), config.compute.learners
    count = (num_requested or 1) if launched_process is None else launched_process.num_processes
    if num_requested not in (None, count):
        text = f"is {num_requested}, but the launcher started {count} processes: set it to {count}, or leave it out"
        raise config.wrong([Problem(("compute", "learners"), text)])
    if count > 1 and ":" in config.model.device:
        text = f"is {config.model.device}, but each of {count} learners has its own device: set cuda or auto"
        raise config.wrong([Problem(("model", "device"), text)])
    if count == 1:
        return config
    check_sharded(config)
    return config.model_copy(update={"compute": config.compute.model_copy(update={"learners": count})})


class Learners:
    """Learner processes of a run: this one (rank 0), and others that repeat its calls. `written_config` is the user's
    config if the processes of a launcher have read it too, else None."""

    def __init__(self, written_config: TrainingConfig | None) -> None:
        self._written_config, self._config = written_config, TrainingConfig()
        self._ranks: ShardedPolicy | None = None

    async def _open_processes(
        self, config: TrainingConfig, exit_stack: AsyncExitStack, folder: Path, interrupts: Interrupts
    ) -> None:
        """Start the other processes, or wait for those of a launcher, and check that all have the same versions and
        config."""
        self._config = config
        num_learners = config.compute.learners or 1
        if num_learners == 1:
            return
        from TrainingFactory.cluster.ranks import RankGroup, ShardedPolicy

        # Processes of a launcher may not have read the config: each decides by whether there are GPUs.
        on_gpu = _pick_device(config if find_launched_process() is None else TrainingConfig()).type == "cuda"
        log_note = ""
        if find_launched_process() is not None:
            rank_group = await in_thread(RankGroup, 0, num_learners, None, os.environ["MASTER_ADDR"], on_gpu)
        else:
            log_note = f", with a log in {folder}" if config.compute.backend == "local" else ""
            rank_group = await self._start_group(exit_stack, folder, num_learners, on_gpu)
        self._ranks = ranks = ShardedPolicy(rank_group, interrupts.fail, log_note)
        exit_stack.push_async_callback(ranks.close)
        await ranks.wait_for_ranks()
        local_facts = collect_facts(self._written_config)
        problems: list[str] = []
        for rank, rank_info in ranks.rank_infos.items():
            rank_facts = rank_info["facts"]
            keys = sorted(
                key for key in local_facts.keys() & rank_facts.keys() if local_facts[key] != rank_facts[key]
            )
            if keys:
                differences = ", ".join(f"{key} {rank_facts[key]} (here {local_facts[key]})" for key in keys)
                problems.append(f"learner {rank} on {rank_info['host']} has {differences}")
        if problems:
            raise ValueError(
                f"all learners need the same versions and the same config: {'; '.join(problems)}"
            )

    async def _start_group(
        self, exit_stack: AsyncExitStack, folder: Path, num_learners: int, uses_gpu: bool
    ) -> RankGroup:
        import torch

        from TrainingFactory.cluster.ranks import FIRST_COMPLETED, RankGroup, open_store

        compute = self._config.compute
        host = "127.0.0.1"
        workers: list[Any] = []
        if compute.backend == "ray":  # Ray shows each actor only its own device
            host, workers = await self._start_actors(exit_stack, num_learners)
        elif uses_gpu and (gpus := torch.cuda.device_count()) < num_learners:
            raise ValueError(
                f"compute.learners is {num_learners}, but this machine has {gpus} GPUs and each learner needs one: set "
                "fewer, or use several machines with compute.backend=ray or torchrun"
            )
        for rank in range(1, num_learners if compute.backend == "local" else 1):
            log_file = exit_stack.enter_context((folder / f"learner-{rank}.log").open("ab"))
            workers.append(Worker(SERVE_FUNCTION, stderr=log_file, start_seconds=compute.start_timeout))
        store, port = open_store(host)
        tasks: list[asyncio.Task[str]] = []
        for rank, worker in enumerate(workers, 1):
            exit_stack.push_async_callback(worker.close)
            device = rank if compute.backend == "local" else 0
            tasks.append(
                asyncio.create_task(_run_rank(worker, [rank, num_learners, port, host, uses_gpu, device]))
            )
        join_task = asyncio.create_task(in_thread(RankGroup, 0, num_learners, store, host, uses_gpu))
        await asyncio.wait({join_task, *tasks}, timeout=compute.start_timeout, return_when=FIRST_COMPLETED)
        if not join_task.done():
            causes = [f"learner {rank} {task.result()}" for rank, task in enumerate(tasks, 1) if task.done()]
            reason = "; ".join(causes) or f"compute.start_timeout={compute.start_timeout:g} s have passed"
            log_note = "" if compute.backend == "ray" else f"; logs are in {folder}"
            raise ValueError(f"compute.learners={num_learners} could not be started: {reason}{log_note}")
        return join_task.result()

    async def _start_actors(self, exit_stack: AsyncExitStack, num_learners: int) -> tuple[str, list[Any]]:
        """Return the address of this machine in the Ray cluster, and an actor for each other process."""
        compute = self._config.compute
        session = RaySession(compute.address, compute.num_gpus)
        await session.open()
        exit_stack.push_async_callback(session.close)
        ray, gpus = require_ray(), session.pick_gpus(compute.gpus_per_learner)
        bundles = [{"CPU": 1.0, "GPU": gpus}] * (num_learners - 1)
        group = await session.allocate_group(
            bundles, f"compute.learners={num_learners}", compute.start_timeout
        )
        exit_stack.callback(session.remove_group, group)
        options = {"group": group, "num_cpus": 1, "num_gpus": gpus}
        actors = [
            RayWorker(SERVE_FUNCTION, role=f"learner {i + 1}", bundle_index=i, **options)
            for i in range(num_learners - 1)
        ]
        return await in_thread(ray.util.get_node_ip_address), actors

    async def load(self, load_model: Callable[[], T], *setup_args: Any) -> T:
        """Start the processes with the arguments of `_open_processes`; load the model in all of them concurrently."""
        await self._open_processes(*setup_args)
        if self._ranks is None:
            return await in_thread(load_model)
        return await self._ranks.call("prepare", [self._config], lambda: in_thread(load_model))

    async def make_policies(
        self, loaded_model: LoadedModel, algorithm: Algorithm, steps: int, has_episodes: bool
    ) -> tuple[LocalPolicy, Policy]:
        """Make the policy of this process. Return it and the policy over all processes, which are the same if there is
        one process. `has_episodes`: the run samples episodes."""
        ranks, full_model = self._ranks, None
        if ranks is not None and has_episodes and not samples_elsewhere(self._config):
            device = _pick_device(self._config)  # the engine's copy is made before the weights are sharded
            full_model = await in_thread(lambda: deepcopy(loaded_model.model).to(device))
        args = self._config, loaded_model, algorithm, steps, has_episodes, full_model
        make_policy = partial(in_thread, sampler_assembly.make_publishing_policy, *args)
        if ranks is None:
            local_policy = await make_policy()
            return local_policy, local_policy
        ranks.local_policy = await ranks.call("build", [steps, has_episodes], make_policy)
        return ranks.local_policy, cast(Policy, ranks)

    async def end_ranks(self, report: TrainingReport) -> None:
        """End the other learner processes; those that a launcher started get the error report."""
        if self._ranks is not None:
            await self._ranks.close(report)


async def _run_rank(worker: Any, rank_args: list[Any]) -> str:
    """Run a learner in a worker process until it ends; return the reason of its end."""
    try:
        return await worker.ask(rank_args, None) or "ended"
    except (WorkerDied, WorkerError) as error:
        return str(error)


def _pick_device(config: TrainingConfig) -> Any:
    from TrainingFactory.models.dtypes import pick_device

    return pick_device(config.model.device)


def collect_facts(config: TrainingConfig | None) -> dict[str, Any]:
    """Return the values that must be equal in all learner processes: package versions, and the config as the user wrote
    it."""
    facts: dict[str, Any] = {"Python": platform.python_version(), "TrainingFactory": __version__}
    facts |= {name: version(name) for name in VERSIONED_PACKAGES}
    for section, section_values in ({} if config is None else config.model_dump(mode="json")).items():
        keys = section_values.items() if isinstance(section_values, dict) else enumerate(section_values)
        facts |= {f"{section}.{key}": value for key, value in keys}
    return facts


class LearnerRank:
    """Learner process other than rank 0, which executes the calls of rank 0 on its share of the weights."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._policy: Any = None

    async def call(self, method: str, *args: Any) -> None:
        handler_by_method = {"prepare": self._load_model, "build": self._build_policy}
        if method in handler_by_method:
            await in_thread(handler_by_method[method], *args)
        else:
            await getattr(self._policy, method)(*args)

    def _load_model(self, config: TrainingConfig) -> None:
        if _pick_device(config).type == "cuda":
            model = config.model.model_copy(update={"device": f"cuda:{self._device}"})
            config = config.model_copy(update={"model": model})
        self._config, self._loaded_model = config, sampler_assembly.load_trainable(config)

    def _build_policy(self, steps: int, has_episodes: bool) -> None:
        algorithm = make_algorithm(self._config)
        self._policy = sampler_assembly.make_publishing_policy(
            self._config, self._loaded_model, algorithm, steps, has_episodes
        )


def serve_started_rank(rank_args: list[Any]) -> None:
    """Execute the calls of rank 0 in a learner process that `Learners` started."""
    *args, device = rank_args
    asyncio.run(_serve(args, device, None))


def serve_rank(config: TrainingConfig | None) -> TrainingReport | None:
    """In a launcher's process other than rank 0, execute the calls of rank 0 until the run has ended, and return the
    run's report. Return None in any other process. `config` is the config as the user wrote it."""
    launched_process = find_launched_process()
    if launched_process is None or launched_process.rank == 0:
        return None
    logging.disable(logging.WARNING)  # rank 0 logs the same
    uses_gpu = _pick_device(TrainingConfig()).type == "cuda"
    args = launched_process.rank, launched_process.num_processes, None, os.environ["MASTER_ADDR"], uses_gpu
    if (report := run_anywhere(lambda: _serve(args, launched_process.local_rank, config))) is None:
        raise SystemExit(1)  # rank 0 reports the reason
    return report


async def _serve(args: Sequence[Any], device: int, config: TrainingConfig | None) -> TrainingReport | None:
    from TrainingFactory.cluster.ranks import RankGroup, serve

    # The group stays open: a process that closes it after collectives aborts at exit.
    return await serve(await in_thread(RankGroup, *args), LearnerRank(device).call, collect_facts(config))
