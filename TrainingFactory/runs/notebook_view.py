"""Runs and episodes in notebooks: HTML fragments with tables and charts, and a watcher that draws them while a run
trains. Nothing here is wider than its cell, and text takes the notebook's colours, light or dark."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from TrainingFactory.common.charts import CURVE_COLOURS, Chart, Curve
from TrainingFactory.common.texts import escape_control
from TrainingFactory.runs.embedded_images import EmbeddedImages
from TrainingFactory.runs.episode_texts import format_ending, list_lines_with_images
from TrainingFactory.runs.tracking import PlainLines, Watcher, format_metrics_line
from TrainingFactory.types import Trajectory

Rows = Sequence[Mapping[str, float]]
REDRAW_SECONDS = 1.0  # minimum time between two drawings of a live view
MAX_EPISODES = 8  # episodes in one table


class ChartMetrics(NamedTuple):
    """A chart of a run: its title, its metrics with their labels, and the ends of its value axis."""

    title: str
    metrics: dict[str, str]
    axis_min: float | None = None
    axis_max: float | None = None


CHART_METRICS = (
    ChartMetrics("reward", {"reward": "training"}),
    ChartMetrics("held-out success", {"eval/success": "held-out"}, 0.0, 1.0),
    ChartMetrics("loss", {"loss": "training", "eval/loss": "held-out"}),
    ChartMetrics("tool-call success", {"tool_success": "training"}, 0.0, 1.0),
)
MAX_CHARTS = 3
TABLE_STYLE = "border-collapse:collapse;margin:.3em 0;max-width:100%"
CELL_STYLE = "text-align:left;vertical-align:top;padding:.15em .8em .15em 0;overflow-wrap:break-word;white-space:normal"
GRID_STYLE = (
    "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:.8em;max-width:960px"
)


class NotebookHtml:
    """An HTML fragment that a notebook displays."""

    def __init__(self, html: str, text: str = "") -> None:
        self._html, self._text = html, text

    def __repr__(self) -> str:
        return self._text or "<HTML for a notebook>"

    def _repr_html_(self) -> str:
        return self._html


def render_table(rows: Sequence[Sequence[object]], headers: Sequence[str] = ()) -> Markup:
    """Return rows as an HTML table; the first cell of each row is the row's header."""
    header_html = "".join(f'<th style="{CELL_STYLE}">{_escape(header)}</th>' for header in headers)
    body_html = ""
    for row_header, *cells in rows:
        cells_html = "".join(f'<td style="{CELL_STYLE}">{_escape(cell)}</td>' for cell in cells)
        body_html += f'<tr><th scope="row" style="{CELL_STYLE}">{_escape(row_header)}</th>{cells_html}</tr>'
    rows_html = f"<tr>{header_html}</tr>{body_html}" if header_html else body_html
    return Markup(f'<div style="overflow-x:auto"><table style="{TABLE_STYLE}">{rows_html}</table></div>')


def _escape(value: object) -> str:
    return str(value) if isinstance(value, Markup) else str(escape(escape_control(str(value))))


def render_run(title: str, facts: Sequence[tuple[str, object]], rows: Rows, notes: Sequence[str] = ()) -> str:
    """Return a run as HTML: its facts as a table, notes, and its most important metrics as charts by step."""
    charts_html = "".join(f"<div>{chart.draw()}{_render_legend(chart)}</div>" for chart in make_charts(rows))
    grid_html = f'<div style="{GRID_STYLE}">{charts_html}</div>' if charts_html else ""
    facts_html = render_table(facts) if facts else ""
    notes_html = "".join(f'<div style="overflow-wrap:anywhere">{_escape(note)}</div>' for note in notes)
    return f"<div><strong>{_escape(title)}</strong>{facts_html}{notes_html}{grid_html}</div>"


def make_charts(rows: Rows) -> list[Chart]:
    charts = []
    for chart_metrics in CHART_METRICS:
        curves = [Curve(label, _list_points(rows, name)) for name, label in chart_metrics.metrics.items()]
        if any(curve.points for curve in curves):
            charts.append(Chart(chart_metrics.title, curves, chart_metrics.axis_min, chart_metrics.axis_max))
    return charts[:MAX_CHARTS]


def _list_points(rows: Rows, name: str) -> list[tuple[float, float]]:
    return [(row.get("step", position), row[name]) for position, row in enumerate(rows, 1) if name in row]


def _render_legend(chart: Chart) -> str:
    """Return the names of a chart's curves in their colours; nothing for a single curve."""
    if len(chart.curves) < 2:
        return ""
    labels = [
        f'<span style="color:var(--line{index},{CURVE_COLOURS[index]})">&#9632;</span> {_escape(line.name)}'
        for index, line in enumerate(chart.curves)
    ]
    return f'<div style="font-size:85%;padding-left:4em">{" &nbsp; ".join(labels)}</div>'


def episodes_table(episodes: Sequence[Trajectory], limit: int = MAX_EPISODES) -> NotebookHtml:
    """Return the first episodes as a table: task, how the episode ended, and its conversation."""
    rows, images = [], EmbeddedImages()
    for episode in episodes[:limit]:
        lines = [
            f"<div><em>{_escape(speaker)}</em> {images.render(content)}</div>"
            for speaker, content in list_lines_with_images(episode)
        ]
        rows.append((episode.task.id, episode.member, format_ending(episode), Markup("".join(lines))))
    num_hidden = len(episodes) - len(rows)
    footer = f"<div>{num_hidden} more episodes are not shown</div>" if num_hidden > 0 else ""
    footer += f"<div>{_escape(images.note)}</div>" if images.note else ""
    html = render_table(rows, ("task", "member", "ending", "conversation")) + footer
    return NotebookHtml(str(html), f"{len(episodes)} episodes")


class NotebookWatcher:
    """Watcher that draws the run's charts in the output of a notebook cell, and redraws them as steps finish."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []
        self._notes: list[str] = []
        self._phase, self._progress = "", ""
        self._display_handle: Any = None
        self._last_draw_time = 0.0

    def phase(self, name: str) -> None:
        self._phase = name

    def episode(self, trajectory: Trajectory) -> None: ...

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self._rows.append({"step": float(step), **metrics})
        self._progress = f"step {step} of {total}: {format_metrics_line(metrics)}"
        if step == total or time.monotonic() - self._last_draw_time >= REDRAW_SECONDS:
            self._draw_charts()

    def say(self, text: str) -> None:
        self._notes.append(text)
        self._draw_charts()

    def render_html(self) -> str:
        return render_run(self._progress or self._phase or "starting", [], self._rows, self._notes)

    def _draw_charts(self) -> None:
        from IPython.core.display import HTML  # pyright: ignore[reportMissingImports]
        from IPython.core.display_functions import display  # pyright: ignore[reportMissingImports]

        self._last_draw_time = time.monotonic()
        if self._display_handle is None:
            self._display_handle = display(HTML(self.render_html()), display_id=True)
        else:
            self._display_handle.update(HTML(self.render_html()))


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which can display HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def make_default_watcher() -> Watcher:
    return NotebookWatcher() if is_notebook() else PlainLines()
