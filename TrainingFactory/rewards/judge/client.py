"""Requests to a judge: so many at a time, tried again where that may help, kept in a cache, counted and limited."""

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
from TrainingFactory.rewards.judge.endpoints import JudgeFailure, JudgeModel, Reply
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.cache.stores import IN_REDIS
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.limits import Limits
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Message, ToolResult

T = TypeVar("T")
Messages = Callable[[], Sequence[Message]]
LONGEST_PAUSE = 30.0
LONGEST_WAIT = 120.0  # where an endpoint says itself how long
FAULTS = {
    "refused": "the judge refused to answer",
    "cut": "the judge's answer was cut off; give it more max_tokens",
}
FLIGHT_SECONDS = 3600.0  # an equal request that is under way is waited for so long; its own limits come first
_chance = random.Random()  # spreads attempts over time; it changes no result


@dataclass(config=STRICT, frozen=True)
class Budget:
    """Limit what a judge spends in one process. Prices are for a million tokens."""

    max_cost: NotNegative | None = None
    max_tokens: NotNegative | None = None
    max_requests: NotNegative | None = None
    input_price: NotNegative = 0.0
    output_price: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.max_cost is not None and not self.priced:
            raise ValueError("max_cost needs the prices: set input_price and output_price")

    @property
    def priced(self) -> bool:
        return self.input_price + self.output_price > 0

    def cost(self, reply: Reply) -> float:
        return (reply.input_tokens * self.input_price + reply.output_tokens * self.output_price) / 1e6


@plain_dataclass(slots=True)
class Usage:
    """Count what was spent so far."""

    requests: int = 0  # that were sent
    retries: int = 0
    cached: int = 0  # answered without a request
    input_tokens: int = 0
    output_tokens: int = 0
    estimated: int = 0  # replies whose tokens the endpoint did not count
    cost: float = 0.0
    cached_tokens: int = 0  # what the cached ones took when they were asked for
    cached_cost: float = 0.0
    failures: Counter[str] = field(default_factory=Counter[str])  # by kind

    @property
    def metrics(self) -> dict[str, float]:
        names = ("requests", "retries", "cached", "input_tokens", "output_tokens", "estimated", "cost")
        found = {f"judge/{name}": float(getattr(self, name)) for name in names}
        return found | {f"judge/failed_{kind}": float(count) for kind, count in self.failures.items()}


@plain_dataclass(kw_only=True, eq=False)
class JudgeClient:
    """Make requests to a model, again where that may help, and keep its replies in a cache."""

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
            open_cache(self.cache).close()  # it can be used; the first request opens it
        self.usage = Usage()
        self.spent = [self.usage]  # what the budget is for: also that of other clients, where they share it
        self._limits = Limits(self.concurrency, self.rate)

    async def ask(self, name: Sequence[str], messages: Messages, number: int, read: Callable[[str], T]) -> T:
        """Return what `read` makes of the reply; raise JudgeFailure if there is none. `name` is what the prompt is
        known by in the cache, which the messages are not: their fences differ every time."""
        try:
            if self.cache is None:
                return read((await self._request(messages(), number)).text)
            return await self._through_cache(name, messages, number, read)
        except JudgeFailure as failure:
            self.usage.failures[failure.kind] += 1
            raise

    async def _through_cache(
        self, name: Sequence[str], messages: Messages, number: int, read: Callable[[str], T]
    ) -> T:
        async def run() -> ToolResult:
            reply = await self._request(messages(), number)
            read(reply.text)  # what it refuses is not kept
            kept = {"text": reply.text, "tokens": [reply.input_tokens, reply.output_tokens]}
            return ToolResult(json.dumps(kept))

        key = digest("judge", self.model.identity, f"{number}", *name)
        if isinstance(self.cache, str | Path) and self._opened is None:
            self._opened = open_cache(self.cache)
        assert self._opened is not None
        result = await self._opened.through(key, run, time.monotonic() + FLIGHT_SECONDS)
        kept = json.loads(result.content)
        reply = Reply(kept["text"], *kept["tokens"])
        if result.cached:
            self.usage.cached += 1
            self.usage.cached_tokens += reply.input_tokens + reply.output_tokens
            self.usage.cached_cost += self.budget.cost(reply)
        return read(reply.text)

    async def _request(self, messages: Sequence[Message], number: int) -> Reply:
        attempt = 0
        while True:
            try:
                return await self._attempt(messages, number)
            except ModelError as error:
                if not error.temporary:
                    raise JudgeFailure(str(error), "error") from error
                if attempt >= self.retries:
                    tried = f" ({attempt + 1} attempts)" if attempt else ""
                    raise JudgeFailure(f"{error}{tried}", "unavailable") from error
                wait = min(error.wait or 0.0, LONGEST_WAIT)
            pause = max(min(self.pause * 2**attempt, LONGEST_PAUSE) * _chance.uniform(0.5, 1), wait)
            attempt += 1
            self.usage.retries += 1
            await asyncio.sleep(pause)

    async def _attempt(self, messages: Sequence[Message], number: int) -> Reply:
        async with self._limits.place():
            self._check_budget()
            self.usage.requests += 1
            reply = await self.model.ask(messages, number)
        usage = self.usage
        usage.input_tokens += reply.input_tokens
        usage.output_tokens += reply.output_tokens
        usage.estimated += reply.estimated
        usage.cost += self.budget.cost(reply)
        if reply.fault is not None:
            raise JudgeFailure(FAULTS[reply.fault], reply.fault)
        return reply

    def _check_budget(self) -> None:
        used = {
            "max_cost": sum(each.cost for each in self.spent),
            "max_tokens": sum(each.input_tokens + each.output_tokens for each in self.spent),
            "max_requests": sum(each.requests for each in self.spent),
        }
        for name, spent in used.items():
            limit = getattr(self.budget, name)
            if limit is not None and spent >= limit:
                raise JudgeFailure(
                    f"the judge's budget is spent: budget.{name} is {limit:g}, used are {spent:g} since this process "
                    "started; raise it, or go on in another process, which has as much again",
                    "budget",
                )

    async def close(self) -> None:
        """Close the connections, and the cache unless it was handed in. A later request opens both again."""
        await self.model.close()
        if isinstance(self.cache, str | Path) and self._opened is not None:
            opened, self._opened = self._opened, None
            await in_thread(opened.close)


def open_cache(target: str | Path) -> ToolCache:
    if not IN_REDIS.match(str(target)):
        target = Path(target).expanduser()
    return ToolCache(target)
