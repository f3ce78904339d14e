"""What is wrong with a run, in words: a name, a sentence and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """Looks at the steps of a run: `services/doctor/table.py`."""

    def look(self, step: int, metrics: dict[str, float], episodes: Sequence[Trajectory]) -> list[Change]: ...


@dataclass(slots=True, frozen=True)
class Seen:
    """Holds a finding of a run with its steps, from the first to the one at which it was gone, if it is."""

    finding: Finding
    since: int
    until: int | None = None

    @property
    def steps(self) -> str:
        return f"since step {self.since}" if self.until is None else f"steps {self.since} to {self.until - 1}"


def seen(rows: Iterable[dict[str, Any]]) -> list[Seen]:
    """Return the findings that the lines of a run's file tell of, in their order."""
    found: list[Seen] = []
    for row in rows:
        if row.get("gone"):
            found = [
                Seen(each.finding, each.since, row["step"])
                if each.finding.name == row["name"] and each.until is None
                else each
                for each in found
            ]
        else:
            given = {key: row[key] for key in ("name", "sentence", "remedy", "severity")}
            found.append(Seen(Finding(**given), row["step"]))
    return found
