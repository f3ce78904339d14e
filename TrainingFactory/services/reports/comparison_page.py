"""Models on the same tasks, as one HTML page: the figures, and every task that flipped with both episodes."""

from __future__ import annotations

from collections.abc import Sequence

from TrainingFactory.services.evaluation.comparison import Comparison, Side
from TrainingFactory.services.evaluation.promotion import Decision
from TrainingFactory.services.reports.pages import render
from TrainingFactory.services.reports.texts import conversation, reward_text
from TrainingFactory.types import Trajectory

MOST = 50  # flipped tasks of each direction on a page


def comparison_page(
    sides: Sequence[Side], found: Sequence[Comparison], decision: Decision | None = None
) -> str:
    """Return a page that needs nothing beside it, with what was decided by it, if anything."""
    parts = []
    for each in found:
        for word, flips in (("better", each.better), ("worse", each.worse)):
            shown = [
                (flip, [_shown(episode) for episode in pair]) for flip, pair in each.episodes(flips[:MOST])
            ]
            parts.append((each, word, len(flips), shown))
    return render("compare.html.jinja", sides=sides, found=found, parts=parts, decision=decision)


def _shown(episode: Trajectory | None) -> tuple[list[tuple[str, str]], str]:
    if episode is None:
        return [], "its episodes were not kept"
    return conversation(episode), f"{episode.status}, {reward_text(episode.reward)}"
