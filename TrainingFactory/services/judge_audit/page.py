"""The audit of a judge as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView
from dataclasses import dataclass

from TrainingFactory.services.judge_audit.report import PASSES, Audit, verdict_of
from TrainingFactory.services.reports.pages import render


@dataclass(slots=True, frozen=True)
class Plot:
    """Describes a picture of points. The horizontal axis goes from 0 to `right`; a line goes through the picture from
    (0, 0) to (`right`, `line_end`). `dots`: places, with how many points are there."""

    across: str
    up: str
    right: float
    bottom: float
    top: float
    line_end: float
    dots: ItemsView[tuple[float, float], int]


def audit_page(found: Audit, judge: str) -> str:
    agreed = Counter((right, given) for right, given, _ in found.points)
    errors = Counter((float(length), given - right) for right, given, length in found.points)
    longest = max((length for length, _ in errors), default=0.0) or 1.0
    return render(
        "judge_audit.html.jinja",
        title="Audit of a judge",
        judge=judge,
        found=found,
        verdict=verdict_of(found),
        passes=f"{PASSES:g}",
        agreement=Plot("gold", "judge", 1.0, 0.0, 1.0, 1.0, agreed.items()),
        errors=Plot("characters", "judge minus gold", longest, -1.0, 1.0, 0.0, errors.items()),
    )
