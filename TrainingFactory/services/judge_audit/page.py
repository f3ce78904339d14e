"""The audit of a judge as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt

from TrainingFactory.services.judge_audit.report import PASSES, Audit, verdict_of
from TrainingFactory.services.reports.pages import page
from TrainingFactory.services.reports.pages import text as _t

SIZE, EDGE = 340, 56  # pixels; the edge is around the places of points
MARGIN = 14  # between the frame and the places of points
SMALLEST, LARGEST = 4.0, 13.0  # radius of a dot


def audit_rows(found: Audit) -> list[tuple[str, str, str]]:
    """Name, figure, what it means."""
    low, high = _figure(found.accuracy_low, "%"), _figure(found.accuracy_high, "%")
    between = f", 95 % between {low} and {high}" if found.accuracy is not None else ""
    kappa_low = f"; {found.kappa_low:.2f} at the lower end" if found.kappa_low is not None else ""
    rows = [
        ("accuracy", _figure(found.accuracy, "%"), f"same yes or no as the gold labels{between}"),
        ("kappa", _figure(found.kappa), f"agreement beyond chance; over 0.6 is good{kappa_low}"),
        ("Pearson", _figure(found.pearson), "correlation with the gold scores"),
        ("Spearman", _figure(found.spearman), "the same for their order"),
        (
            "length bias",
            _figure(found.length_bias, "+"),
            "correlation with the length among equally good answers; 0 is fair",
        ),
        ("consistency", _figure(found.consistency, "%"), f"same yes or no in {found.repeats} repeats"),
        ("spread", _figure(found.spread), "standard deviation over repeats, from 0 to 1"),
        ("pairs right", _figure(found.pair_accuracy, "%"), f"of {found.pairs} pairs, over both orders"),
        ("flips by swapping", _figure(found.swap_flips, "%"), "pairs with another winner in the other order"),
        ("first one wins", _figure(found.first_share, "%"), "whichever stands first; 50% is fair"),
        (
            "injections that worked",
            _figure(found.injection_moved, "%"),
            f"of {found.attacked} items whose verdict had room to rise",
        ),
        ("rises by chance", _figure(found.noise_moved, "%"), "the same without a text, merely asked again"),
        ("shift by injections", _figure(found.injection_shift, "+"), "mean change of the value"),
        ("cost per thousand", _figure(found.cost_per_thousand), "judgements, in the currency of the prices"),
        ("tokens a judgement", _figure(found.tokens_per_judgement, "0"), "read and written"),
    ]
    return [row for row in rows if row[1]]


def audit_page(found: Audit, judge: str) -> str:
    rows = "".join(
        f"<tr><th>{_t(name)}</th><td>{_t(figure)}</td><td class='small'>{_t(meaning)}</td></tr>"
        for name, figure, meaning in audit_rows(found)
    )
    errors = [(length, given - right) for right, given, length in found.points]
    body = f"""
<h1>Audit of a judge</h1>
<p><b>{_t(judge)}</b>, {found.items} gold items, {found.judgements} judgements.</p>
<p>{_t(verdict_of(found))}</p>
<table>{rows}</table>
<div class="sides">
<div><h3>Judge and gold</h3>{scatter([(right, given) for right, given, _ in found.points], "gold", "judge", (0, 1))}
<p class="small">On the line they agree; a larger dot is more items. From {PASSES:g} on a value counts as yes.</p></div>
<div><h3>Error by length</h3>{scatter(errors, "characters", "judge minus gold", (-1, 1))}
<p class="small">A slope among items of equal gold means that length is paid for.</p></div>
</div>"""
    return page("Audit of a judge", body)


def scatter(points: Sequence[tuple[float, float]], across: str, up: str, span: tuple[float, float]) -> str:
    """`span` is that of the vertical axis; the horizontal one is the same, or as wide as the points need. Points in the
    same place are one dot, the larger the more they are."""
    low, high = span
    right = 1.0 if span == (0, 1) else max((x for x, _ in points), default=1.0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        inner = SIZE - 2 * EDGE
        return EDGE + x / right * inner, SIZE - EDGE - (y - low) / (high - low) * inner

    dots = ""
    for (x, y), count in Counter(points).items():
        at = 'cx="{:.1f}" cy="{:.1f}"'.format(*place(x, y))
        dots += f'<circle {at} r="{min(LARGEST, SMALLEST * sqrt(count)):.1f}">'
        dots += f"<title>{_t(across)} {x:g}, {_t(up)} {y:g}: {count}</title></circle>"
    start, end = (place(0, 0), place(1, 1)) if span == (0, 1) else (place(0, 0), place(right, 0))
    box, size = EDGE - MARGIN, SIZE - 2 * (EDGE - MARGIN)
    frame = f'<rect x="{box}" y="{box}" width="{size}" height="{size}"/>'
    frame += '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'.format(*start, *end)
    labels = ""
    for value in (low, (low + high) / 2, high):
        y = place(0, value)[1]
        labels += f'<text x="{box - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for value in (0.0, right):
        x = place(value, low)[0]
        labels += f'<text x="{x:.1f}" y="{box + size + 16}" text-anchor="middle">{value:g}</text>'
    labels += f'<text x="{SIZE / 2}" y="{SIZE - 4}" text-anchor="middle">{_t(across)}</text>'
    labels += f'<text x="{box}" y="{box - 8}">{_t(up)}</text>'
    opened = f'<svg viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="{_t(up)} by {_t(across)}">'
    return f"{opened}{frame}{labels}{dots}</svg>"


def _figure(value: float | None, form: str = "") -> str:
    if value is None:
        return ""
    return {"%": f"{value:.0%}", "+": f"{value:+.2f}", "0": f"{value:.0f}"}.get(form, f"{value:.3g}")
