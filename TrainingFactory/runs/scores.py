"""How a run's models did on held-out tasks or rows, step by step: which was the best, and whether to go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# What a run is measured by, the first of these that it has -> its sign: higher is better, or lower
MEASURES = {"eval/success": 1, "eval/accuracy": 1, "eval/loss": -1}


@dataclass(slots=True)
class Scores:
    """A function of the rows of metrics.jsonl alone, so that a resumed run decides as one that was never stopped."""

    stop_when: Mapping[Any, float] = field(default_factory=dict)
    measure: str | None = None
    found: list[tuple[int, float]] = field(default_factory=list)  # step, value

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], stop_when: Mapping[Any, float] | None = None) -> Scores:
        scores = cls(stop_when or {})
        for row in rows:
            scores.add(row)
        return scores

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the metrics of a step, if it was evaluated and something could be measured."""
        if self.measure is None:
            self.measure = next((name for name in MEASURES if name in row), None)
        if self.measure is not None and self.measure in row:
            self.found.append((row["step"], row[self.measure]))

    @property
    def best(self) -> tuple[int, float] | None:
        """Return the step and value of the best; of equal ones the first."""
        sign = MEASURES.get(self.measure or "", 1)
        return max(self.found, key=lambda each: sign * each[1], default=None)

    def verdict(self) -> str | None:
        """Return why the run should stop here, if it should."""
        if self.best is None or not self.stop_when:
            return None
        step, value = self.best
        if (target := self.stop_when.get("target")) is not None:
            if MEASURES[self.measure or ""] < 0:
                raise ValueError(
                    "training.stop_when.target is a share of held-out tasks done, or of rows that are right, and this "
                    f"run measures {self.measure}; take training.stop_when.patience"
                )
            if value >= target:
                return f"{self.measure} has reached {value:.3f} at step {step}; training.stop_when.target is {target:g}"
        waited = len(self.found) - 1 - self.found.index((step, value))
        if (patience := self.stop_when.get("patience")) is not None and waited >= patience:
            return (
                f"{self.measure} has not been better than {value:.3f} of step {step} for {waited} evaluations; "
                f"training.stop_when.patience is {patience:g}"
            )
        return None
