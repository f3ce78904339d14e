"""What is wrong with a run, in words: a name, a sentence and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from TrainingFactory.types import Trajectory

Severity = Literal["error", "warning", "note"]


@dataclass(slots=True, frozen=True)
class Finding:
    """Holds one thing that is wrong; docs/DOCTOR.md lists all of them by name."""

    name: str
    sentence: str
    remedy: str
    severity: Severity = "warning"

    @property
    def text(self) -> str:
        return f"{self.name}: {self.sentence}. {self.remedy}"


@dataclass(slots=True, frozen=True)
class Change:
    """Says at which step of a run a finding was first seen; or, where it has none, that the name is gone."""

    step: int
    name: str
    finding: Finding | None = None

    @property
    def row(self) -> dict[str, Any]:
        """Return the line of the run's file."""
        given = asdict(self.finding) if self.finding is not None else {"name": self.name, "gone": True}
        return {"step": self.step} | given


class RunDoctor(Protocol):
    """Looks at the steps of a run: `runs/finding_rules.py`."""

    def look(self, step: int, metrics: dict[str, float], episodes: Sequence[Trajectory]) -> list[Change]: ...
