"""Client of a judge model: concurrency and rate limits, retries, cache, usage counts and budget."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import TypeVar

from pydantic.dataclasses import dataclass

from TrainingFactory.common.endpoint import ModelError
from TrainingFactory.common.options import STRICT, NotNegative
from TrainingFactory.rewards.judge.endpoints import JudgeFailure, JudgeModel, JudgeReply
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.cache.stores import REDIS_URL
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.limits import CallLimits
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Message, ToolResult

T = TypeVar("T")
MessageFactory = Callable[[], Sequence[Message]]
MAX_BACKOFF = 30.0  # seconds of backoff between attempts
MAX_RETRY_AFTER = 120.0  # seconds that an endpoint can request with Retry-After
FAULT_TEXTS = {
    "refused": "the judge refused to answer",
    "cut": "the judge's answer was truncated; raise max_tokens",
}
IN_FLIGHT_TIMEOUT = 3600.0  # maximum wait for an identical request in flight; its own timeouts are shorter
_chance = random.Random()  # jitter of the retries; does not affect results


@dataclass(config=STRICT, frozen=True)
class Budget:
    """Limits of a judge's spending in one process. Prices are per million tokens."""

    max_cost: NotNegative | None = None
    max_tokens: NotNegative | None = None
    max_requests: NotNegative | None = None
    input_price: NotNegative = 0.0
    output_price: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.max_cost is not None and not self.priced:
            raise ValueError("max_cost is set without prices; set input_price and output_price")

    @property
    def priced(self) -> bool:
        return self.input_price + self.output_price > 0

    def cost(self, reply: JudgeReply) -> float:
        return (reply.input_tokens * self.input_price + reply.output_tokens * self.output_price) / 1e6


@plain_dataclass(slots=True)
class Usage:
    """Requests, tokens and cost so far."""

    requests: int = 0
    retries: int = 0
    cached: int = 0  # answered from the cache
    input_tokens: int = 0
    output_tokens: int = 0
    estimated: int = 0  # replies without token counts from the endpoint
    cost: float = 0.0
    cached_tokens: int = 0  # tokens of the cached replies when they were first requested
    cached_cost: float = 0.0
    failures: Counter[str] = field(default_factory=Counter[str])  # by kind

    @property
    def metrics(self) -> dict[str, float]:
        names = ("requests", "retries", "cached", "input_tokens", "output_tokens", "estimated", "cost")
        counts = {f"judge/{name}": float(getattr(self, name)) for name in names}
        return counts | {f"judge/failed_{kind}": float(count) for kind, count in self.failures.items()}


@plain_dataclass(kw_only=True, eq=False)
class JudgeClient:
    """Send requests to a judge model with retries, and cache the replies."""

    model: JudgeModel
    concurrency: int | None = 8
    rate: float | None = None
    retries: int = 3
    pause: float = 0.5
    cache: ToolCache | str | Path | None = None
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        self._opened: ToolCache | None = self.cache if isinstance(self.cache, ToolCache) else None
        if isinstance(self.cache, str | Path):
            open_cache(self.cache).close()  # fails early if unusable; the first request opens it again
        self.usage = Usage()
        self.spent = [self.usage]  # all clients that share the budget
        self._limits = CallLimits(self.concurrency, self.rate)

    async def ask(
        self, name: Sequence[str], messages: MessageFactory, number: int, read: Callable[[str], T]
    ) -> T:
        """Return the reply, parsed by `read`; raise JudgeFailure without a valid one. `name` is the prompt's cache key;
        the messages are not part of it, because their fences differ between requests. `number` is the sample."""
        try:
            if self.cache is None:
                return read((await self._request(messages(), number)).text)
            return await self._through_cache(name, messages, number, read)
        except JudgeFailure as failure:
            self.usage.failures[failure.kind] += 1
            raise

    async def _through_cache(
        self, name: Sequence[str], messages: MessageFactory, number: int, read: Callable[[str], T]
    ) -> T:
        async def run() -> ToolResult:
            reply = await self._request(messages(), number)
            read(reply.text)  # raises for an invalid reply, which must not be cached
            entry = {"text": reply.text, "tokens": [reply.input_tokens, reply.output_tokens]}
            return ToolResult(json.dumps(entry))

        key = digest("judge", self.model.identity, f"{number}", *name)
        if isinstance(self.cache, str | Path) and self._opened is None:
            self._opened = open_cache(self.cache)
        assert self._opened is not None
        result = await self._opened.get_or_execute(key, run, time.monotonic() + IN_FLIGHT_TIMEOUT)
        entry = json.loads(result.content)
        reply = JudgeReply(entry["text"], *entry["tokens"])
        if result.cached:
            self.usage.cached += 1
            self.usage.cached_tokens += reply.input_tokens + reply.output_tokens
            self.usage.cached_cost += self.budget.cost(reply)
        return read(reply.text)

    async def _request(self, messages: Sequence[Message], number: int) -> JudgeReply:
        attempt = 0
        while True:
            try:
                return await self._attempt(messages, number)
            except ModelError as error:
                if not error.temporary:
                    raise JudgeFailure(str(error), "error") from error
                if attempt >= self.retries:
                    attempts = f" ({attempt + 1} attempts)" if attempt else ""
                    raise JudgeFailure(f"{error}{attempts}", "unavailable") from error
                delay = min(error.wait or 0.0, MAX_RETRY_AFTER)
            pause = max(min(self.pause * 2**attempt, MAX_BACKOFF) * _chance.uniform(0.5, 1), delay)
            attempt += 1
            self.usage.retries += 1
            await asyncio.sleep(pause)

    async def _attempt(self, messages: Sequence[Message], number: int) -> JudgeReply:
        async with self._limits.hold_slot():
            self._check_budget()
            self.usage.requests += 1
            reply = await self.model.ask(messages, number)
        usage = self.usage
        usage.input_tokens += reply.input_tokens
        usage.output_tokens += reply.output_tokens
        usage.estimated += reply.estimated
        usage.cost += self.budget.cost(reply)
        if reply.fault is not None:
            raise JudgeFailure(FAULT_TEXTS[reply.fault], reply.fault)
        return reply

    def _check_budget(self) -> None:
        used = {
            "max_cost": sum(usage.cost for usage in self.spent),
            "max_tokens": sum(usage.input_tokens + usage.output_tokens for usage in self.spent),
            "max_requests": sum(usage.requests for usage in self.spent),
        }
        for name, amount in used.items():
            limit = getattr(self.budget, name)
            if limit is not None and amount >= limit:
                raise JudgeFailure(
                    f"the judge's budget is spent: budget.{name} is {limit:g}, and this process has used {amount:g}; "
                    "raise it, or resume in a new process, which starts with a fresh budget",
                    "budget",
                )

    async def close(self) -> None:
        """Close the connections, and the cache unless it was passed in. A later request reopens both."""
        await self.model.close()
        if isinstance(self.cache, str | Path) and self._opened is not None:
            client, self._opened = self._opened, None
            await in_thread(client.close)


def open_cache(target: str | Path) -> ToolCache:
    if not REDIS_URL.match(str(target)):
        target = Path(target).expanduser()
    return ToolCache(target)
