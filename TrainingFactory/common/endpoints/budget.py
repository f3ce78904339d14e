"""Spending at model endpoints: prices, limits, counts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path

from pydantic.dataclasses import dataclass

from TrainingFactory.common.endpoints.messages import ModelReply
from TrainingFactory.common.options import STRICT, NotNegative

COUNT_FIELDS = ("requests", "retries", "cached", "input_tokens", "output_tokens", "estimated", "cost")


@dataclass(config=STRICT, frozen=True)
class Budget:
    """Limits of a client's spending in one process. Prices are per million tokens."""

    max_cost: NotNegative | None = None
    max_tokens: NotNegative | None = None
    max_requests: NotNegative | None = None
    input_price: NotNegative = 0.0
    output_price: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.max_cost is not None and not self.has_prices:
            raise ValueError("max_cost is set without prices; set input_price and output_price")

    @property
    def has_prices(self) -> bool:
        return self.input_price + self.output_price > 0

    def cost_of(self, input_tokens: float, output_tokens: float) -> float:
        return (input_tokens * self.input_price + output_tokens * self.output_price) / 1e6

    def price_reply(self, reply: ModelReply) -> float:
        return self.cost_of(reply.input_tokens, reply.output_tokens)


@plain_dataclass(slots=True)
class Usage:
    """Counts of requests, retries, failures, tokens and cost so far."""

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

    def metrics(self, prefix: str) -> dict[str, float]:
        counts = {f"{prefix}/{name}": float(getattr(self, name)) for name in COUNT_FIELDS}
        return counts | {f"{prefix}/failed_{kind}": float(count) for kind, count in self.failures.items()}


class SpendingLog:
    """File with a JSON line for each paid reply, so that a budget holds across processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, reply: ModelReply) -> None:
        row = {
            "input_tokens": reply.input_tokens,
            "output_tokens": reply.output_tokens,
            "estimated": reply.estimated,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sum_usage(self, budget: Budget) -> Usage:
        """Return the total usage of all processes, with its cost at the prices of `budget`."""
        usage = Usage()
        lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.is_file() else []
        for line in lines[:-1]:  # a killed process may leave an incomplete last line
            row = json.loads(line)
            usage.requests += 1
            usage.input_tokens += row["input_tokens"]
            usage.output_tokens += row["output_tokens"]
            usage.estimated += row["estimated"]
        usage.cost = budget.cost_of(usage.input_tokens, usage.output_tokens)
        return usage
