"""Findings: problems of a run with a name, a description and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from TrainingFactory.types import Trajectory

Severity = Literal["error", "warning", "note"]


@dataclass(slots=True, frozen=True)
class Finding:
    """One problem of a run. docs/DOCTOR.md lists all names."""

    name: str
    sentence: str
    remedy: str
    severity: Severity = "warning"

    @property
    def text(self) -> str:
        return f"{self.name}: {self.sentence}. {self.remedy}"


@dataclass(slots=True, frozen=True)
class FindingChange:
    """A finding that appeared at a step, or, if `finding` is None, that disappeared."""

    step: int
    name: str
    finding: Finding | None = None

    @property
    def row(self) -> dict[str, Any]:
        """Return the line for findings.jsonl."""
        fields = asdict(self.finding) if self.finding is not None else {"name": self.name, "gone": True}
        return {"step": self.step} | fields


class RunDoctor(Protocol):
    """Detector of problems in the metrics of each step; implemented in `runs/finding_rules.py`."""

    def observe(
        self, step: int, metrics: dict[str, float], episodes: Sequence[Trajectory]
    ) -> list[FindingChange]: ...
