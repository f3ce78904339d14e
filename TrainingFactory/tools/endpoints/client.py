"""Client of a model endpoint for many requests: concurrency and rate limits, retries, cache, budget. The cache is also
the recording: a client that replays it sends nothing."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from TrainingFactory.common.endpoints.budget import Budget, Usage
from TrainingFactory.common.endpoints.messages import ModelReply
from TrainingFactory.common.endpoints.transport import ModelError
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.cache.stores import REDIS_URL_PATTERN
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.limits import CallLimits
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult

MAX_BACKOFF_SECONDS = 30.0  # seconds of backoff between attempts
MAX_RETRY_AFTER_SECONDS = 120.0  # seconds that an endpoint can request with Retry-After
IN_FLIGHT_TIMEOUT_SECONDS = 3600.0  # maximum wait for an identical request; its own timeouts are shorter
_jitter = random.Random()  # of the retries; does not affect results
FailureKind = Literal[
    "unavailable", "refused", "cut", "unreadable", "out_of_range", "budget", "error", "not_recorded"
]
SendRequest = Callable[[], Awaitable[ModelReply]]
CheckReply = Callable[[ModelReply], object]


class ModelFailure(Exception):
    """Raised for a request without a usable reply. `is_permanent`: further requests would fail too."""

    def __init__(self, text: str, kind: FailureKind, is_denied: bool = False) -> None:
        super().__init__(text)
        self.kind: FailureKind = kind
        self.is_permanent = is_denied or kind in ("unavailable", "budget", "not_recorded")


@dataclass(kw_only=True, eq=False)
class EndpointClient:
    """Sends requests to `model` with retries, and caches the replies. `model` is any object with `close`."""

    MODEL_ROLE: ClassVar[str] = "the model"  # in errors

    model: Any
    concurrency: int | None = 8
    rate: float | None = None
    retries: int = 3
    pause: float = 0.5
    cache: ToolCache | str | Path | None = None
    budget: Budget = field(default_factory=Budget)
    replay: bool = False
    earlier_usage: Usage | None = None  # spending of earlier processes that counts for the budget

    def __post_init__(self) -> None:
        self._open_cache: ToolCache | None = self.cache if isinstance(self.cache, ToolCache) else None
        if isinstance(self.cache, str | Path):
            open_cache(self.cache).close()  # fails early if unusable; the first request opens it again
        self.usage = Usage()
        self.counted_usages = [
            self.usage,
            *([self.earlier_usage] if self.earlier_usage else []),
        ]  # of all that share the budget
        self._limits = CallLimits(self.concurrency, self.rate)
        self._request_tasks: set[asyncio.Task[ModelReply]] = set()
        self._is_closing = False  # requests that wait for a slot or a retry are dropped

    async def request(
        self, key: Sequence[str], send: SendRequest, check_reply: CheckReply = lambda _: None
    ) -> ModelReply:
        """Return the cached reply of `key`, or send the request; raise ModelFailure without a usable reply.
        `check_reply` raises for a reply that must not be cached. A request whose caller is cancelled continues, because
        it is paid: its reply is cached."""
        if self.cache is None:
            reply = await self._send_with_retries(send)
            check_reply(reply)
            return reply
        task = asyncio.ensure_future(self._ask_cached(digest(*key), send, check_reply))
        self._request_tasks.add(task)
        task.add_done_callback(self._remove_finished_task)
        return await asyncio.shield(task)

    def _remove_finished_task(self, task: asyncio.Task[ModelReply]) -> None:
        self._request_tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone: retrieved, so that asyncio does not log it

    async def _ask_cached(self, key: str, send: SendRequest, check_reply: CheckReply) -> ModelReply:
        async def run() -> ToolResult:
            if self.replay:
                text = f"{self.cache} has no reply to a request of this episode; record it first with replay: false"
                raise ModelFailure(text, "not_recorded")
            reply = await self._send_with_retries(send)
            check_reply(reply)
            return ToolResult(json.dumps(reply.as_json()))

        if isinstance(self.cache, str | Path) and self._open_cache is None:
            self._open_cache = open_cache(self.cache)
        assert self._open_cache is not None
        result = await self._open_cache.get_or_execute(key, run, time.monotonic() + IN_FLIGHT_TIMEOUT_SECONDS)
        reply = ModelReply.from_json(json.loads(result.content))
        if result.cached:
            self.usage.cached += 1
            self.usage.cached_tokens += reply.input_tokens + reply.output_tokens
            self.usage.cached_cost += self.budget.price_reply(reply)
        return reply

    async def _send_with_retries(self, send: SendRequest) -> ModelReply:
        attempt = 0
        while True:
            try:
                return await self._send_once(send)
            except ModelError as error:
                if not error.temporary:
                    raise ModelFailure(str(error), "error", error.denied) from error
                if attempt >= self.retries or self._is_closing:
                    attempts_text = f" ({attempt + 1} attempts)" if attempt else ""
                    raise ModelFailure(f"{error}{attempts_text}", "unavailable") from error
                requested_seconds = min(error.retry_after or 0.0, MAX_RETRY_AFTER_SECONDS)
            backoff_seconds = min(self.pause * 2**attempt, MAX_BACKOFF_SECONDS) * _jitter.uniform(0.5, 1)
            attempt += 1
            self.usage.retries += 1
            await asyncio.sleep(max(backoff_seconds, requested_seconds))

    async def _send_once(self, send: SendRequest) -> ModelReply:
        async with self._limits.hold_slot():
            if self._is_closing:
                raise ModelFailure(f"{self.MODEL_ROLE} is closed", "unavailable")
            self._check_budget()
            self.usage.requests += 1
            reply = await send()
        self.usage.input_tokens += reply.input_tokens
        self.usage.output_tokens += reply.output_tokens
        self.usage.estimated += reply.estimated
        self.usage.cost += self.budget.price_reply(reply)
        return reply

    def _check_budget(self) -> None:
        totals = {
            "max_cost": sum(usage.cost for usage in self.counted_usages),
            "max_tokens": sum(usage.input_tokens + usage.output_tokens for usage in self.counted_usages),
            "max_requests": sum(usage.requests for usage in self.counted_usages),
        }
        for name, total in totals.items():
            limit = getattr(self.budget, name)
            if limit is not None and total >= limit:
                hint = ", or resume in a new process, which starts with a fresh budget"
                raise ModelFailure(
                    f"{self.MODEL_ROLE}'s budget is spent: budget.{name} is {limit:g}, and {total:g} is used; raise it"
                    f"{hint if self.earlier_usage is None else ''}",
                    "budget",
                )

    async def close(self) -> None:
        """Wait for requests in flight, because their replies are paid for. Then close the connections, and the cache
        unless it was passed in. A later request reopens both."""
        if self._request_tasks:
            self._is_closing = True
            await asyncio.wait(self._request_tasks, timeout=getattr(self.model, "timeout", None))
            self._is_closing = False
        await self.model.close()
        if isinstance(self.cache, str | Path) and self._open_cache is not None:
            cache, self._open_cache = self._open_cache, None
            await in_thread(cache.close)


def open_cache(target: str | Path) -> ToolCache:
    if not REDIS_URL_PATTERN.match(str(target)):
        target = Path(target).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
    return ToolCache(target)
