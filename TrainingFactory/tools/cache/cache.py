"""The cache of tool results: of pure tools by their arguments, of stateful tools by the history of calls as well."""

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

from TrainingFactory.common.images import images_from_rows, images_to_rows
from TrainingFactory.common.options import STRICT, Count, Positive, ZeroOrMore
from TrainingFactory.common.texts import describe
from TrainingFactory.tools.cache.stores import Store, open_store
from TrainingFactory.tools.calls import PendingCall, ToolState
from TrainingFactory.tools.executor import AsyncToolExecutor
from TrainingFactory.tools.fingerprint import digest, fingerprint_call
from TrainingFactory.tools.making import make_tools_without_options
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolCall, ToolResult

log = logging.getLogger(__name__)
STORE_PAUSE_SECONDS = 5.0  # the store is not used for this long after an error
MAX_ENTRY_BYTES = 4 << 20  # larger results are not cached: reading them would block the event loop
MAX_QUEUED_RESULTS = 10_000  # results waiting to be written; further ones are not stored
MAX_QUEUED_USES = 1000  # uses waiting to be written
RUN_CANCELLED, RUN_FAILED = "cancelled", "failed"


class ToolCache:
    """Caches results in an SQLite file, which several processes may share, or in Redis for several machines; without a
    target in memory only. Entries expire after `ttl` seconds (None: never). `tools` are the tools that
    `execute_with_cache` can call. Errors of the cache are counted in `num_failures` and logged once; the call is then
    executed."""

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
        self._ttl, self._max_entry_bytes = ttl, min(max_bytes, MAX_ENTRY_BYTES)
        self._store = open_store(target, ttl, max_bytes)
        self._memory_cache = _MemoryCache(memory_bytes)
        self._results_in_flight: dict[str, asyncio.Future[ToolResult | str]] = {}
        self._writer = _StoreWriter(self._store, self._record_failure)
        self._store_paused_until = 0.0
        self.num_failures = 0
        self._tools = tools

    @cached_property
    def executor(self) -> AsyncToolExecutor:
        """Return the executor of `execute_with_cache`; without `tools`, it has all tools that need no options."""
        executor = AsyncToolExecutor(make_tools_without_options() if self._tools is None else self._tools)
        executor.attach(ToolRuntime(cache=self), "")
        return executor

    async def execute_with_cache(self, call: ToolCall) -> ToolResult:
        """Return the cached result of a call, or execute it. For stateful tools, all calls form one episode."""
        [result] = await self.executor.batch_execute([call])
        return result

    def episode(self, scope: str) -> EpisodeToolCache:
        """Open the cache for one episode."""
        return EpisodeToolCache(self, scope)

    async def get_or_execute(
        self, key: str, run: Callable[[], Awaitable[ToolResult]], deadline: float
    ) -> ToolResult:
        """Return the cached result of `key`; otherwise await `run()` and cache its result if it is ok. Of concurrent
        callers, only one executes `run`; if it is cancelled, the next one does. If it fails or is late, all others
        execute theirs too."""
        while True:
            entry = self._memory_cache.get(key)
            result = (self._decode_entry(key, *entry) if entry else None) or await self._read_store(key)
            if result is not None:
                return result
            future = self._results_in_flight.get(key)
            if future is None:
                return await self._run_and_share(key, run)
            await asyncio.wait({future}, timeout=max(0.0, deadline - time.monotonic()))
            shared_result = future.result() if future.done() else RUN_FAILED
            if isinstance(shared_result, ToolResult):
                return _decode_result(_encode_result(shared_result))  # a copy
            if shared_result == RUN_FAILED:
                return await self._run_and_store(key, run)

    async def _run_and_share(self, key: str, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        future = self._results_in_flight[key] = asyncio.get_running_loop().create_future()
        shared_result: ToolResult | str = RUN_FAILED
        try:
            result = await self._run_and_store(key, run)
            if result.ok:
                shared_result = result
            return result
        except asyncio.CancelledError:
            shared_result = RUN_CANCELLED
            raise
        finally:
            del self._results_in_flight[key]
            future.set_result(shared_result)

    async def _run_and_store(self, key: str, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        result = await run()
        if result.ok:
            self._store_result(key, result)
        return result

    def flush(self) -> None:
        """Wait until all results are written to the store."""
        self._writer.flush()

    def close(self) -> None:
        """Write the remaining results and close the store. `cache.executor.close()` releases the tools."""
        self._writer.close()
        self._store.close()

    async def _read_store(self, key: str) -> ToolResult | None:
        if time.monotonic() < self._store_paused_until:
            return None
        try:
            entry = self._store.get(key) if self._store.is_fast else await in_thread(self._store.get, key)
            if entry is None:
                return None
            result = self._decode_entry(key, *entry)
        except Exception as error:  # of the store, or of an invalid entry
            self._record_failure(error)
            return None
        if result is not None:
            self._memory_cache.put(key, *entry)
        return result

    def _decode_entry(self, key: str, encoded_result: str, created_at: float) -> ToolResult | None:
        if self._ttl is not None and time.time() - created_at > self._ttl:
            return None
        self._writer.record_use(key)
        return _decode_result(encoded_result)

    def _store_result(self, key: str, result: ToolResult) -> None:
        try:
            encoded_result = _encode_result(result)
        except (TypeError, ValueError):  # attachments that are not JSON
            return
        if len(encoded_result) + len(key) > self._max_entry_bytes:
            return
        created_at = time.time()
        self._memory_cache.put(key, encoded_result, created_at)
        if time.monotonic() >= self._store_paused_until:
            self._writer.add_entry(key, encoded_result, created_at)

    def _record_failure(self, error: BaseException) -> None:
        if not self.num_failures:
            log.warning("tool cache error (%s); calls are executed without the cache", describe(error))
        self.num_failures += 1
        self._store_paused_until = time.monotonic() + STORE_PAUSE_SECONDS


class EpisodeToolCache:
    """Cache of one episode. It caches pure calls by fingerprint, and stateful calls also by all earlier calls."""

    def __init__(self, cache: ToolCache, scope: str) -> None:
        self._cache, self._scope = cache, scope
        # Digest of all calls so far, by server; None if the state of the server is unknown.
        self._histories: dict[str, str | None] = {}
        self._num_calls: Counter[str] = Counter()

    def fork(self) -> EpisodeToolCache:
        """Return a copy of the cache for an episode that continues this one."""
        copy = EpisodeToolCache(self._cache, self._scope)
        copy._histories, copy._num_calls = dict(self._histories), Counter(self._num_calls)
        return copy

    async def obtain_result(self, call: PendingCall) -> ToolResult:
        deadline = time.monotonic() + call.max_seconds
        fingerprint = fingerprint_call(call.tool, call.options, call.arguments)
        if not call.options.pure and call.state is not None and call.state.is_stateful:
            return await self._obtain_stateful(call, call.state, fingerprint, deadline)

        async def execute() -> ToolResult:
            return (await call.execute(call, deadline)).result

        return await self._call_cached(fingerprint if call.options.pure else None, call, execute, deadline)

    async def _obtain_stateful(
        self, call: PendingCall, state: ToolState, fingerprint: str | None, deadline: float
    ) -> ToolResult:
        """Return the result of a call whose result depends on earlier calls, or that changes later results."""
        server, is_answer_lost = state.server_name, False

        async def execute() -> ToolResult:
            nonlocal is_answer_lost
            await state.catch_up()
            outcome = await call.execute(call, deadline)
            is_answer_lost = outcome.is_answer_lost
            return outcome.result

        # Servers start in the same state for all episodes; objects of this process, such as an environment, may not.
        initial_history = digest("start", server, "" if server else self._scope)
        history = self._histories.get(server, initial_history)
        self._histories[server] = None  # remains None if this call raises or makes further calls
        self._num_calls[server] += 1
        call_number = self._num_calls[server]
        key = digest(history, fingerprint) if call.options.stateful and history and fingerprint else None
        result = await self._call_cached(key, call, execute, deadline)
        if result.cached:
            state.skip_call(call, result.content)
        if is_answer_lost or history is None or fingerprint is None or self._num_calls[server] != call_number:
            return result
        if result.error in ("schema", "unavailable"):  # the call never reached the tool
            self._histories[server] = history
        else:
            # A failure may be accidental, so its text is part of the history: only equal failures share results.
            outcome_digest = fingerprint if result.ok else digest(fingerprint, result.content)
            self._histories[server] = digest(history, outcome_digest)
        return result

    async def _call_cached(
        self, key: str | None, call: PendingCall, run: Callable[[], Awaitable[ToolResult]], deadline: float
    ) -> ToolResult:
        if key is None:
            return await run()
        # The output limit is part of the key, because cached results are already cut.
        return await self._cache.get_or_execute(digest(key, str(call.max_output_chars)), run, deadline)


class _MemoryCache:
    """The most recently used results, as JSON: decoding is fast, and every caller gets its own copy."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars, self._num_chars = max_chars, 0  # characters
        self._entries: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def get(self, key: str) -> tuple[str, float] | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: str, value: str, created_at: float) -> None:
        old_entry = self._entries.pop(key, ("", 0.0))
        self._num_chars += len(value) - len(old_entry[0])
        self._entries[key] = (value, created_at)
        while self._num_chars > self._max_chars:
            _, (evicted_value, _) = self._entries.popitem(last=False)
            self._num_chars -= len(evicted_value)


class _StoreWriter:
    """Writes entries to the store in batches, on its own thread, so that the event loop never waits for the disk."""

    def __init__(self, store: Store, on_failure: Callable[[BaseException], None]) -> None:
        self._store, self._on_failure = store, on_failure
        self._entries: deque[tuple[str, str, float]] = deque()
        self._last_uses: dict[str, float] = {}
        self._thread_pool = ThreadPoolExecutor(1, "tool-cache")

    def add_entry(self, key: str, value: str, created_at: float) -> None:
        if len(self._entries) < MAX_QUEUED_RESULTS:
            self._entries.append((key, value, created_at))
            self._thread_pool.submit(self._write)

    def record_use(self, key: str) -> None:
        """Record the time of use for eviction. Written with the next entry, or after `MAX_QUEUED_USES` uses."""
        self._last_uses[key] = time.time()
        if len(self._last_uses) > MAX_QUEUED_USES:
            self._thread_pool.submit(self._write)

    def flush(self) -> None:
        self._thread_pool.submit(self._write).result()

    def close(self) -> None:
        self.flush()
        self._thread_pool.shutdown()

    def _write(self) -> None:
        entries = [self._entries.popleft() for _ in range(len(self._entries))]
        last_uses, self._last_uses = self._last_uses, {}
        try:
            if entries or last_uses:
                self._store.write(entries, last_uses.items())
        except Exception as error:
            self._on_failure(error)


def _encode_result(result: ToolResult) -> str:
    row: dict[str, Any] = {"content": result.content, "attachments": result.attachments}
    if result.images:
        row["images"] = images_to_rows(result.images, None)
    return json.dumps(row, ensure_ascii=False)


def _decode_result(encoded_result: str) -> ToolResult:
    row = json.loads(encoded_result)
    images = images_from_rows(row.get("images", ()), None)
    return ToolResult(row["content"], attachments=row["attachments"], images=images, cached=True)
