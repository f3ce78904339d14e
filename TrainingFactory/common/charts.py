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
CURVE_COLOURS = ("#3d85c6", "#c27a22", "#2e9c57", "#a65fc0")  # contrast of 3:1 or more on white and on black
MAX_TITLE_CHARS = 26  # characters beside the value axis
MAX_POINTS = 320  # maximum points of a curve; longer ones are averaged down

Points = Sequence[tuple[float, float]]  # step, value


@dataclass(slots=True, frozen=True)
class Curve:
    """A curve; `low` and `high` are the bounds of a band around it. `has_dots`: draw points instead of a line."""

    name: str
    points: Points
    low: Points = ()
    high: Points = ()
    has_dots: bool = False

    def thin_out(self) -> Curve:
        return Curve(self.name, thin_out(self.points), thin_out(self.low), thin_out(self.high), self.has_dots)


class Chart:
    """Curves on common axes. The value axis spans the data, unless `bottom` or `top` fix its ends."""

    left, right = LEFT, WIDTH - RIGHT

    def __init__(
        self, title: str, curves: Sequence[Curve], bottom: float | None = None, top: float | None = None
    ) -> None:
        self.title, self.curves = title, [curve.thin_out() for curve in curves if curve.points]
        points = [p for curve in self.curves for band in (curve.points, curve.low, curve.high) for p in band]
        steps, values = zip(*points, strict=True) if points else ([1.0], [1.0])
        self.bottom = min(values) if bottom is None else bottom
        self.top = max(values) if top is None else top
        if self.top <= self.bottom:
            self.top = self.bottom + 1.0
        self.first_step, self.last_step = min(steps), max(steps)

    @property
    def grid_lines(self) -> list[tuple[float, str]]:
        """Return the y position and the label of each horizontal grid line."""
        values = (self.bottom, (self.bottom + self.top) / 2, self.top)
        return [(self._value_to_y(value), f"{value:.3g}") for value in values]

    def to_pixels(self, points: Points) -> list[tuple[float, float]]:
        return [(self._step_to_x(step), self._value_to_y(value)) for step, value in points]

    def format_points(self, points: Points) -> str:
        return " ".join(f"{x},{y}" for x, y in self.to_pixels(points))

    def band(self, curve: Curve) -> str:
        return self.format_points([*curve.low, *reversed(curve.high)])

    def draw(self) -> Markup:
        """Return the chart as an SVG element: grid, axis labels, then one group for each curve."""
        size_attributes = f'viewBox="0 0 {WIDTH} {HEIGHT}" style="width:100%;max-width:{WIDTH}px;height:auto"'
        curve_groups = "".join(self._draw_curve(curve, index) for index, curve in enumerate(self.curves))
        opening_tag = (
            f'<svg {size_attributes} role="img" aria-label="{escape(escape_control(self.title))} by step">'
        )
        return Markup(f"{opening_tag}{self._draw_axes()}{curve_groups}</svg>")

    def _draw_axes(self) -> str:
        svg_elements = []
        for y, label in self.grid_lines:
            svg_elements.append(
                f'<line x1="{self.left}" x2="{self.right}" y1="{y}" y2="{y}" stroke="#888" stroke-opacity=".5"/>'
                f'<text x="{self.left - 8}" y="{y + 5}" text-anchor="end">{label}</text>'
            )
        bottom_y, middle_y = HEIGHT - 22, (HEIGHT - BOTTOM + TOP) / 2
        svg_elements.append(f'<text x="{self.left}" y="{bottom_y}">{self.first_step:.0f}</text>')
        svg_elements.append(
            f'<text x="{self.right}" y="{bottom_y}" text-anchor="end">{self.last_step:.0f}</text>'
        )
        centre_x = (self.left + self.right) / 2
        svg_elements.append(f'<text x="{centre_x}" y="{bottom_y}" text-anchor="middle">step</text>')
        svg_elements.append(
            f'<text transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">'
            f"{escape(shorten_title(escape_control(self.title)))}</text>"
        )
        return f'<g fill="currentColor" font-size="17" font-family="sans-serif">{"".join(svg_elements)}</g>'

    def _draw_curve(self, curve: Curve, curve_index: int) -> str:
        colour_index = curve_index % len(CURVE_COLOURS)
        colour = f"var(--line{colour_index},{CURVE_COLOURS[colour_index]})"
        band = f'<polygon style="fill:{colour};opacity:.2" points="{self.band(curve)}"/>' if curve.low else ""
        if curve.has_dots or len(curve.points) == 1:  # a line of one point would be invisible
            dots = "".join(f'<circle cx="{x}" cy="{y}" r="2.5"/>' for x, y in self.to_pixels(curve.points))
            return f'<g style="fill:{colour};opacity:.8">{band}{dots}</g>'
        style = f"fill:none;stroke:{colour};stroke-width:2.5;stroke-linejoin:round"
        return f'<g>{band}<polyline style="{style}" points="{self.format_points(curve.points)}"/></g>'

    def _step_to_x(self, step: float) -> float:
        fraction = (step - self.first_step) / max(1, self.last_step - self.first_step)
        return round(self.left + fraction * (self.right - self.left), 1)

    def _value_to_y(self, value: float) -> float:
        fraction = (value - self.bottom) / (self.top - self.bottom)
        return round(HEIGHT - BOTTOM - fraction * (HEIGHT - BOTTOM - TOP), 1)


def shorten_title(title: str) -> str:
    """Return a title that fits beside the value axis."""
    return title if len(title) <= MAX_TITLE_CHARS else title[: MAX_TITLE_CHARS - 1] + "…"


def thin_out(points: Points) -> Points:
    """Return the finite points. If there are more than `MAX_POINTS`, average neighbouring points."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= MAX_POINTS:
        return points
    bounds = [len(points) * chunk // MAX_POINTS for chunk in range(MAX_POINTS + 1)]
    chunks = [points[start:stop] for start, stop in pairwise(bounds)]
    return [tuple(sum(column) / len(chunk) for column in zip(*chunk, strict=True)) for chunk in chunks]  # type: ignore[misc]


def compute_running_mean(values: Sequence[float], window: int = 5) -> list[float]:
    """Return the mean of the last `window` values at each position."""
    windows = [values[max(0, stop - window) : stop] for stop in range(1, len(values) + 1)]
    return [sum(window_values) / len(window_values) for window_values in windows]


def make_mean_chart(
    title: str, points: Points, bottom: float | None = None, top: float | None = None
) -> Chart:
    """Return a chart of points with a line of their running mean."""
    averages = compute_running_mean([value for _, value in points])
    mean_curve = Curve("mean of 5", [(step, mean) for (step, _), mean in zip(points, averages, strict=True)])
    return Chart(title, [Curve("value", points, has_dots=True), mean_curve], bottom, top)
