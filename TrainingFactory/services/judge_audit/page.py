"""The audit of a judge as a table and as one HTML page that needs nothing beside it."""

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


def audit_rows(found: Audit) -> list[tuple[str, str, str]]:
    """Return each metric that there is: its name, its value, what it means."""
    low, high = _shown(found.accuracy_low, "%"), _shown(found.accuracy_high, "%")
    between = f", 95 % between {low} and {high}" if found.accuracy is not None else ""
    kappa_low = f"; {found.kappa_low:.2f} at the lower end" if found.kappa_low is not None else ""
    rows = [
        ("accuracy", _shown(found.accuracy, "%"), f"same yes or no as the gold labels{between}"),
        ("kappa", _shown(found.kappa), f"agreement beyond chance; over 0.6 is good{kappa_low}"),
        ("Pearson", _shown(found.pearson), "correlation with the gold scores"),
        ("Spearman", _shown(found.spearman), "the same for their order"),
        (
            "length bias",
            _shown(found.length_bias, "+"),
            "correlation with the length among equally good answers; 0 is fair",
        ),
        ("consistency", _shown(found.consistency, "%"), f"same yes or no in {found.repeats} repeats"),
        ("spread", _shown(found.spread), "standard deviation over repeats, from 0 to 1"),
        ("pairs right", _shown(found.pair_accuracy, "%"), f"of {found.pairs} pairs, over both orders"),
        ("flips by swapping", _shown(found.swap_flips, "%"), "pairs with another winner in the other order"),
        ("first one wins", _shown(found.first_share, "%"), "whichever stands first; 50% is fair"),
        (
            "injections that worked",
            _shown(found.injection_moved, "%"),
            f"of {found.attacked} items whose verdict had room to rise",
        ),
        ("rises by chance", _shown(found.noise_moved, "%"), "the same without a text, merely asked again"),
        ("shift by injections", _shown(found.injection_shift, "+"), "mean change of the value"),
        ("cost per thousand", _shown(found.cost_per_thousand), "judgements, in the currency of the prices"),
        ("tokens a judgement", _shown(found.tokens_per_judgement, "0"), "read and written"),
    ]
    return [row for row in rows if row[1]]


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
        rows=audit_rows(found),
        passes=f"{PASSES:g}",
        agreement=Plot("gold", "judge", 1.0, 0.0, 1.0, 1.0, agreed.items()),
        errors=Plot("characters", "judge minus gold", longest, -1.0, 1.0, 0.0, errors.items()),
    )


def _shown(value: float | None, form: str = "") -> str:
    if value is None:
        return ""
    return {"%": f"{value:.0%}", "+": f"{value:+.2f}", "0": f"{value:.0f}"}.get(form, f"{value:.3g}")
