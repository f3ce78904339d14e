"""Models on the same tasks, as one HTML page: the figures, and every task that flipped with both episodes."""

from __future__ import annotations

from collections.abc import Sequence

from TrainingFactory.apps.reports.pages import render
from TrainingFactory.evaluation.comparison import Comparison, Side
from TrainingFactory.promotion.promotion import Decision
from TrainingFactory.runs.episode_texts import conversation, ending

MOST = 50  # flipped tasks of each direction on a page


def comparison_page(
    sides: Sequence[Side], found: Sequence[Comparison], decision: Decision | None = None
) -> str:
    """Return a page that needs nothing beside it, with what was decided by it, if anything."""
    parts = [
        (each, word, len(flips), each.episodes(flips[:MOST]))
        for each in found
        for word, flips in (("better", each.better), ("worse", each.worse))
    ]
    known = {"sides": sides, "found": found, "parts": parts, "decision": decision}
    return render("compare.html.jinja", **known, conversation=conversation, ending=ending)
