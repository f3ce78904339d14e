"""Share among all executors of a run how one call is really made: limits, time, further attempts."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any

from TrainingFactory.common.texts import bounded, describe, environment_secrets, without
from TrainingFactory.protocols import Tool
from TrainingFactory.tools.calls import Outcome, PendingCall, ResultCache
from TrainingFactory.tools.decorator import FunctionTool, as_result
from TrainingFactory.tools.limits import CircuitBreaker, Limits
from TrainingFactory.tools.metrics import ToolMetrics
from TrainingFactory.tools.recording import Recorder
from TrainingFactory.tools.timeouts import OutOfTime, SelfCancelled, at_once, never_waits, within
from TrainingFactory.types import ToolFailure, ToolResult

log = logging.getLogger(__name__)
_chance = random.Random()  # of our own: the seeded one belongs to training
# Seconds between attempts: doubled each time, then shortened by chance.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
# What is raised when no answer came: another attempt may help, and the server may be down. Anything else that a tool
# raises is its answer. The names are of packages that need not be installed (httpx, aiohttp, anyio, redis, urllib3).
LOST = (OSError, EOFError, SelfCancelled, asyncio.CancelledError)
LOST_NAMES = {
    "ConnectionError", "TimeoutError", "TransportError", "ClientConnectionError", "BrokenResourceError",
    "ClosedResourceError",
}  # fmt: skip
# These are about a path, which the model may have written.
NOT_LOST = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
DOWN = "is not available at the moment"
BUSY = "is in use by others and did not become free in time"


class ToolRuntime:
    """Holds limits per tool, circuit breakers per server, the cache, the recorder and the metrics. `deadline` is the
    seconds that one call may take in all; a tool's own time-out bounds each attempt, from when the call is let in."""

    def __init__(
        self, *, cache: ResultCache | None = None, recorder: Recorder | None = None, deadline: float = 240.0
    ) -> None:
        self.cache = cache
        self.recorder = recorder
        self.deadline = deadline
        self.metrics = ToolMetrics()
        self._limits: dict[tuple[Any, ...], Limits] = {}
        self._breakers: dict[str, CircuitBreaker] = {}

    @cached_property
    def _secrets(self) -> list[str]:
        """Return what a tool may know and repeat; at the first call all configs are read that name where keys are."""
        return environment_secrets()

    def snapshot(self, wanted: Callable[[Any], bool] = lambda _: True) -> dict[str, float]:
        """Return the metrics of these episodes, for the log of a step; nothing where they called no tool."""
        if not (metrics := self.metrics.snapshot(wanted)):
            return {}
        metrics["tools/circuits_open"] = sum(breaker.is_open for breaker in self._breakers.values())
        if self.cache is not None:
            metrics["tools/cache_failures"] = self.cache.failures
        return metrics

    def breaker(self, server: str) -> CircuitBreaker | None:
        """Return the circuit breaker of a server; None for tools of this process, which can fail but not be down."""
        return self._breakers.setdefault(server, CircuitBreaker()) if server else None

    async def call(self, call: PendingCall, deadline: float) -> Outcome:
        """Make the call. `deadline` is a time of `time.monotonic`."""
        options, breaker = call.options, self.breaker(call.options.server)
        outcome = await self._attempt(call, deadline)
        for attempt in range(options.retries if options.repeatable else 0):
            pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * _chance.uniform(0.5, 1)
            late = time.monotonic() + pause >= deadline
            if not outcome.lost or late or (breaker is not None and breaker.is_open):
                break
            await asyncio.sleep(pause)
            self.metrics.retried(call.name, call.episode)
            latest = await self._attempt(call, deadline)
            if not latest.made:  # what the attempt before came to says more
                break
            outcome = latest
        result = outcome.result
        result.content = bounded(without(result.content, self._secrets), call.max_output_chars)
        result.attachments = without(result.attachments, self._secrets)
        return outcome

    async def _attempt(self, call: PendingCall, deadline: float) -> Outcome:
        breaker, limits = self.breaker(call.options.server), self._limits_of(call)
        if breaker is not None and breaker.is_open:
            return _unavailable(call, DOWN)
        # A tool may have `async def until_ready()`, which waits until a call can begin, for a session say. It comes
        # before the limits: who has a session would else wait for places that are held by those who have none.
        ready: Callable[[], Awaitable[None]] | None = getattr(call.tool, "until_ready", None)
        if limits is None and ready is None:
            return await self._let_in(call, deadline, breaker)
        async with AsyncExitStack() as held:
            arrived = time.monotonic()
            try:
                async with asyncio.timeout(deadline - arrived):
                    if ready is not None:
                        await ready()
                    if limits is not None:
                        await held.enter_async_context(limits.place())
            except TimeoutError:
                return _unavailable(call, BUSY)
            finally:
                self.metrics.waited(call.name, time.monotonic() - arrived, call.episode)
            return await self._let_in(call, deadline, breaker)

    async def _let_in(self, call: PendingCall, deadline: float, breaker: CircuitBreaker | None) -> Outcome:
        left = deadline - time.monotonic()
        if left <= 0:
            return _unavailable(call, BUSY)
        if breaker is None:
            return await _bounded(call, min(call.timeout, left))
        begun = breaker.allow()
        if begun is None:
            return _unavailable(call, DOWN)
        answered: bool | None = None
        try:
            outcome = await _bounded(call, min(call.timeout, left))
            answered = not outcome.lost
        except ToolFailure:
            answered = False
            raise
        finally:
            breaker.ended(begun, answered)
        return outcome

    def _limits_of(self, call: PendingCall) -> Limits | None:
        options = call.options
        if options.concurrency is None and options.rate is None:
            return None
        key = (options.server, call.name, options.concurrency, options.rate)
        return self._limits.setdefault(key, Limits(options.concurrency, options.rate))


async def _bounded(call: PendingCall, timeout: float) -> Outcome:
    try:
        running = run_tool(call.tool, call.arguments)
        code = getattr(call.tool.function, "__code__", None) if isinstance(call.tool, FunctionTool) else None
        result = at_once(running) if code and never_waits(code) else await within(timeout, running)
    except ToolFailure:
        raise
    except OutOfTime:
        log.info("tool %s was given up after %g s", call.name, timeout)
        text = f"{call.name} took longer than {timeout:.3g} s and was stopped"
        return Outcome(ToolResult(text, ok=False, error="timeout"), lost=True)
    except Exception as error:
        log.info("tool %s failed", call.name, exc_info=True)
        text = f"{call.name} failed: {describe(error)}"
        return Outcome(ToolResult(text, ok=False, error="exception"), lost=is_lost(error))
    return Outcome(result, lost=not result.ok and result.error in ("timeout", "unavailable"))


async def run_tool(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    """Run it; whatever it raises is an Exception."""
    try:
        return as_result(await tool.run(arguments))
    except SystemExit as error:
        raise RuntimeError("it tried to end the program") from error
    except BaseExceptionGroup as error:  # a dying connection may raise one that is no Exception
        kind = ConnectionError if error.subgroup(is_lost) is not None else RuntimeError
        raise kind(describe(error)) from error


def is_lost(error: BaseException) -> bool:
    """Tell whether no answer came: anything else that a tool raises is its answer."""
    if isinstance(error, LOST):
        return not isinstance(error, NOT_LOST)
    return any(cls.__name__ in LOST_NAMES for cls in type(error).__mro__)


def _unavailable(call: PendingCall, why: str) -> Outcome:
    return Outcome(ToolResult(f"{call.name} {why}", ok=False, error="unavailable"), made=False)
