"""Results of calls that need not be made again: of pure tools, and of stateful ones after equal histories."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import validate_call

from TrainingFactory.common.options import STRICT, Count, Positive, ZeroOrMore
from TrainingFactory.common.texts import describe
from TrainingFactory.tools.cache.stores import Store, store_at
from TrainingFactory.tools.calls import PendingCall, ToolState
from TrainingFactory.tools.executor import AsyncToolExecutor
from TrainingFactory.tools.fingerprint import call_name, digest
from TrainingFactory.tools.making import tools_without_options
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolCall, ToolResult

log = logging.getLogger(__name__)
REST_SECONDS = 5.0  # after an error the store is left alone for so long
MAX_ENTRY_BYTES = 4 << 20  # a larger result is not kept: reading it back would hold up the event loop
MAX_WAITING = 10_000  # results not yet written; more are not kept
MAX_USED = 1000
CANCELLED, FAILED = "cancelled", "failed"


class ToolCache:
    """Keeps results in an SQLite file (any number of processes may share it) or, for several machines, in Redis, for
    `ttl` seconds; without a target in memory. `tools` are those that `execute_with_cache` calls. Whatever goes wrong
    with the cache itself is counted in `failures` and told once; the call is then simply made."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        target: str | Path | None = None,
        tools: Sequence[Any] | None = None,
        *,
        ttl: Positive | None = None,
        max_bytes: Count = 1 << 30,
        memory_bytes: ZeroOrMore = 64 << 20,
    ) -> None:
        self._ttl, self._max_entry = ttl, min(max_bytes, MAX_ENTRY_BYTES)
        self._store = store_at(target, ttl, max_bytes)
        self._memory = _Memory(memory_bytes)
        self._flights: dict[str, asyncio.Future[ToolResult | str]] = {}
        self._writer = _Writer(self._store, self._failed)
        self._rests_until = 0.0
        self.failures = 0
        self._tools = tools

    @cached_property
    def executor(self) -> AsyncToolExecutor:
        """Return what makes the calls of `execute_with_cache`; without `tools`, of those that need no options."""
        made = AsyncToolExecutor(tools_without_options() if self._tools is None else self._tools)
        made.attach(ToolRuntime(cache=self), "")
        return made

    async def execute_with_cache(self, call: ToolCall) -> ToolResult:
        """Return the result of a call to one of `tools`, made only if it is not there yet. All calls made here are
        those of one episode, as far as stateful tools are concerned."""
        [result] = await self.executor.batch_execute([call])
        return result

    def episode(self, scope: str) -> EpisodeHistory:
        """Open the cache for one episode."""
        return EpisodeHistory(self, scope)

    async def through(
        self, key: str, run: Callable[[], Awaitable[ToolResult]], deadline: float
    ) -> ToolResult:
        """Return the result under `key`, else that of `run`, which is kept if it is ok. Of several callers at the same
        time one runs; if it is cancelled the next one does. Its failure is its own: the others then run themselves."""
        while True:
            kept = self._memory.get(key)
            found = (self._hit(key, *kept) if kept else None) or await self._in_store(key)
            if found is not None:
                return found
            flight = self._flights.get(key)
            if flight is None:
                return await self._lead(key, run)
            await asyncio.wait({flight}, timeout=max(0.0, deadline - time.monotonic()))
            answer = flight.result() if flight.done() else FAILED
            if isinstance(answer, ToolResult):
                return _decoded(_encoded(answer))  # its own copy
            if answer == FAILED:
                return await self._run(key, run)

    async def _lead(self, key: str, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        flight = self._flights[key] = asyncio.get_running_loop().create_future()
        answer: ToolResult | str = FAILED
        try:
            result = await self._run(key, run)
            if result.ok:
                answer = result
            return result
        except asyncio.CancelledError:
            answer = CANCELLED
            raise
        finally:
            del self._flights[key]
            flight.set_result(answer)

    async def _run(self, key: str, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        result = await run()
        if result.ok:
            self._keep(key, result)
        return result

    def flush(self) -> None:
        """Wait until everything is in the file."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is still to be written. What `tools` hold is given back by `cache.executor.close()`."""
        self._writer.close()
        self._store.close()

    async def _in_store(self, key: str) -> ToolResult | None:
        if time.monotonic() < self._rests_until:
            return None
        try:
            found = self._store.get(key) if self._store.quick else await in_thread(self._store.get, key)
            if found is None:
                return None
            result = self._hit(key, *found)
        except Exception as error:  # whatever is wrong with the store or with what others have put there
            self._failed(error)
            return None
        if result is not None:
            self._memory.put(key, *found)
        return result

    def _hit(self, key: str, value: str, made: float) -> ToolResult | None:
        if self._ttl is not None and time.time() - made > self._ttl:
            return None
        self._writer.used(key)
        return _decoded(value)

    def _keep(self, key: str, result: ToolResult) -> None:
        try:
            value = _encoded(result)
        except (TypeError, ValueError):  # attachments that are no JSON
            return
        if len(value) + len(key) > self._max_entry:
            return
        made = time.time()
        self._memory.put(key, value, made)
        if time.monotonic() >= self._rests_until:
            self._writer.add(key, value, made)

    def _failed(self, error: BaseException) -> None:
        if not self.failures:
            log.warning("the tool cache fails (%s); calls are made without it", describe(error))
        self.failures += 1
        self._rests_until = time.monotonic() + REST_SECONDS


class EpisodeHistory:
    """Answers the calls of one episode from the cache, or makes them: pure calls are known by their arguments, stateful
    ones by the calls before them as well."""

    def __init__(self, results: ToolCache, scope: str) -> None:
        self._results, self._scope = results, scope
        # By server a digest of the calls that it has had, in order; None where nobody knows what it has done.
        self._histories: dict[str, str | None] = {}
        self._begun: Counter[str] = Counter()

    async def obtain(self, call: PendingCall) -> ToolResult:
        deadline = time.monotonic() + call.seconds
        name = call_name(call.tool, call.options, call.arguments)
        if not call.options.pure and call.state is not None and call.state.stateful:
            return await self._after_others(call, call.state, name, deadline)

        async def make() -> ToolResult:
            return (await call.make(call, deadline)).result

        return await self._through(name if call.options.pure else None, call, make, deadline)

    async def _after_others(
        self, call: PendingCall, state: ToolState, name: str | None, deadline: float
    ) -> ToolResult:
        """Answer a call that depends on the calls before it, or that changes the answers after it."""
        server, lost = state.server, False

        async def make() -> ToolResult:
            nonlocal lost
            await state.catch_up()
            outcome = await call.make(call, deadline)
            lost = outcome.lost
            return outcome.result

        # Servers begin alike for all; objects of this process, such as an environment, may be made from a task.
        start = digest("start", server, "" if server else self._scope)
        before = self._histories.get(server, start)
        self._histories[server] = (
            None  # and stays so where this call raises, or another one comes from inside it
        )
        self._begun[server] += 1
        number = self._begun[server]
        key = digest(before, name) if call.options.stateful and before and name else None
        result = await self._through(key, call, make, deadline)
        if result.cached:
            state.skip(call, result.content)
        if lost or before is None or name is None or self._begun[server] != number:
            return result
        if result.error in ("schema", "unavailable"):  # the call never reached the tool
            self._histories[server] = before
        else:
            # A failure may have reasons of its own, such as time: it is shared with those who failed alike.
            self._histories[server] = digest(before, name if result.ok else digest(name, result.content))
        return result

    async def _through(
        self, key: str | None, call: PendingCall, make: Callable[[], Awaitable[ToolResult]], deadline: float
    ) -> ToolResult:
        if key is None:
            return await make()
        # The same call cut to another size is another entry.
        return await self._results.through(digest(key, str(call.max_output_chars)), make, deadline)


class _Memory:
    """The latest results as text: decoding is quick, and nobody can change what others will get."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._entries: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def get(self, key: str) -> tuple[str, float] | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: str, value: str, made: float) -> None:
        old = self._entries.pop(key, ("", 0.0))
        self._size += len(value) - len(old[0])
        self._entries[key] = (value, made)
        while self._size > self._limit:
            _, (gone, _) = self._entries.popitem(last=False)
            self._size -= len(gone)


class _Writer:
    """Writes on a thread of its own, many entries at a time: the event loop never waits for the disk."""

    def __init__(self, store: Store, failed: Callable[[BaseException], None]) -> None:
        self._store, self._failed = store, failed
        self._entries: deque[tuple[str, str, float]] = deque()
        self._used: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(1, "tool-cache")

    def add(self, key: str, value: str, made: float) -> None:
        if len(self._entries) < MAX_WAITING:
            self._entries.append((key, value, made))
            self._thread.submit(self._write)

    def used(self, key: str) -> None:
        """Note a use; written with the next entry, or when there are many."""
        self._used[key] = time.time()
        if len(self._used) > MAX_USED:
            self._thread.submit(self._write)

    def flush(self) -> None:
        self._thread.submit(self._write).result()

    def close(self) -> None:
        self.flush()
        self._thread.shutdown()

    def _write(self) -> None:
        entries = [self._entries.popleft() for _ in range(len(self._entries))]
        used, self._used = self._used, {}
        try:
            if entries or used:
                self._store.write(entries, used.items())
        except Exception as error:
            self._failed(error)


def _encoded(result: ToolResult) -> str:
    value = {"content": result.content, "attachments": result.attachments}
    return json.dumps(value, ensure_ascii=False)


def _decoded(value: str) -> ToolResult:
    return ToolResult(**json.loads(value), cached=True)
