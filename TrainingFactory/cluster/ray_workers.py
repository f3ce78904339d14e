"""Functions in Ray actors: rewards and tools that run on the machines of a cluster, which has been joined before."""

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

START_SECONDS = 120.0  # its function may import much
AT_ONCE = 1000  # calls that one actor takes


class RayWorker:
    """Is a `workers.Worker` whose process is a Ray actor: started with the first question, and again after it has died.
    `what` is shown to users. It reserves no cores, so that it never waits for any, unless `options` of Ray say so."""

    def __init__(self, target: str, settings: Any = None, *, what: str, **options: Any) -> None:
        self.target, self.settings, self._what, self._options = target, settings, what, options
        self.starts = 0  # so far
        self._actor: Any = None
        self._starting = asyncio.Lock()
        self._closed = False

    @property
    def alive(self) -> bool:
        return self._actor is not None

    async def ask(self, message: Any, seconds: float | None = None) -> Any:
        """Return the answer; raise WorkerError, or WorkerDied or WorkerTooSlow, after which the actor is gone. Without
        `seconds` the actor outlives a caller who gives up: others may be waiting for it."""
        actor = await self.ready()
        try:
            return await _answer(actor.ask.remote(message), seconds)
        except (WorkerDied, WorkerTooSlow, asyncio.CancelledError) as error:
            if seconds is not None or isinstance(error, WorkerDied):
                self._drop(actor)
            raise

    async def ready(self) -> Any:
        """Return the actor, started by whoever comes first."""
        async with self._starting:
            if self._closed or not require_ray().is_initialized():  # a call would start Ray by itself
                raise WorkerDied("was closed")
            if self._actor is None:
                self._actor = await self._started()
            return self._actor

    async def _started(self) -> Any:
        options = {"scheduling_strategy": "SPREAD", "max_concurrency": AT_ONCE} | self._options
        options = RaySession().options(self._what, **options)
        actor = require_ray().remote(Host).options(**options).remote()
        try:
            begun = actor.start.remote(self.target, self.settings, os.getcwd(), sys.path)
            await _answer(begun, START_SECONDS)
        except BaseException:
            self._drop(actor)
            raise
        self.starts += 1
        return actor

    def _drop(self, actor: Any) -> None:
        if self._actor is actor:
            self._actor = None
        if require_ray().is_initialized():  # else it is gone with Ray
            require_ray().kill(actor)

    def kill(self) -> None:
        """End the actor at once. A call under way raises WorkerDied; the next one starts another."""
        if self._actor is not None:
            self._drop(self._actor)

    async def close(self) -> None:
        """End the actor for good."""
        self._closed = True
        async with self._starting:
            self.kill()


async def _answer(ref: Any, seconds: float | None) -> Any:
    ray = require_ray()
    try:
        async with asyncio.timeout(seconds):
            return await ref
    except ray.exceptions.RayTaskError as error:  # first, since it is also of the class of its cause
        raise WorkerError(f"{type(error.cause).__name__}: {error.cause}") from None
    except TimeoutError:
        raise WorkerTooSlow(f"did not answer within {seconds:g} s") from None
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except ray.exceptions.RayError:
        raise WorkerDied("died") from None


class Host:
    """Runs in the actor: answers with what a function makes of a message. An asynchronous one answers many at once."""

    async def start(self, target: str, settings: Any, folder: str, path: Sequence[str]) -> None:
        """Find the function, from the same folder as in the run's own process where this machine has it."""
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [each for each in path if each not in sys.path]
        module, _, name = target.partition(":")
        self._function = getattr(import_module(module), name)
        if settings is not None:
            self._function = await asyncio.to_thread(self._function, settings)

    async def ask(self, message: Any) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(message)
        return await asyncio.to_thread(self._function, message)
