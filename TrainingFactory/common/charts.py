"""Charts as inline SVG, for HTML pages and notebooks. Text takes the colour of the page around it, so that charts are
readable in light and dark mode; a page may set the colours of the curves as --line0 to --line3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from TrainingFactory.common.texts import escape_control

WIDTH, HEIGHT = 640, 240
TOP, RIGHT, BOTTOM, LEFT = 14, 12, 44, 68  # margins in pixels; the last two hold the axis labels
COLOURS = ("#3d85c6", "#c27a22", "#2e9c57", "#a65fc0")  # contrast of 3:1 or more on white and on black
MAX_TITLE = 26  # characters beside the value axis
MAX_POINTS = 320  # maximum points of a curve; longer ones are averaged down

Points = Sequence[tuple[float, float]]  # step, value


@dataclass(slots=True, frozen=True)
class Curve:
    """A curve; `low` and `high` are the bounds of a band around it. `dots`: draw points instead of a line."""

    name: str
    points: Points
    low: Points = ()
    high: Points = ()
    dots: bool = False

    def thinned(self) -> Curve:
        return Curve(self.name, thinned(self.points), thinned(self.low), thinned(self.high), self.dots)


class Chart:
    """Curves on common axes. The value axis spans the data, unless `bottom` or `top` fix its ends."""

    left, right = LEFT, WIDTH - RIGHT

    def __init__(
        self, title: str, lines: Sequence[Curve], bottom: float | None = None, top: float | None = None
    ) -> None:
        self.title, self.lines = title, [line.thinned() for line in lines if line.points]
        points = [p for line in self.lines for series in (line.points, line.low, line.high) for p in series]
        steps, values = zip(*points, strict=True) if points else ([1.0], [1.0])
        self.bottom = min(values) if bottom is None else bottom
        self.top = max(values) if top is None else top
        if self.top <= self.bottom:
            self.top = self.bottom + 1.0
        self.first, self.last = min(steps), max(steps)

    @property
    def marks(self) -> list[tuple[float, str]]:
        """Return the y position and the label of each horizontal grid line."""
        values = (self.bottom, (self.bottom + self.top) / 2, self.top)
        return [(self._y(value), f"{value:.3g}") for value in values]

    def places(self, points: Points) -> list[tuple[float, float]]:
        return [(self._x(step), self._y(value)) for step, value in points]

    def path(self, points: Points) -> str:
        return " ".join(f"{x},{y}" for x, y in self.places(points))

    def band(self, line: Curve) -> str:
        return self.path([*line.low, *reversed(line.high)])

    def svg(self) -> Markup:
        """Return the chart as an SVG element: grid, axis labels, then one group for each curve."""
        size = f'viewBox="0 0 {WIDTH} {HEIGHT}" style="width:100%;max-width:{WIDTH}px;height:auto"'
        curves = "".join(self._curve(line, number) for number, line in enumerate(self.lines))
        opening = f'<svg {size} role="img" aria-label="{escape(escape_control(self.title))} by step">'
        return Markup(f"{opening}{self._axes()}{curves}</svg>")

    def _axes(self) -> str:
        parts = []
        for y, label in self.marks:
            parts.append(
                f'<line x1="{self.left}" x2="{self.right}" y1="{y}" y2="{y}" stroke="#888" stroke-opacity=".5"/>'
                f'<text x="{self.left - 8}" y="{y + 5}" text-anchor="end">{label}</text>'
            )
        bottom, middle = HEIGHT - 22, (HEIGHT - BOTTOM + TOP) / 2
        parts.append(f'<text x="{self.left}" y="{bottom}">{self.first:.0f}</text>')
        parts.append(f'<text x="{self.right}" y="{bottom}" text-anchor="end">{self.last:.0f}</text>')
        centre = (self.left + self.right) / 2
        parts.append(f'<text x="{centre}" y="{bottom}" text-anchor="middle">step</text>')
        parts.append(
            f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
            f"{escape(shortened(escape_control(self.title)))}</text>"
        )
        return f'<g fill="currentColor" font-size="17" font-family="sans-serif">{"".join(parts)}</g>'

    def _curve(self, line: Curve, number: int) -> str:
        index = number % len(COLOURS)
        colour = f"var(--line{index},{COLOURS[index]})"
        band = f'<polygon style="fill:{colour};opacity:.2" points="{self.band(line)}"/>' if line.low else ""
        if line.dots or len(line.points) == 1:  # a line of one point would be invisible
            dots = "".join(f'<circle cx="{x}" cy="{y}" r="2.5"/>' for x, y in self.places(line.points))
            return f'<g style="fill:{colour};opacity:.8">{band}{dots}</g>'
        style = f"fill:none;stroke:{colour};stroke-width:2.5;stroke-linejoin:round"
        return f'<g>{band}<polyline style="{style}" points="{self.path(line.points)}"/></g>'

    def _x(self, step: float) -> float:
        share = (step - self.first) / max(1, self.last - self.first)
        return round(self.left + share * (self.right - self.left), 1)

    def _y(self, value: float) -> float:
        share = (value - self.bottom) / (self.top - self.bottom)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)


def shortened(title: str) -> str:
    """Return a title that fits beside the value axis."""
    return title if len(title) <= MAX_TITLE else title[: MAX_TITLE - 1] + "…"


def thinned(points: Points) -> Points:
    """Return the finite points. If there are more than `MAX_POINTS`, average neighbouring points."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= MAX_POINTS:
        return points
    starts = [len(points) * chunk // MAX_POINTS for chunk in range(MAX_POINTS + 1)]
    parts = [points[start:stop] for start, stop in pairwise(starts)]
    return [tuple(sum(column) / len(chunk) for column in zip(*chunk, strict=True)) for chunk in parts]  # type: ignore[misc]


def running_mean(values: Sequence[float], window: int = 5) -> list[float]:
    """Return the mean of the last `window` values at each position."""
    parts = [values[max(0, stop - window) : stop] for stop in range(1, len(values) + 1)]
    return [sum(chunk) / len(chunk) for chunk in parts]


def chart_with_mean(
    title: str, points: Points, bottom: float | None = None, top: float | None = None
) -> Chart:
    """Return a chart of points with a line of their running mean."""
    averages = running_mean([value for _, value in points])
    line = Curve("mean of 5", [(step, mean) for (step, _), mean in zip(points, averages, strict=True)])
    return Chart(title, [Curve("value", points, dots=True), line], bottom, top)
