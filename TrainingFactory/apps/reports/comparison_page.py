"""The HTML page of a comparison: metrics of the models on the same tasks, and both episodes of every flipped task."""

from __future__ import annotations

from collections.abc import Sequence

from TrainingFactory.apps.reports.pages import render
from TrainingFactory.evaluation.comparison import ComparedModel, Comparison
from TrainingFactory.promotion.promotion import Decision
from TrainingFactory.runs.episode_texts import format_ending, list_lines_with_images

MAX_FLIPPED_TASKS = 50  # maximum flipped tasks per direction on a page


def make_comparison_page(
    models: Sequence[ComparedModel], comparisons: Sequence[Comparison], decision: Decision | None = None
) -> str:
    """Return a self-contained HTML page; `decision` is the promotion decided by the comparison, if any."""
    flip_groups = [
        (comparison, direction, len(flips), comparison.load_episodes(flips[:MAX_FLIPPED_TASKS]))
        for comparison in comparisons
        for direction, flips in (("better", comparison.wins), ("worse", comparison.losses))
    ]
    context = {"sides": models, "found": comparisons, "parts": flip_groups, "decision": decision}
    return render("compare.html.jinja", **context, conversation=list_lines_with_images, ending=format_ending)
