"""Functions that run in Ray actors on the machines of a cluster: rewards and tools. Ray must be connected already."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from TrainingFactory.cluster.ray_session import RaySession, require_ray
from TrainingFactory.common.workers import WorkerDied, WorkerError, WorkerTooSlow

START_SECONDS = 120.0  # long, because the function may import large packages
MAX_CONCURRENCY = 1000  # concurrent calls of one actor


class RayWorker:
    """A `workers.Worker` in a Ray actor. The first call starts the actor, and the next call after its death restarts
    it. `role` is its name for users. It reserves no CPU unless Ray's `options` say so, because it would have to wait
    for a free one."""

    def __init__(self, target: str, settings: Any = None, *, role: str, **options: Any) -> None:
        self.target, self.settings, self._role, self._options = target, settings, role, options
        self.num_starts = 0
        self._actor: Any = None
        self._start_lock = asyncio.Lock()
        self._closed = False

    @property
    def alive(self) -> bool:
        return self._actor is not None

    async def ask(self, message: Any, timeout: float | None = None) -> Any:
        """Return the function's result. Raise WorkerError if the function fails. If the actor dies or exceeds
        `timeout`, drop it and raise WorkerDied or WorkerTooSlow. If `timeout` is None, a cancelled call keeps the
        actor, because other calls use it."""
        actor = await self.ensure_actor()
        try:
            return await _await_ref(actor.ask.remote(message), timeout)
        except (WorkerDied, WorkerTooSlow, asyncio.CancelledError) as error:
            if timeout is not None or isinstance(error, WorkerDied):
                self._drop_actor(actor)
            raise

    async def ensure_actor(self) -> Any:
        """Return the actor; start it if it is not running."""
        async with self._start_lock:
            if self._closed or not require_ray().is_initialized():  # a call would start Ray implicitly
                raise WorkerDied("was closed")
            if self._actor is None:
                self._actor = await self._start()
            return self._actor

    async def _start(self) -> Any:
        options = {"scheduling_strategy": "SPREAD", "max_concurrency": MAX_CONCURRENCY} | self._options
        options = RaySession().options(self._role, **options)
        actor = require_ray().remote(FunctionActor).options(**options).remote()
        try:
            start_ref = actor.start.remote(self.target, self.settings, os.getcwd(), sys.path)
            await _await_ref(start_ref, START_SECONDS)
        except BaseException:
            self._drop_actor(actor)
            raise
        self.num_starts += 1
        return actor

    def _drop_actor(self, actor: Any) -> None:
        if self._actor is actor:
            self._actor = None
        if require_ray().is_initialized():  # else the actor has ended with Ray
            require_ray().kill(actor)

    def kill(self) -> None:
        """Kill the actor. Running calls raise WorkerDied; the next call starts another actor."""
        if self._actor is not None:
            self._drop_actor(self._actor)

    async def close(self) -> None:
        """Kill the actor; further calls raise WorkerDied."""
        self._closed = True
        async with self._start_lock:
            self.kill()


async def _await_ref(ref: Any, timeout: float | None) -> Any:
    ray = require_ray()
    try:
        async with asyncio.timeout(timeout):
            return await ref
    except ray.exceptions.RayTaskError as error:  # first, because it is also an instance of its cause's class
        raise WorkerError(f"{type(error.cause).__name__}: {error.cause}") from None
    except TimeoutError:
        raise WorkerTooSlow(f"did not answer within {timeout:g} s") from None
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except ray.exceptions.RayError:
        raise WorkerDied("died") from None


class FunctionActor:
    """Ray actor that runs a function, once per message. Calls of an asynchronous function run concurrently."""

    async def start(self, target: str, settings: Any, working_folder: str, sys_path: Sequence[str]) -> None:
        """Import the function, with the working directory of the run's own process if this machine has it."""
        if os.path.isdir(working_folder):
            os.chdir(working_folder)
        sys.path += [entry for entry in sys_path if entry not in sys.path]
        module_name, _, function_name = target.partition(":")
        self._function = getattr(import_module(module_name), function_name)
        if settings is not None:
            self._function = await asyncio.to_thread(self._function, settings)

    async def ask(self, message: Any) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(message)
        return await asyncio.to_thread(self._function, message)
