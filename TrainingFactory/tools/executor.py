"""One executor runs every call: checked, bounded in time and size, answered in call order."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from TrainingFactory.common.texts import describe
from TrainingFactory.protocols import Tool, ToolSession, ToolSource
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.calls import EpisodeCache, PendingCall, ToolState
from TrainingFactory.tools.decorator import FunctionTool
from TrainingFactory.tools.fingerprint import ByIdentity, digest
from TrainingFactory.tools.making import tools_without_options
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.recording import BrokenOff, Place, Recorder
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.schema import schema_problems, validator_of
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult, ToolSpec

log = logging.getLogger(__name__)
MAX_NAMES = 10
DEFAULT_OPTIONS, NOTHING = ToolOptions(), contextlib.nullcontext()
_validator = ByIdentity(validator_of)
_parts: ContextVar[tuple[tuple[AsyncToolExecutor, str], ...]] = ContextVar(
    "who makes calls of which executor, if no turn", default=()
)


@dataclass(slots=True)
class _Entry:
    tool: Tool
    options: ToolOptions
    state: ToolState | None  # None: its calls wait for no others


class AsyncToolExecutor:
    """Answers the calls of one episode, as docs/TOOLS.md says; `attach` makes the `ToolRuntime` (limits, further
    attempts, cache, recorder) one for all executors of a run. `tools` are tools, sources, and whatever `as_tool` can
    make one of; without it, all tools of the catalog that need no options. `timeout` is for tools without one of
    their own."""

    def __init__(
        self, tools: Sequence[Any] | None = None, timeout: float = 30.0, max_output_chars: int = 100_000
    ) -> None:
        if tools is None:
            tools = tools_without_options()
        self.timeout = timeout
        self.max_output_chars = max_output_chars
        self.tools: list[Tool] = []
        self._sessions: list[ToolSession] = []
        self._cache: EpisodeCache | None = None
        self._key: Hashable = ""
        self._owner: object = None
        self._batches = 0
        self._made: defaultdict[tuple[str, str], int] = defaultdict(int)
        for made in map(as_tool, tools):
            if not isinstance(made, FunctionTool) and isinstance(made, ToolSource):
                self._sessions.append(made.session())  # which holds nothing before its first call
                self.tools += self._sessions[-1].tools
            else:
                self.tools.append(made)
        names = [tool.spec.name for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two tools have the same name: {', '.join(twice)}; rename one with @tool(name=...), or with "
                '"tfactory": {"prefix": true} of an MCP server'
            )
        self._entries = _with_states(self.tools)

    @cached_property
    def _runtime(self) -> ToolRuntime:
        return ToolRuntime()  # of its own, unless it is attached to another

    def attach(
        self, runtime: ToolRuntime, key: Hashable, task: str | None = None, owner: object = None
    ) -> None:
        """Share `runtime` with the other executors of a run; before the first call. `key` names the episode in a
        recording. Stateful tools of this process share cached results among episodes of one `task` only; None stands
        for "no other episode". `owner` is the environment, whose own methods are run again in a replay."""
        assert self._batches == 0, "attach comes before the first call"
        self._runtime = runtime
        self._key, self._owner = key, owner
        if runtime.cache is not None:
            scope = f"episode {key}" if task is None else f"task {task}"
            self._cache = runtime.cache.episode(scope)

    @property
    def holds_sessions(self) -> bool:
        return bool(self._sessions)

    async def close(self) -> None:
        """Close the sessions of this episode; again do nothing."""
        sessions, self._sessions = self._sessions, []
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Mark the calls made inside as no turn of the model. They may come in any order, so a recording knows them by
        this name, the tool and its arguments."""
        token = _parts.set((*_parts.get(), (self, name)))
        try:
            yield
        finally:
            _parts.reset(token)

    async def batch_execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        places = self._places(calls)
        if len(calls) == 1:  # without the cost of a task
            return [await self._execute(calls[0], places[0])]
        # Exceptions are collected, so that a ToolFailure of one call leaves no other call running unseen. The tasks
        # start in call order and take their turns in groups before they wait for anything.
        running = map(self._execute, calls, places)
        results = await asyncio.gather(*running, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    def _places(self, calls: Sequence[ToolCall]) -> list[Place]:
        part = [None, *(name for executor, name in _parts.get() if executor is self)][-1]
        if part is None:
            self._batches += 1
            return [Place(self._key, self._batches - 1, index) for index in range(len(calls))]
        places = []
        for call in calls:
            try:
                arguments = json.dumps(call.arguments, sort_keys=True, default=str)
            except (TypeError, ValueError, RecursionError):  # only Python code can make such ones
                arguments = ""
            name = digest(call.name, arguments)[:16]
            places.append(Place(self._key, part, f"{name}#{self._made[part, name]}"))
            self._made[part, name] += 1
        return places

    async def _execute(self, call: ToolCall, place: Place) -> ToolResult:
        recorder = self._runtime.recorder
        if recorder is None:
            return await self._answer(call)
        token = _parts.set((*_parts.get(), (self, f"inside {place.batch}/{place.index}")))  # as `part` does
        try:
            try:
                result = recorder.replay(place, call)
            except BrokenOff:  # whoever gave it up waits as long again, and gives it up again
                result = await asyncio.get_running_loop().create_future()
            if result is None:
                result = await self._answer(call)
            else:
                await self._replayed(recorder, place, call, result)
        except ToolFailure as failure:
            recorder.record(place, call, failure)
            raise
        except asyncio.CancelledError:
            recorder.record(place, call, BrokenOff())
            raise
        finally:
            _parts.reset(token)
        recorder.record(place, call, result)
        return result

    async def _replayed(self, recorder: Recorder, place: Place, call: ToolCall, result: ToolResult) -> None:
        """Run methods of the environment again for what they leave on it, which a reward may look at. Only count all
        others."""
        entry = self._entries.get(call.name)
        if entry is None or not self._runs_again(entry) or result.error in ("timeout", "unavailable"):
            self._runtime.metrics.answered(None if entry is None else call.name, result, self._key)
            return
        state = entry.state or ToolState("")
        if result.cached:  # it was not run; the next one that is may need what it leaves
            self._runtime.metrics.answered(call.name, result, self._key)
            state.skip(self._pending(entry, call.arguments), result.content)
            return
        async with state.turn():
            try:
                await state.catch_up()
                made = await self._answer(call)
            except ToolFailure as failure:
                made = failure
        recorder.compare(place, call, result, made)

    def _runs_again(self, entry: _Entry) -> bool:
        bound_to = getattr(getattr(entry.tool, "function", None), "__self__", None)
        return bound_to is not None and bound_to is self._owner and not entry.options.pure

    async def _answer(self, call: ToolCall) -> ToolResult:
        entry = self._entries.get(call.name)
        if call.error is not None or entry is None:
            result = self._refused(call)
            self._runtime.metrics.answered(None, result, self._key)
            return result
        async with NOTHING if entry.state is None else entry.state.turn():
            metrics = self._runtime.metrics
            started = metrics.began(call.name)
            result: ToolResult | None = None
            try:
                wrong = self._wrong(entry.tool.spec, call.arguments)
                pending = self._pending(entry, call.arguments)
                if wrong is not None:
                    result = wrong
                elif self._cache is not None:
                    result = await self._cache.obtain(pending)
                else:
                    result = (await pending.make(pending, time.monotonic() + pending.seconds)).result
            finally:
                metrics.finished(call.name, started, result, self._key)
        assert result is not None
        result.id, result.seconds = call.id, time.perf_counter() - started  # it is a copy, and only ours
        return result

    def _refused(self, call: ToolCall) -> ToolResult:
        if call.error is not None:
            return ToolResult(call.error, ok=False, error="malformed", id=call.id)
        if not self._entries:
            text = "There are no tools here; answer in plain text."
        else:
            near = difflib.get_close_matches(call.name[:100], self._entries, n=MAX_NAMES, cutoff=0.0)
            text = f"There is no tool named {call.name[:60]!r}. The tools are: {', '.join(near)}."
        return ToolResult(text, ok=False, error="unknown", id=call.id)

    def _wrong(self, spec: ToolSpec, arguments: dict[str, Any]) -> ToolResult | None:
        try:
            problems = schema_problems(spec, _validator(spec.parameters), arguments)
        except Exception as error:  # a schema that is none, arguments nested beyond reason
            log.info("arguments of tool %s cannot be checked", spec.name, exc_info=True)
            return ToolResult(f"{spec.name} failed: {describe(error)}", ok=False, error="exception")
        return None if problems is None else ToolResult(problems, ok=False, error="schema")

    def _pending(self, entry: _Entry, arguments: dict[str, Any]) -> PendingCall:
        runtime, options, limit = self._runtime, entry.options, self.max_output_chars
        timeout = options.timeout or self.timeout
        seconds = max(runtime.deadline, timeout)
        return PendingCall(
            entry.tool, options, arguments, entry.state, timeout, seconds, limit, runtime.call, self._key
        )


def _with_states(tools: Sequence[Tool]) -> dict[str, _Entry]:
    """Return the tools by name, each with the state that it shares."""
    options: list[ToolOptions] = [getattr(tool, "options", DEFAULT_OPTIONS) for tool in tools]
    stateful = {chosen.server for chosen in options if chosen.stateful}
    states: dict[str, ToolState] = {}
    entries: dict[str, _Entry] = {}
    for tool, chosen in zip(tools, options, strict=True):
        # On a server with state any tool that is not pure may change it.
        touches = bool(chosen.server) and chosen.server in stateful and not chosen.pure
        state = None
        if chosen.ordered or chosen.stateful or touches:
            state = states.setdefault(chosen.server, ToolState(chosen.server))
            state.stateful |= chosen.stateful
        entries[tool.spec.name] = _Entry(tool, chosen, state)
    return entries
