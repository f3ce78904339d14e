"""The runtime shared by all executors of a run: executes calls with limits, time-outs and retries."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any

from TrainingFactory.common.images import map_text, shift_images
from TrainingFactory.common.texts import describe, find_environment_secrets, redact, truncate_middle
from TrainingFactory.protocols import Tool
from TrainingFactory.tools.calls import CallOutcome, PendingCall, ResultCache
from TrainingFactory.tools.decorator import FunctionTool, as_result
from TrainingFactory.tools.limits import CallLimits, CircuitBreaker
from TrainingFactory.tools.metrics import ToolMetrics
from TrainingFactory.tools.recording import Recorder
from TrainingFactory.tools.timeouts import OutOfTime, SelfCancelled, never_waits, run_inline, run_within
from TrainingFactory.types import ToolFailure, ToolResult

log = logging.getLogger(__name__)
_jitter = random.Random()  # separate from the global generator, which training seeds
# Seconds between attempts: exponential back-off with jitter.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 8.0
# Exceptions that mean that no answer arrived: a retry may help, and the server may be down. Any other exception of a
# tool is its answer. The names belong to packages that need not be installed (httpx, aiohttp, anyio, redis, urllib3).
NO_ANSWER_ERRORS = (OSError, EOFError, SelfCancelled, asyncio.CancelledError)
NO_ANSWER_ERROR_NAMES = {
    "ConnectionError", "TimeoutError", "TransportError", "ClientConnectionError", "BrokenResourceError",
    "ClosedResourceError",
}  # fmt: skip
# Errors about a path, which the model may have written.
PATH_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
DOWN_REASON = "is not available at the moment"
BUSY_REASON = "is in use by others and did not become free in time"


class ToolRuntime:
    """Holds limits per tool, circuit breakers per server, the cache, the recorder and the metrics. `deadline` bounds
    the seconds of one call with all its retries; the tool's time-out bounds each attempt, not counting the wait for its
    server and for a slot."""

    def __init__(
        self, *, cache: ResultCache | None = None, recorder: Recorder | None = None, deadline: float = 240.0
    ) -> None:
        self.cache = cache
        self.recorder = recorder
        self.deadline = deadline
        self.metrics = ToolMetrics()
        self._limits_by_tool: dict[tuple[Any, ...], CallLimits] = {}
        self._breakers: dict[str, CircuitBreaker] = {}

    @cached_property
    def _secrets(self) -> list[str]:
        """Return the secrets to redact in results. Read at the first call, after all configs have been loaded."""
        return find_environment_secrets()

    def snapshot(self, selects: Callable[[Any], bool] = lambda _: True) -> dict[str, float]:
        """Return the metrics of the episodes whose key `selects` accepts; an empty dict if they called no tool."""
        if not (metrics := self.metrics.snapshot(selects)):
            return {}
        metrics["tools/circuits_open"] = sum(breaker.is_open for breaker in self._breakers.values())
        if self.cache is not None:
            metrics["tools/cache_failures"] = self.cache.num_failures
        return metrics

    def breaker(self, server: str) -> CircuitBreaker | None:
        """Return the circuit breaker of a server; None for tools of this process, because they cannot be down."""
        return self._breakers.setdefault(server, CircuitBreaker()) if server else None

    async def call(self, call: PendingCall, deadline: float) -> CallOutcome:
        """Execute the call, with retries. `deadline` is a time of `time.monotonic`."""
        options = call.options
        breaker = self.breaker(options.server)
        outcome = await self._attempt_call(call, deadline)
        for attempt in range(options.retries if options.repeatable else 0):
            pause_seconds = min(FIRST_PAUSE_SECONDS * 2**attempt, MAX_PAUSE_SECONDS) * _jitter.uniform(0.5, 1)
            is_too_late = time.monotonic() + pause_seconds >= deadline
            if not outcome.is_answer_lost or is_too_late or (breaker is not None and breaker.is_open):
                break
            await asyncio.sleep(pause_seconds)
            self.metrics.count_retry(call.name, call.episode)
            latest_outcome = await self._attempt_call(call, deadline)
            if not latest_outcome.was_called:  # the outcome of the previous attempt says more
                break
            outcome = latest_outcome
        result = outcome.result
        self._sanitize(result, call.max_output_chars)
        return outcome

    def _sanitize(self, result: ToolResult, max_chars: int) -> None:
        """Redact secrets and truncate the text; images keep their places between the texts."""
        if result.images:
            text, images = map_text(result.content, result.images, lambda text: redact(text, self._secrets))
            result.content = truncate_middle(text, max_chars)
            result.images = shift_images(images, text, result.content)
        else:
            result.content = truncate_middle(redact(result.content, self._secrets), max_chars)
        result.attachments = redact(result.attachments, self._secrets)

    async def _attempt_call(self, call: PendingCall, deadline: float) -> CallOutcome:
        breaker = self.breaker(call.options.server)
        limits = self._get_limits(call)
        if breaker is not None and breaker.is_open:
            return _make_unavailable_outcome(call, DOWN_REASON)
        # A tool may have `async def until_ready()`, which waits until a call can start, for example for a session. It
        # precedes the limits: otherwise calls that have a session would wait for slots held by calls that have none.
        until_ready: Callable[[], Awaitable[None]] | None = getattr(call.tool, "until_ready", None)
        if limits is None and until_ready is None:
            return await self._run_guarded(call, deadline, breaker)
        async with AsyncExitStack() as exit_stack:
            start_time = time.monotonic()
            try:
                async with asyncio.timeout(deadline - start_time):
                    if until_ready is not None:
                        await until_ready()
                    if limits is not None:
                        await exit_stack.enter_async_context(limits.hold_slot())
            except TimeoutError:
                return _make_unavailable_outcome(call, BUSY_REASON)
            finally:
                self.metrics.count_wait(call.name, time.monotonic() - start_time, call.episode)
            return await self._run_guarded(call, deadline, breaker)

    async def _run_guarded(
        self, call: PendingCall, deadline: float, breaker: CircuitBreaker | None
    ) -> CallOutcome:
        remaining_seconds = deadline - time.monotonic()
        if remaining_seconds <= 0:
            return _make_unavailable_outcome(call, BUSY_REASON)
        if breaker is None:
            return await _run_with_timeout(call, min(call.timeout, remaining_seconds))
        token = breaker.admit_call()
        if token is None:
            return _make_unavailable_outcome(call, DOWN_REASON)
        has_answered: bool | None = None
        try:
            outcome = await _run_with_timeout(call, min(call.timeout, remaining_seconds))
            has_answered = not outcome.is_answer_lost
        except ToolFailure:
            has_answered = False
            raise
        finally:
            breaker.record_outcome(token, has_answered)
        return outcome

    def _get_limits(self, call: PendingCall) -> CallLimits | None:
        options = call.options
        if options.concurrency is None and options.rate is None:
            return None
        limits_key = (options.server, call.name, options.concurrency, options.rate)
        return self._limits_by_tool.setdefault(limits_key, CallLimits(options.concurrency, options.rate))


async def _run_with_timeout(call: PendingCall, timeout: float) -> CallOutcome:
    try:
        coroutine = run_tool(call.tool, call.arguments)
        code = getattr(call.tool.function, "__code__", None) if isinstance(call.tool, FunctionTool) else None
        result = run_inline(coroutine) if code and never_waits(code) else await run_within(timeout, coroutine)
    except ToolFailure:
        raise
    except OutOfTime:
        log.info("tool %s was cancelled after %g s", call.name, timeout)
        message = f"{call.name} took longer than {timeout:.3g} s and was stopped"
        return CallOutcome(ToolResult(message, ok=False, error="timeout"), is_answer_lost=True)
    except Exception as error:
        log.info("tool %s failed", call.name, exc_info=True)
        message = f"{call.name} failed: {describe(error)}"
        return CallOutcome(ToolResult(message, ok=False, error="exception"), is_no_answer_error(error))
    return CallOutcome(result, is_answer_lost=not result.ok and result.error in ("timeout", "unavailable"))


async def run_tool(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    """Run a tool. Convert SystemExit and exception groups to an ordinary Exception."""
    try:
        return as_result(await tool.run(arguments))
    except SystemExit as error:
        raise RuntimeError("it tried to end the program") from error
    except BaseExceptionGroup as error:  # a broken connection may raise one that is not an Exception
        error_type = ConnectionError if error.subgroup(is_no_answer_error) is not None else RuntimeError
        raise error_type(describe(error)) from error


def is_no_answer_error(error: BaseException) -> bool:
    """Return whether the exception means that no answer arrived; any other exception of a tool is its answer."""
    if isinstance(error, NO_ANSWER_ERRORS):
        return not isinstance(error, PATH_ERRORS)
    return any(cls.__name__ in NO_ANSWER_ERROR_NAMES for cls in type(error).__mro__)


def _make_unavailable_outcome(call: PendingCall, reason: str) -> CallOutcome:
    return CallOutcome(ToolResult(f"{call.name} {reason}", ok=False, error="unavailable"), was_called=False)
