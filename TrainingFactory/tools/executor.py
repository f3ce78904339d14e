"""The executor of tool calls: validates arguments, bounds time and output size, returns results in call order."""

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
from TrainingFactory.tools.fingerprint import IdentityCache, digest
from TrainingFactory.tools.making import make_tools_without_options
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.recording import CallPosition, RecordedCancellation, Recorder
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.schema import check_arguments, make_validator
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult, ToolSpec

log = logging.getLogger(__name__)
MAX_SHOWN_TOOLS = 10  # tools listed in the answer to a call of an unknown tool
DEFAULT_OPTIONS = ToolOptions()
NO_LOCK = contextlib.nullcontext()
_get_validator = IdentityCache(make_validator)
_callers: ContextVar[tuple[tuple[AsyncToolExecutor, str], ...]] = ContextVar("non-model callers", default=())


@dataclass(slots=True)
class _ToolEntry:
    tool: Tool
    options: ToolOptions
    state: ToolState | None  # None: calls to the tool wait for no other calls


class AsyncToolExecutor:
    """Executes the tool calls of one episode (see docs/TOOLS.md). `tools` are tools, tool sources, or objects that
    `as_tool` accepts; None stands for all catalog tools that need no options. `timeout` in seconds applies to tools
    that set none. `attach` shares one `ToolRuntime` (limits, retries, cache, recorder) among the executors of a run."""

    def __init__(
        self, tools: Sequence[Any] | None = None, timeout: float = 30.0, max_output_chars: int = 100_000
    ) -> None:
        if tools is None:
            tools = make_tools_without_options()
        self.timeout = timeout
        self.max_output_chars = max_output_chars
        self.tools: list[Tool] = []
        self._sessions: list[ToolSession] = []
        self._cache: EpisodeCache | None = None
        self._key: Hashable = ""
        self._owner: object = None
        self.num_batches = 0  # executed for the model so far
        self._is_recording = True
        self._ordinals: defaultdict[tuple[str, str], int] = defaultdict(int)
        for tool_or_source in map(as_tool, tools):
            if not isinstance(tool_or_source, FunctionTool) and isinstance(tool_or_source, ToolSource):
                self._sessions.append(tool_or_source.session())  # allocates nothing before its first call
                self.tools += self._sessions[-1].tools
            else:
                self.tools.append(tool_or_source)
        tool_names = [tool.spec.name for tool in self.tools]
        if duplicates := sorted({tool_name for tool_name in tool_names if tool_names.count(tool_name) > 1}):
            raise ValueError(
                f"two tools have the same name: {', '.join(duplicates)}; rename one with @tool(name=...), or set "
                '"tfactory": {"prefix": true} for an MCP server'
            )
        self._entries = _make_entries(self.tools)

    @cached_property
    def _runtime(self) -> ToolRuntime:
        return ToolRuntime()  # private, unless `attach` has set a shared one

    def attach(
        self, runtime: ToolRuntime, key: Hashable, task: str | None = None, owner: object = None
    ) -> None:
        """Share `runtime` with the other executors of a run. Call this before the first tool call. `key` identifies
        the episode in a recording. Stateful tools of this process share cached results only among episodes of the same
        `task`; None: with no other episode. `owner` is the environment, whose own methods a replay runs again."""
        assert self.num_batches == 0, "attach must be called before the first tool call"
        self._runtime = runtime
        self._key, self._owner = key, owner
        if runtime.cache is not None:
            scope = f"episode {key}" if task is None else f"task {task}"
            self._cache = runtime.cache.episode(scope)

    @property
    def key(self) -> Hashable:
        """Return the key of the episode in a recording."""
        return self._key

    def hidden(self, tools: Sequence[Any], timeout: float, max_output_chars: int) -> AsyncToolExecutor:
        """Return an executor of further tools of this episode, which the model cannot call. Use it within `measure`, so
        that a recording distinguishes its calls from those of the model. Call this after `attach`."""
        executor = AsyncToolExecutor(tools, timeout, max_output_chars)
        executor._runtime, executor._key = self._runtime, self._key
        return executor

    def use_key(self, key: Hashable, *, records: bool = True, batches: int | None = None) -> None:
        """Record further calls under `key`, and number their batches from `batches` on. Without `records`, they are
        replayed from a recording but not recorded, because a forked episode repeats calls of its parent that are
        recorded already."""
        self._key, self._is_recording = key, records
        if batches is not None:
            self.num_batches = batches

    def continue_from(self, parent: AsyncToolExecutor, key: Hashable, owner: object) -> None:
        """Continue the calls of the executor `parent`. `owner` is the environment of this executor, a copy of the
        parent's."""
        self._runtime, self._key, self._owner = parent._runtime, key, owner
        self.num_batches = parent.num_batches
        self._cache = None if parent._cache is None else parent._cache.fork()

    async def catch_up(self) -> None:
        """Execute the calls that the cache answered, so that the tools' state reflects all calls of the episode."""
        for state in {entry.state for entry in self._entries.values() if entry.state is not None}:
            async with state.hold_lock():
                await state.catch_up()

    @property
    def holds_sessions(self) -> bool:
        return bool(self._sessions)

    @property
    def has_session_state(self) -> bool:
        """Return whether this episode has a session with an impure tool, which may have changed its state."""
        tools = [tool for session in self._sessions for tool in session.tools]
        return not all(getattr(tool, "options", DEFAULT_OPTIONS).pure for tool in tools)

    async def close(self) -> None:
        """Close the sessions of this episode. Later calls do nothing."""
        sessions, self._sessions = self._sessions, []
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Mark the calls inside the block as made by `name`, such as a reward, not by the model. Their order may vary,
        so a recording identifies them by this name, the tool and the arguments."""
        token = _callers.set((*_callers.get(), (self, name)))
        try:
            yield
        finally:
            _callers.reset(token)

    async def batch_execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        positions = self._assign_positions(calls)
        if len(calls) == 1:  # without the cost of a task
            return [await self._execute_call(calls[0], positions[0])]
        # Exceptions are collected, so that a ToolFailure of one call leaves no other call running unobserved. Tasks
        # start in call order and queue for their shared state before their first await, so that order is kept.
        executions = map(self._execute_call, calls, positions)
        results = await asyncio.gather(*executions, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    def _assign_positions(self, calls: Sequence[ToolCall]) -> list[CallPosition]:
        caller = [None, *(name for executor, name in _callers.get() if executor is self)][-1]
        if caller is None:
            self.num_batches += 1
            return [CallPosition(self._key, self.num_batches - 1, index) for index in range(len(calls))]
        positions = []
        for call in calls:
            try:
                arguments = json.dumps(call.arguments, sort_keys=True, default=str)
            except (TypeError, ValueError, RecursionError):  # only Python code can pass such arguments
                arguments = ""
            call_id = digest(call.name, arguments)[:16]
            positions.append(CallPosition(self._key, caller, f"{call_id}#{self._ordinals[caller, call_id]}"))
            self._ordinals[caller, call_id] += 1
        return positions

    async def _execute_call(self, call: ToolCall, position: CallPosition) -> ToolResult:
        recorder = self._runtime.recorder
        if recorder is None:
            return await self._run_call(call)
        # As `measure` does, for calls that the tool itself makes.
        token = _callers.set((*_callers.get(), (self, f"inside {position.batch}/{position.index}")))
        try:
            try:
                result = recorder.replay(position, call)
            except (
                RecordedCancellation
            ):  # wait for ever: the caller cancels the call again, after the same time
                result = await asyncio.get_running_loop().create_future()
            if result is None:
                result = await self._run_call(call)
            else:
                await self._apply_replayed_result(recorder, position, call, result)
        except ToolFailure as failure:
            self._record_result(position, call, failure)
            raise
        except asyncio.CancelledError:
            self._record_result(position, call, RecordedCancellation())
            raise
        finally:
            _callers.reset(token)
        self._record_result(position, call, result)
        return result

    def _record_result(
        self, position: CallPosition, call: ToolCall, result: ToolResult | ToolFailure | RecordedCancellation
    ) -> None:
        if self._is_recording and self._runtime.recorder is not None:
            self._runtime.recorder.record(position, call, result)

    async def _apply_replayed_result(
        self, recorder: Recorder, position: CallPosition, call: ToolCall, result: ToolResult
    ) -> None:
        """Count a replayed call. Rerun a method of the environment, because a reward may read its side effects."""
        entry = self._entries.get(call.name)
        if entry is None or not self._reruns_in_replay(entry) or result.error in ("timeout", "unavailable"):
            self._runtime.metrics.count_answer(None if entry is None else call.name, result, self._key)
            return
        state = entry.state or ToolState("")
        if result.cached:  # the recorded run skipped it too; a later call may need its side effects
            self._runtime.metrics.count_answer(call.name, result, self._key)
            state.skip_call(self._make_pending_call(entry, call.arguments), result.content)
            return
        async with state.hold_lock():
            try:
                await state.catch_up()
                rerun_result = await self._run_call(call)
            except ToolFailure as failure:
                rerun_result = failure
        recorder.compare_rerun(position, call, result, rerun_result)

    def _reruns_in_replay(self, entry: _ToolEntry) -> bool:
        method_owner = getattr(getattr(entry.tool, "function", None), "__self__", None)
        return method_owner is not None and method_owner is self._owner and not entry.options.pure

    async def _run_call(self, call: ToolCall) -> ToolResult:
        entry = self._entries.get(call.name)
        if call.error is not None or entry is None:
            result = self._make_rejection(call)
            self._runtime.metrics.count_answer(None, result, self._key)
            return result
        async with NO_LOCK if entry.state is None else entry.state.hold_lock():
            metrics = self._runtime.metrics
            start_time = metrics.start_call(call.name)
            result: ToolResult | None = None
            try:
                rejection = self._check_arguments(entry.tool.spec, call.arguments)
                pending = self._make_pending_call(entry, call.arguments)
                if rejection is not None:
                    result = rejection
                elif self._cache is not None:
                    result = await self._cache.obtain_result(pending)
                else:
                    result = (await pending.execute(pending, time.monotonic() + pending.max_seconds)).result
            finally:
                metrics.finish_call(call.name, start_time, result, self._key)
        assert result is not None
        result.id = call.id  # safe to change: this copy has no other owner
        result.seconds = time.perf_counter() - start_time
        return result

    def rejection(self, call: ToolCall) -> ToolResult | None:
        """Return the error result of a malformed call, unknown tool or invalid arguments; None for a valid call."""
        entry = self._entries.get(call.name)
        if call.error is not None or entry is None:
            return self._make_rejection(call)
        return self._check_arguments(entry.tool.spec, call.arguments)

    def _make_rejection(self, call: ToolCall) -> ToolResult:
        if call.error is not None:
            return ToolResult(call.error, ok=False, error="malformed", id=call.id)
        if not self._entries:
            text = "There are no tools here; answer in plain text."
        else:
            matches = difflib.get_close_matches(call.name[:100], self._entries, n=MAX_SHOWN_TOOLS, cutoff=0.0)
            text = f"There is no tool named {call.name[:60]!r}. The tools are: {', '.join(matches)}."
        return ToolResult(text, ok=False, error="unknown", id=call.id)

    def _check_arguments(self, spec: ToolSpec, arguments: dict[str, Any]) -> ToolResult | None:
        try:
            problems = check_arguments(spec, _get_validator(spec.parameters), arguments)
        except Exception as error:  # an invalid schema, or arguments nested too deeply
            log.info("cannot validate the arguments of tool %s", spec.name, exc_info=True)
            return ToolResult(f"{spec.name} failed: {describe(error)}", ok=False, error="exception")
        return None if problems is None else ToolResult(problems, ok=False, error="schema")

    def _make_pending_call(self, entry: _ToolEntry, arguments: dict[str, Any]) -> PendingCall:
        runtime = self._runtime
        timeout = entry.options.timeout or self.timeout
        limits = (timeout, max(runtime.deadline, timeout), self.max_output_chars)
        return PendingCall(
            entry.tool, entry.options, arguments, entry.state, *limits, runtime.call, self._key
        )


def _make_entries(tools: Sequence[Tool]) -> dict[str, _ToolEntry]:
    """Return an entry for each tool, by name, with its options and the state that it shares with other tools."""
    all_options: list[ToolOptions] = [getattr(tool, "options", DEFAULT_OPTIONS) for tool in tools]
    stateful_servers = {options.server for options in all_options if options.stateful}
    states: dict[str, ToolState] = {}
    entries: dict[str, _ToolEntry] = {}
    for tool, options in zip(tools, all_options, strict=True):
        # On a stateful server, every tool that is not pure may change the state.
        may_change_state = bool(options.server) and options.server in stateful_servers and not options.pure
        state = None
        if options.ordered or options.stateful or may_change_state:
            state = states.setdefault(options.server, ToolState(options.server))
            state.is_stateful |= options.stateful
        entries[tool.spec.name] = _ToolEntry(tool, options, state)
    return entries
