"""Progress display: live bars and metrics on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar

from rich import progress
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from TrainingFactory.cli import show
from TrainingFactory.runs.tracking import format_metrics_line
from TrainingFactory.types import Trajectory

T = TypeVar("T")
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_COLUMNS = 40
# Metric -> format in the live panel. Plain log lines leave these metrics out.
DETAIL_FORMATS = {
    "reward_std": "reward std {:.3f}", "length": "length {:.0f}", "entropy": "entropy {:.3f}", "kl": "KL {:.4f}",
    "grad_norm": "grad norm {:.3g}", "learning_rate": "learning rate {:.2g}",
}  # fmt: skip
LINE_INTERVAL = 5.0  # seconds between plain lines of one progress bar


class Display:
    """Shows the progress of a run, a rollout, an evaluation or any counted work.

    `num_episodes` is the expected number of episodes, each of which advances a bar; None: training steps are shown
    instead, in a bar named `task`. `loads_model` is False for a model behind an endpoint."""

    def __init__(
        self, num_episodes: int | None = None, console: Console | None = None, loads_model: bool = True
    ) -> None:
        self.task = "steps"
        self._console = console or Console(stderr=True)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=self._console,
            speed_estimate_period=3600.0,
        )
        self._task_ids: dict[str, progress.TaskID] = {}
        self._last_line_time = time.monotonic()
        self._phase = ""
        self._num_episodes = num_episodes
        self._loads_model = loads_model
        self._num_ended = 0
        self._rewards: list[float] = []
        self._metrics: dict[str, float] = {}
        self._curve: dict[int, float] = {}  # step -> plotted reward or loss
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._draw)

    def __enter__(self) -> Display:
        if self._num_episodes is not None:
            self.phase("load" if self._loads_model else "sample")
        return self

    def __exit__(self, *error: object) -> None:
        self._phase = ""
        self._live.stop()

    def phase(self, name: str) -> None:
        self._phase = name
        if self._num_episodes is None:
            self._num_ended = 0
        if name == "load":
            self.say("loading the model")
        else:
            self._start_live()

    def episode(self, trajectory: Trajectory) -> None:
        self._num_ended += 1
        if self._num_episodes is None:
            return
        if trajectory.reward is not None:
            self._rewards.append(trajectory.reward.outcome)
        mean_text = f"mean reward {sum(self._rewards) / len(self._rewards):.2f}" if self._rewards else ""
        self.advance("episodes", self._num_episodes, mean_text)

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        task_id = self._find_task_id(self.task, total)
        self._bars.update(task_id, completed=step, total=total)
        self._metrics |= metrics
        # A resumed run repeats the steps after its last checkpoint; replace them in the plot.
        self._curve = {past_step: value for past_step, value in self._curve.items() if past_step < step}
        self.plot_earlier_steps([{"step": step} | metrics])
        if not self._console.is_terminal:
            seconds = self._bars.tasks[task_id].time_remaining
            time_left = f"{format_duration(seconds)} left" if seconds else ""
            step_label = "step" if self.task == "steps" else f"{self.task}: step"
            self.say(f"{step_label} {step}/{total}  {format_metrics_line(metrics)}  {time_left}".rstrip())

    def plot_earlier_steps(self, rows: list[dict[str, Any]]) -> None:
        """Add completed steps, as rows of metrics.jsonl, to the plot."""
        for row in rows:
            if (value := row.get("reward", row.get("loss"))) is not None:
                self._curve[row["step"]] = value

    def say(self, text: str) -> None:
        show.note(text, self._console)

    def track(self, iterable: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """Yield the elements and advance the bar `label` after each is processed."""
        for element in iterable:
            yield element
            self.advance(label, total)

    def advance(self, label: str, total: int | None, text: str = "") -> None:
        """Advance the bar `label`, of length `total` (None: unknown), by one."""
        task_id = self._find_task_id(label, total)
        self._bars.update(task_id, advance=1, note=text)
        completed = int(self._bars.tasks[task_id].completed)
        now = time.monotonic()
        if self._console.is_terminal:
            self._start_live()
        elif completed == total or now - self._last_line_time > LINE_INTERVAL:
            self._last_line_time = now
            progress_text = f"{label}: {completed}" if total is None else f"{label}: {completed} of {total}"
            self.say(f"{progress_text}, {text}" if text else progress_text)

    def _find_task_id(self, label: str, total: int | None) -> progress.TaskID:
        if label not in self._task_ids:
            self._task_ids[label] = self._bars.add_task(label, total=total, note="")
        return self._task_ids[label]

    def _start_live(self) -> None:
        """Start the live display. Called after the model is loaded, because loading draws its own bars."""
        if self._console.is_terminal and not self._live.is_started:
            self._live.start()

    def _draw(self) -> Group:
        metrics = self._metrics
        details = [text.format(metrics[name]) for name, text in DETAIL_FORMATS.items() if name in metrics]
        lines = [format_metrics_line(metrics), *(["  ".join(details)] if details else [])]
        if self._curve:
            lines.insert(0, sparkline(list(self._curve.values())))
        if self._phase and self._num_episodes is None:
            ended_note = f", {show.pluralize(self._num_ended, 'episode')} ended" if self._num_ended else ""
            lines.append(self._phase + ended_note)
        return Group(self._bars, Text("\n".join(lines)))


def format_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def sparkline(values: list[float]) -> str:
    """Return a one-line plot of the values."""
    return plot(values, SPARKLINE_COLUMNS, 1)[0]


def plot(values: list[float], columns: int = 72, height: int = 6) -> list[str]:
    """Return a plot of the values as `height` lines, top first, with at most `columns` averaged values."""
    width = min(len(values), columns)
    starts = [len(values) * column // width for column in range(width + 1)]
    averages = [fmean(values[start:end]) for start, end in pairwise(starts)]
    low, high = min(averages), max(averages)
    scale = (len(BLOCKS) * height - 1) / (high - low) if high > low else 0.0
    levels = [round((mean - low) * scale) for mean in averages]
    lines = []
    for line in reversed(range(height)):
        floor = line * len(BLOCKS)
        lines.append("".join(" " if level < floor else BLOCKS[min(level - floor, 7)] for level in levels))
    return lines
