"""Engines in Ray actors on the machines of a cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from TrainingFactory.cluster.engines import make_engine
from TrainingFactory.cluster.local import LocalEngine, LocalEngineLauncher
from TrainingFactory.cluster.places import EngineLost
from TrainingFactory.cluster.ray_session import RaySession, require_ray
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Completion, EngineSpec, Weights

MAX_CONCURRENCY = 10_000  # concurrent calls of one actor
CLOSE_SECONDS = 20.0
Files = Mapping[str, Any]  # name -> content as an array of bytes
Answer = tuple[int, Completion | Exception]
TurnArguments = tuple[Any, ...] | None  # arguments of `Engine.sample`; None cancels it


class RayEngineLauncher:
    """Launcher of `RayEngine`s, each in one bundle of a placement group with `num_engines` bundles. gpus=None: 1 GPU
    for vLLM if the cluster has any, else 0. If weights are pushed, machines without the folder `spec.model` receive the
    model's config; otherwise the path must exist on every machine. `folder` keeps the engines' logs; machines without
    it use a temporary folder."""

    def __init__(
        self, session: RaySession, spec: EngineSpec, num_engines: int, gpus: float | None = None, cpus: float = 1.0,
        timeout: float = 600.0, notify: Callable[[str], object] = lambda _: None, role: str = "sampler",
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._session, self._spec, self._notify, self._role = session, spec, notify, role
        self._num_engines, self._gpus, self._cpus = num_engines, gpus, cpus
        self._timeout = timeout
        self._folder = None if folder is None else folder.resolve()
        self._group_lock, self._pack_lock = asyncio.Lock(), asyncio.Lock()
        self._placement_group: Any = None
        self._stored_weights: tuple[Weights, Any] | None = None  # the last weights put into the object store
        self._engines: list[RayEngine] = []

    async def launch_engine(self, number: int) -> RayEngine:
        spec, session, start_time = self._spec, self._session, time.monotonic()
        async with self._group_lock:
            await session.open()
            ray = require_ray()
            self._gpus = session.pick_gpus(self._gpus, spec.kind == "vllm")
            if self._placement_group is None:
                option = "compute.samplers" if self._role == "sampler" else f"reward.{self._role}.replicas"
                bundles = [{"CPU": self._cpus, "GPU": self._gpus}] * self._num_engines
                role = f"{option}={self._num_engines}"
                self._placement_group = await session.allocate_group(bundles, role, self._timeout)
        name = f"{self._role} {number}"
        resources = {"num_cpus": self._cpus, "num_gpus": self._gpus, "max_concurrency": MAX_CONCURRENCY}
        options = session.options(name, self._placement_group, number, **resources)
        actor = ray.remote(EngineActor).options(**options)
        engine = RayEngine(ray, actor.remote(), name, self.pack_weights)
        self._engines.append(engine)
        pattern = "*" if spec.options.get("enable_lora") else "*.json"  # adapters need the base weights too
        model_files = await in_thread(_read_files, Path(spec.model), pattern) if spec.pushed else {}
        try:
            async with asyncio.timeout(self._timeout):
                await engine.open(spec, number, model_files, self._timeout, self._folder, self._role)
        except BaseException as error:
            await engine.close()
            if not isinstance(error, EngineLost | ValueError | TimeoutError):
                raise
            timeout_text = f"it took longer than {self._timeout:g} s (increase compute.start_timeout)"
            cause = timeout_text if isinstance(error, TimeoutError) else error
            raise ValueError(f"Could not start {name}: {cause}") from error
        self._notify(f"{engine.name} is ready after {time.monotonic() - start_time:.0f} s")
        return engine

    async def pack_weights(self, weights: Weights) -> Any:
        """Put the weights' files into Ray's object store, which copies them to each machine once; return the ref."""
        async with self._pack_lock:
            if self._stored_weights is None or self._stored_weights[0] is not weights:
                files = await in_thread(_read_files, Path(weights.folder), "*")
                self._stored_weights = weights, await in_thread(require_ray().put, files)
        return self._stored_weights[1]

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))
        if self._placement_group is not None:
            self._session.remove_group(self._placement_group)
        self._placement_group = None
        await self._session.close()


class RayEngine:
    """Engine in a Ray actor, which `close` ends. It also ends when this program ends, even if that is killed."""

    def __init__(self, ray: Any, actor: Any, name: str, pack_weights: Callable[[Weights], Any]) -> None:
        self.name, self.engine_info, self._log_note = name, {}, ""
        self._ray, self._pack_weights = ray, pack_weights
        self._actor: Any = actor
        self._is_local = True  # on this machine, which has the weights' folders
        self._ticket_numbers, self._queued_turns = itertools.count(), list[tuple[int, TurnArguments]]()
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._failure: EngineLost | None = None

    async def open(
        self, spec: EngineSpec, number: int, files: Files, timeout: float, folder: Path | None, role: str
    ) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        start_ref = self._actor.start.remote(spec, number, files, timeout, folder, role)
        self.engine_info = await self._await_ref(start_ref)
        if self.engine_info["log"]:
            self._log_note = f" (log on {self.engine_info['node']}: {self.engine_info['log']})"
        self._is_local = self.engine_info["ray_node"] == self._ray.get_runtime_context().get_node_id()
        self.name = f"{self.name} on {self.engine_info['node']}, process {self.engine_info['pid']}"

    async def call(self, method: str, *args: Any) -> Any:
        if method == "load" and not self._is_local:
            return await self._await_ref(self._actor.load.remote(args[0], await self._pack_weights(args[0])))
        if method == "sample":
            return await self._sample_turn(args)
        return await self._await_ref(self._actor.call.remote(method, args))

    async def _sample_turn(self, args: tuple[Any, ...]) -> Completion:
        """Sample one turn. Simultaneous requests share one Ray call, because a Ray call takes as long as sampling many
        tokens."""
        if self._failure is not None:
            raise self._failure
        self._reader = self._reader or asyncio.create_task(self._read_answers())
        ticket = next(self._ticket_numbers)
        self._futures[ticket] = future = asyncio.get_running_loop().create_future()
        self._queue_turn(ticket, args)
        try:
            return await future
        except asyncio.CancelledError:
            self._queue_turn(ticket, None)
            raise
        finally:
            del self._futures[ticket]

    def _queue_turn(self, ticket: int, args: TurnArguments) -> None:
        if not self._queued_turns:
            asyncio.get_running_loop().call_soon(self._send_turns)
        self._queued_turns.append((ticket, args))

    def _send_turns(self) -> None:
        turns, self._queued_turns = self._queued_turns, []
        if self._actor is not None:
            self._actor.post_turns.remote(turns)

    async def _read_answers(self) -> None:
        """Resolve the requests' futures until the actor is lost."""
        while self._failure is None:
            try:
                answers = await self._await_ref(self._actor.wait_for_answers.remote())
            except EngineLost as error:
                return self._handle_lost_actor(error)
            for ticket, result in answers:
                future = self._futures.get(ticket)
                if future is None or future.done():  # cancelled
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _handle_lost_actor(self, error: EngineLost) -> None:
        self._failure = self._failure or error
        for future in self._futures.values():
            if not future.done():
                future.set_exception(self._failure)

    async def _await_ref(self, ref: Any) -> Any:
        ray_errors = self._ray.exceptions
        try:
            return await ref
        except asyncio.CancelledError:
            self._ray.cancel(ref)
            raise
        except ray_errors.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise ValueError(str(error.cause)) from None
            raise EngineLost(f"{self.name} failed: {error.cause!r}{self._log_note}") from None
        except ray_errors.RayError as error:
            raise EngineLost(f"{self.name} has exited: {type(error).__name__}{self._log_note}") from None

    async def close(self) -> None:
        self._handle_lost_actor(EngineLost(f"{self.name} is closed"))
        if self._reader is not None:
            self._reader.cancel()
        if self._actor is None or not self._ray.is_initialized():
            return
        actor, self._actor = self._actor, None
        with suppress(EngineLost, ValueError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._await_ref(actor.close.remote())
        self._ray.kill(actor)


class EngineActor:
    """Ray actor that runs an engine. vLLM runs in a `LocalEngine`, because its watcher ends vLLM's processes if the
    actor is killed."""

    def __init__(self) -> None:
        self._call: Callable[..., Any]
        self._engine: LocalEngine | None = None
        self._model_folder: tempfile.TemporaryDirectory[str] | None = None  # model files from another machine
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._answers, self._has_answers = list[Answer](), asyncio.Event()

    async def start(
        self, spec: EngineSpec, number: int, files: Files, timeout: float, folder: Path | None, role: str
    ) -> dict[str, Any]:
        """Start the engine and return its description. If `folder` does not exist on this machine, log to a temporary
        folder."""
        if files and not os.path.isdir(spec.model):
            self._model_folder = _write_files(files, None)
            spec = dataclasses.replace(spec, model=self._model_folder.name)
        if folder is not None and not folder.is_dir():
            folder = Path(tempfile.mkdtemp(prefix="tfactory-engines-"))
        log_path = None if folder is None else folder / f"{role}-{number}.log"
        if spec.kind == "vllm":
            launcher = LocalEngineLauncher(spec, start_timeout=timeout, folder=folder, role=role)
            self._engine = local_engine = await launcher.launch_engine(number)
            self._call, engine_info = local_engine.call, local_engine.engine_info
        else:
            if log_path is not None:
                with log_path.open("ab") as log_file:
                    os.dup2(log_file.fileno(), 1)
                    os.dup2(log_file.fileno(), 2)
            engine = make_engine(spec)
            self._call = lambda method, *args: getattr(engine, method)(*args)
            engine_info = await engine.start()
        node_id = require_ray().get_runtime_context().get_node_id()
        return {**engine_info, "ray_node": node_id, "log": "" if log_path is None else str(log_path)}

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return await self._call(method, *args)

    async def post_turns(self, turns: list[tuple[int, TurnArguments]]) -> None:
        """Start the sampling of turns, given as (ticket, args); args=None cancels the turn of that ticket."""
        for ticket, args in turns:
            if args is not None:
                self._turns[ticket] = asyncio.create_task(self._run_turn(ticket, args))
            elif ticket in self._turns:
                self._turns[ticket].cancel()

    async def _run_turn(self, ticket: int, args: tuple[Any, ...]) -> None:
        result: Completion | Exception
        try:
            result = await self._call("sample", *args)
        except Exception as error:  # models and vLLM raise many kinds
            is_expected = isinstance(error, ValueError | EngineLost)
            result = error if is_expected else EngineLost(f"the engine failed: {error!r}")
        finally:
            del self._turns[ticket]
        self._answers.append((ticket, result))
        self._has_answers.set()

    async def wait_for_answers(self) -> list[Answer]:
        """Wait until at least one turn has ended; return the results of all ended turns."""
        await self._has_answers.wait()
        self._has_answers.clear()
        answers, self._answers = self._answers, []
        return answers

    async def close(self) -> None:
        await (self._engine.close() if self._engine is not None else self._call("close"))
        if self._model_folder is not None:
            self._model_folder.cleanup()

    async def load(self, weights: Weights, files: Files) -> None:
        """Load weights from another machine through this machine's shared memory."""
        with _write_files(files, "/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            base_folder = (
                self._model_folder.name if weights.base and self._model_folder is not None else weights.base
            )
            await self.call("load", (dataclasses.replace(weights, folder=folder, base=base_folder),))


def _read_files(folder: Path, pattern: str) -> dict[str, Any]:
    # As arrays, which Ray puts into its object store without another copy.
    return {file.name: np.fromfile(file, np.uint8) for file in sorted(folder.glob(pattern)) if file.is_file()}


def _write_files(files: Files, parent_folder: str | None) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="tfactory-", dir=parent_folder)
    for file_name, file_bytes in files.items():
        file_bytes.tofile(os.path.join(folder.name, file_name))
    return folder
