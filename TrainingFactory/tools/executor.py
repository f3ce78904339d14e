"""One executor runs every call: checked, bounded in time and size, answered in call order."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jsonschema.protocols import Validator

from TrainingFactory.protocols import Tool, ToolSession, ToolSource
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.cache.history import Group, Skipped
from TrainingFactory.tools.fingerprint import call_name, digest
from TrainingFactory.tools.decorator import FunctionTool
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.runtime import BrokenOff, Outcome, Place, ResultCache, Tape, ToolRuntime
from TrainingFactory.tools.schema import schema_problems, validator_of
from TrainingFactory.texts import bounded, describe
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult, ToolSpec

log = logging.getLogger(__name__)
MAX_NAMES = 10
DEFAULT_OPTIONS = ToolOptions()
_VALIDATORS: dict[int, Validator] = {}
_closing: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references
_parts: ContextVar[tuple[tuple[AsyncToolExecutor, str], ...]] = ContextVar(
    "who makes calls of which executor, if no turn", default=()
)


@dataclass(slots=True)
class _Entry:
    tool: Tool
    options: ToolOptions
    group: Group | None  # None: its calls wait for no others


class AsyncToolExecutor:
    """The tools of one episode. All calls of a turn run at the same time, except that tools which share state
    (`ordered`, `stateful`) take their calls in order; results come in call order, each with the id of its call.
    A call that fails is a result that the model reads; only `ToolFailure` (the tools are gone) is raised, when the
    other calls of the turn have ended. Cancelling `batch_execute` cancels its calls.

    `tools` are tools, sources of tools, and whatever `as_tool` can make one of.
    `timeout` is for tools without one of their own. How long a call may take in all, limits, further attempts, the
    cache and the tape are matters of the `ToolRuntime`, which `attach` makes one for all executors of a run.
    """

    def __init__(self, tools: Sequence[Any], timeout: float = 30.0, max_output_chars: int = 100_000) -> None:
        if timeout <= 0 or max_output_chars < 1:
            raise ValueError(f"timeout ({timeout}) and max_output_chars ({max_output_chars}) must be over 0")
        self.timeout = timeout
        self.max_output_chars = max_output_chars
        self.tools: list[Tool] = []
        self._sessions: list[ToolSession] = []
        self._runtime = ToolRuntime()
        self._key: Hashable = ""
        self._owner: object = None
        self._batches = 0
        self._made: Counter[tuple[str, str]] = Counter()
        try:
            for made in map(as_tool, tools):
                if not isinstance(made, FunctionTool) and isinstance(made, ToolSource):
                    self._sessions.append(made.session())
                    self.tools += self._sessions[-1].tools
                else:
                    self.tools.append(made)
            _check_names(self.tools)
        except BaseException:
            _close_soon(self)
            raise
        self._groups: dict[str, Group] = {}
        self._entries = self._sorted_out()

    def attach(
        self, runtime: ToolRuntime, key: Hashable, task: str | None = None, owner: object = None
    ) -> None:
        """Share `runtime` with the other executors of a run; before the first call. `key` names the episode on the
        tape. Stateful tools of this process share cached results among episodes of one `task` only; None stands for
        "no other episode". `owner` is the environment, whose own methods are run again in a replay."""
        assert self._batches == 0, "attach comes before the first call"
        self._runtime = runtime
        self._key, self._owner = key, owner
        for group in self._groups.values():
            group.start(f"episode {key}" if task is None else f"task {task}")

    @property
    def holds_sessions(self) -> bool:
        return bool(self._sessions)

    async def close(self) -> None:
        """Close the sessions of this episode; again does nothing."""
        sessions, self._sessions = self._sessions, []
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Calls made inside are no turn of the model. They may come in any order, so the tape knows them by this name,
        the tool and its arguments."""
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
        finished = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            finished.append(result)
        return finished

    def _places(self, calls: Sequence[ToolCall]) -> list[Place]:
        part = next((name for executor, name in reversed(_parts.get()) if executor is self), None)
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
        tape = self._runtime.tape
        if tape is None:
            return await self._answer(call)
        try:
            with self.part(f"inside {place.batch}/{place.index}"):
                try:
                    result = tape.replay(place, call)
                except BrokenOff:  # whoever gave it up waits as long again, and gives it up again
                    result = await asyncio.get_running_loop().create_future()
                if result is None:
                    result = await self._answer(call)
                else:
                    await self._replayed(tape, place, call, result)
        except ToolFailure as failure:
            tape.record(place, call, failure)
            raise
        except asyncio.CancelledError:
            tape.record(place, call, BrokenOff())
            raise
        tape.record(place, call, result)
        return result

    async def _replayed(self, tape: Tape, place: Place, call: ToolCall, result: ToolResult) -> None:
        """Methods of the environment are run again for what they leave on it, which a reward may look at. All else
        is only counted."""
        entry = self._entries.get(call.name)
        if entry is None or not self._runs_again(entry) or result.error in ("timeout", "unavailable"):
            self._runtime.metrics.answered(None if entry is None else call.name, result)
            return
        group = entry.group or Group("")
        if result.cached:  # it was not run; the next one that is may need what it leaves
            self._runtime.metrics.answered(call.name, result)
            group.skip(self._skipped(entry, call.arguments, result))
            return
        async with group.turn():
            try:
                await group.catch_up()
                made = await self._answer(call)
            except ToolFailure as failure:
                made = failure
        tape.compare(place, call, result, made)

    def _runs_again(self, entry: _Entry) -> bool:
        bound_to = getattr(getattr(entry.tool, "function", None), "__self__", None)
        return bound_to is not None and bound_to is self._owner and not entry.options.pure

    async def _answer(self, call: ToolCall) -> ToolResult:
        entry = self._entries.get(call.name)
        if call.error is not None or entry is None:
            result = self._refused(call)
            self._runtime.metrics.answered(None, result)
            return result
        async with contextlib.nullcontext() if entry.group is None else entry.group.turn():
            metrics = self._runtime.metrics
            started = metrics.began(call.name)
            result: ToolResult | None = None
            try:
                wrong = self._wrong(entry.tool.spec, call.arguments)
                result = wrong or await self._obtain(entry, call.arguments)
            finally:
                metrics.finished(call.name, started, result)
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

    async def _obtain(self, entry: _Entry, arguments: dict[str, Any]) -> ToolResult:
        """From the cache where it may come from there, else by calling the tool."""
        options, cache = entry.options, self._runtime.cache
        deadline = time.monotonic() + max(self._runtime.deadline, self._timeout(entry))
        if cache is None:
            return (await self._call(entry, arguments, deadline)).result
        if options.pure:
            name = call_name(entry.tool, options, arguments)
            if name is not None:

                async def run() -> ToolResult:
                    return (await self._call(entry, arguments, deadline)).result

                return await cache.through(self._sized(name), run, deadline)
        elif entry.group is not None and entry.group.stateful:
            return await self._after_history(entry, entry.group, arguments, cache, deadline)
        return (await self._call(entry, arguments, deadline)).result

    async def _after_history(
        self, entry: _Entry, group: Group, arguments: dict[str, Any], cache: ResultCache, deadline: float
    ) -> ToolResult:
        """A call whose answer depends on the calls before it, or that changes the answers after it."""
        name = call_name(entry.tool, entry.options, arguments)
        key = group.key(name) if entry.options.stateful else None
        lost = False

        async def run() -> ToolResult:
            nonlocal lost
            await group.catch_up()
            outcome = await self._call(entry, arguments, deadline)
            lost = outcome.lost
            return outcome.result

        try:
            result = await run() if key is None else await cache.through(self._sized(key), run, deadline)
        except BaseException:
            group.lose()
            raise
        if result.cached:
            group.skip(self._skipped(entry, arguments, result))
        if lost:
            group.lose()
        elif result.error not in ("schema", "unavailable"):  # else the call never reached the tool
            # A failure may have reasons of its own, such as time: it is shared with those who failed alike.
            group.add(name if name is None or result.ok else digest(name, result.content))
        return result

    def _skipped(self, entry: _Entry, arguments: dict[str, Any], result: ToolResult) -> Skipped:
        async def make_up() -> Outcome:
            within = time.monotonic() + max(self._runtime.deadline, self._timeout(entry))
            return await self._call(entry, arguments, within)

        return Skipped(entry.tool.spec.name, result.content, make_up)

    async def _call(self, entry: _Entry, arguments: dict[str, Any], deadline: float) -> Outcome:
        timeout = self._timeout(entry)
        outcome = await self._runtime.call(entry.tool, arguments, entry.options, timeout, deadline)
        outcome.result.content = bounded(outcome.result.content, self.max_output_chars)
        return outcome

    def _timeout(self, entry: _Entry) -> float:
        return entry.options.timeout or self.timeout

    def _sized(self, key: str) -> str:
        """The same call cut to another size is another entry of the cache."""
        return digest(key, str(self.max_output_chars))

    def _sorted_out(self) -> dict[str, _Entry]:
        """Tools by name, each with the group it shares state with."""
        options = {tool.spec.name: getattr(tool, "options", DEFAULT_OPTIONS) for tool in self.tools}
        stateful = {chosen.server for chosen in options.values() if chosen.stateful}
        entries: dict[str, _Entry] = {}
        for tool in self.tools:
            chosen: ToolOptions = options[tool.spec.name]
            # On a server with state any tool that is not pure may change it.
            touches = bool(chosen.server) and chosen.server in stateful and not chosen.pure
            group = None
            if chosen.ordered or chosen.stateful or touches:
                group = self._groups.setdefault(chosen.server, Group(chosen.server))
                group.stateful |= chosen.stateful
            entries[tool.spec.name] = _Entry(tool, chosen, group)
        return entries


def _check_names(tools: Sequence[Tool]) -> None:
    names = [tool.spec.name for tool in tools]
    if len(set(names)) < len(names):
        twice = ", ".join(sorted({name for name in names if names.count(name) > 1}))
        raise ValueError(f"two tools have the same name: {twice}; rename one with @tool(name=...)")


def _close_soon(executor: AsyncToolExecutor) -> None:
    """For an executor that could not be made: nobody else will close what it has opened."""
    if not executor._sessions:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(executor.close())
    else:
        task = loop.create_task(executor.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)


def _validator(schema: dict[str, Any]) -> Validator:
    """Kept by the identity of the schema: every episode has an executor of its own over the same tools."""
    known = _VALIDATORS.get(id(schema))
    if known is None or known.schema is not schema:  # an id may be used again
        if len(_VALIDATORS) > 1000:
            _VALIDATORS.clear()
        known = _VALIDATORS[id(schema)] = validator_of(schema)
    return known
