"""Held-out scores of a run by step: the best checkpoint and early stopping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# metric -> 1 if higher is better, -1 if lower is better; a run is scored by the first of these that it reports
METRIC_SIGNS = {"eval/success": 1, "eval/accuracy": 1, "eval/loss": -1}


@dataclass(slots=True)
class Scores:
    """Evaluation scores from metrics.jsonl alone, so that a resumed run makes the same decisions."""

    stop_when: Mapping[Any, float] = field(default_factory=dict)
    metric: str | None = None
    points: list[tuple[int, float]] = field(default_factory=list)  # (step, value)

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], stop_when: Mapping[Any, float] | None = None
    ) -> Scores:
        scores = cls(stop_when or {})
        for row in rows:
            scores.add_row(row)
        return scores

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of a step; ignore steps without an evaluation."""
        if self.metric is None:
            self.metric = next((name for name in METRIC_SIGNS if name in row), None)
        if self.metric is not None and self.metric in row:
            self.points.append((row["step"], row[self.metric]))

    @property
    def best(self) -> tuple[int, float] | None:
        """Return (step, value) of the best evaluation; of equally good ones, the first."""
        sign = METRIC_SIGNS.get(self.metric or "", 1)
        return max(self.points, key=lambda point: sign * point[1], default=None)

    def find_stop_reason(self) -> str | None:
        """Return the reason to stop the run now, or None to continue."""
        if self.best is None or not self.stop_when:
            return None
        step, value = self.best
        if (target_score := self.stop_when.get("target")) is not None:
            if METRIC_SIGNS[self.metric or ""] < 0:
                raise ValueError(
                    "training.stop_when.target is a success rate or an accuracy, but this run reports only "
                    f"{self.metric}. Use training.stop_when.patience instead"
                )
            if value >= target_score:
                return f"{self.metric} reached {value:.3f} at step {step} (training.stop_when.target={target_score:g})"
        num_since_best = len(self.points) - 1 - self.points.index((step, value))
        if (patience := self.stop_when.get("patience")) is not None and num_since_best >= patience:
            return (
                f"{self.metric} has not improved on {value:.3f} (step {step}) for {num_since_best} evaluations "
                f"(training.stop_when.patience={patience:g})"
            )
        return None
