"""Functions in Ray actors: rewards and tools that run on the machines of a cluster. Ray is running already."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from TrainingFactory.cluster.ray_session import RaySession
from TrainingFactory.workers import WorkerDied, WorkerError, WorkerTooSlow

START_SECONDS = 120.0  # its function may import much
AT_ONCE = 1000  # calls that one actor takes


class RayWorker:
    """Is a `workers.Worker` whose process is a Ray actor: started with the first question, and again after it has died.
    `what` is shown to users, `number` spreads workers over the machines. It reserves no cores, so that it never waits
    for any."""

    def __init__(self, target: str, settings: Any = None, *, what: str, number: int = 0) -> None:
        self.target, self.settings = target, settings
        self._what, self._number = what, number
        self._actor: Any = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def alive(self) -> bool:
        return self._actor is not None

    async def ask(self, message: Any, seconds: float | None = None) -> Any:
        """Return the answer; raise WorkerError, or WorkerDied or WorkerTooSlow, after which the actor is gone. Without
        `seconds` the actor outlives a caller who gives up: others may be waiting for it."""
        actor = await self.ready()
        try:
            async with asyncio.timeout(seconds):
                return await self._answer(actor, actor.ask.remote(message))
        except TimeoutError:
            self._drop(actor)
            raise WorkerTooSlow(f"did not answer within {seconds:g} s") from None
        except asyncio.CancelledError:
            if seconds is not None:
                self._drop(actor)
            raise

    async def ready(self) -> Any:
        """Return the actor, started by whoever comes first; the others wait for it."""
        import ray

        if self._closed or not ray.is_initialized():  # which a call would start by itself
            raise WorkerDied("was closed")
        if self._actor is None:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            await asyncio.shield(self._starting)
        return self._actor

    async def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = machines()
        where = NodeAffinitySchedulingStrategy(nodes[self._number % len(nodes)], soft=True)
        options = RaySession().options(self._what, scheduling_strategy=where, max_concurrency=AT_ONCE)
        actor = ray.remote(Host).options(**options).remote()
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._answer(
                    actor, actor.start.remote(self.target, self.settings, os.getcwd(), sys.path)
                )
        except TimeoutError:
            self._drop(actor)
            raise WorkerDied(f"did not start within {START_SECONDS:g} s") from None
        except BaseException:
            self._drop(actor)
            raise
        if self._closed:
            self._drop(actor)
            raise WorkerDied("was closed")
        self._actor = actor

    async def _answer(self, actor: Any, ref: Any) -> Any:
        import ray
        from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except RayTaskError as error:
            raise WorkerError(f"{type(error.cause).__name__}: {error.cause}") from None
        except (RayActorError, TaskCancelledError):
            self._drop(actor)
            raise WorkerDied("was closed" if self._closed else "died") from None

    def _drop(self, actor: Any) -> None:
        import ray

        if self._actor is actor:
            self._actor = None
        if ray.is_initialized():  # else everything is gone with it
            ray.kill(actor)

    def kill(self) -> None:
        """End the actor at once. A call under way raises WorkerDied; the next one starts another."""
        if self._actor is not None:
            self._drop(self._actor)

    async def close(self) -> None:
        """End the actor for good."""
        self._closed = True
        self.kill()


class Host:
    """Runs in the actor: answers with what a function makes of a message. It may be asynchronous, and then answers many
    at once; else one at a time has a thread."""

    def __init__(self) -> None:
        self._function: Any = None
        self._turn = asyncio.Lock()

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
        async with self._turn:
            return await asyncio.to_thread(self._function, message)


def machines() -> list[str]:
    """Return the ids of the machines of the cluster, this one first."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    found = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return sorted(found, key=lambda node: (node != here, node))
