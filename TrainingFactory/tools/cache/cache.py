"""Results of calls that need not be made again: of pure tools, and of stateful ones after equal histories."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import validate_call

from TrainingFactory.options import STRICT, Count, Positive, ZeroOrMore
from TrainingFactory.texts import describe
from TrainingFactory.tools.cache.history import EpisodeHistory
from TrainingFactory.tools.cache.stores import IN_REDIS, RedisStore, SQLiteStore, Store, StoreError
from TrainingFactory.tools.executor import AsyncToolExecutor
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
    """A cache in an SQLite file (any number of processes may share it) or, for several machines, in Redis.
    In a run, `ToolRuntime(cache=cache)` lets the tools of all episodes use it. Only tools marked `pure` or
    `stateful` are cached, and only results that are ok. Whatever goes wrong with the cache itself is counted in
    `failures` and told once; the call is then simply made.

    `ttl`: seconds until a result is too old. `max_bytes`: of all results in the file; the least recently used go
    first. `memory_bytes`: of results that are also kept in memory.
    """

    @validate_call(config=STRICT)
    def __init__(
        self,
        target: str | Path,
        tools: Sequence[Any] = (),
        *,
        ttl: Positive | None = None,
        max_bytes: Count = 1 << 30,
        memory_bytes: ZeroOrMore = 64 << 20,
    ) -> None:
        self._ttl, self._max_entry = ttl, min(max_bytes, MAX_ENTRY_BYTES)
        in_redis = isinstance(target, str) and IN_REDIS.match(target)
        self._store: Store = (
            RedisStore(str(target), ttl) if in_redis else SQLiteStore(Path(target), ttl, max_bytes)
        )
        self._memory = _Memory(memory_bytes)
        self._flights: dict[str, asyncio.Future[ToolResult | str]] = {}
        self._writer = _Writer(self._store, self._failed)
        self._rests_until = 0.0
        self.failures = 0
        self.executor = AsyncToolExecutor(tools)
        self.executor.attach(ToolRuntime(cache=self), "")

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
            found = self._in_memory(key) or await self._in_store(key)
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

    def _in_memory(self, key: str) -> ToolResult | None:
        kept = self._memory.get(key)
        return None if kept is None else self._hit(key, *kept)

    async def _in_store(self, key: str) -> ToolResult | None:
        if time.monotonic() < self._rests_until:
            return None
        try:
            found = self._store.get(key) if self._store.quick else await in_thread(self._store.get, key)
            if found is None:
                return None
            result = self._hit(key, *found)
        except (StoreError, ValueError, TypeError) as error:
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
