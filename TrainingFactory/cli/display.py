"""A training run on a terminal: progress, the figures that matter, and where the time goes. Elsewhere a line per
step."""

from __future__ import annotations

import os
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from TrainingFactory.cli import show
from TrainingFactory.services.runs.tracking import in_short
from TrainingFactory.types import Trajectory

SPARKS = "▁▂▃▄▅▆▇█"
CURVE = 40  # steps shown


class Lines:
    """For logs: a line per step with an estimate of what is left."""

    def __init__(self) -> None:
        self._left = Remaining()

    def __enter__(self) -> Lines:
        os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of loading make a log unreadable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def phase(self, name: str) -> None:
        if name == "load":
            self.say("loading the model")

    def episode(self, trajectory: Trajectory) -> None: ...

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self.say(f"step {step}/{total}  {in_short(metrics)}  {self._left.text(step, total)}".rstrip())

    def say(self, text: str) -> None:
        show.note(text)


class Panel(Lines):
    """For a terminal: a panel that is drawn anew."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(TextColumn("{task.description}"), *columns, console=console)
        self._row = self._bar.add_task("steps", total=None)
        self._phase, self._episodes = "", 0
        self._metrics: dict[str, float] = {}
        self._curve: list[float] = []
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._draw)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phase = ""
        if self._live.is_started:
            self._live.stop()

    def phase(self, name: str) -> None:
        super().phase(name)
        self._phase, self._episodes = name, 0
        if name != "load" and not self._live.is_started:
            self._live.start()  # only now: loading has bars of its own

    def episode(self, trajectory: Trajectory) -> None:
        self._episodes += 1

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self._bar.update(self._row, completed=step, total=total)
        self._bar.update(self._row, description=f"steps {self._left.text(step, total)}".rstrip())
        self._metrics |= metrics
        if (value := metrics.get("reward", metrics.get("loss"))) is not None:
            self._curve = [*self._curve, value][-CURVE:]

    def say(self, text: str) -> None:
        self._console.print(Text(show.clean(text)))

    def _draw(self) -> Group:
        figures = self._metrics
        grid = Table.grid(padding=(0, 2))
        name = "reward" if "reward" in figures else "loss"
        if self._curve:
            grid.add_row(Text(name, "bold"), Text(f"{figures.get(name, 0):.3f}  {curve(self._curve)}"))
        rows = {
            "accuracy": "{:.2f}",
            "episodes/unscored": "{:.0f} could not be scored",
            "tool_success": "{:.0%} of tool calls succeeded",
            "eval/success": "{:.3f} on held-out tasks",
            "eval/loss": "{:.4f} on held-out rows",
            "tokens_per_second": "{:.0f} sampled a second",
            "tokens_saved": "{:.0%} of the update's tokens saved by shared prefixes",
        }
        for key, text in rows.items():
            if key in figures and (figures[key] or key != "episodes/unscored"):
                grid.add_row(Text(key.replace("_", " "), "bold"), Text(text.format(figures[key])))
        if "seconds/step" in figures:
            grid.add_row(Text("time", "bold"), Text(phases(figures)))
        if self._phase:
            count = f", {show.count(self._episodes, 'episode')} ended" if self._episodes else ""
            grid.add_row(Text("now", "bold"), Text(self._phase + count))
        return Group(self._bar, grid)


class Remaining:
    """How long the rest will take, from the steps that this process has seen."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def text(self, step: int, total: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        before, since = self._first
        if step in (before, total):
            return ""
        seconds = (now - since) / (step - before) * (total - step)
        return f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.0f} s"


def phases(metrics: dict[str, float]) -> str:
    """Tools and rewards run beside sampling, so their seconds are not a part of the sum."""
    text = f"{metrics['seconds/step']:.2f} s a step: generate {metrics['seconds/generate']:.2f}"
    if "seconds/tools" in metrics:
        text += (
            f" (tools {metrics['seconds/tools']:.2f}, reward {metrics['seconds/reward']:.2f} side by side)"
        )
    return f"{text}, update {metrics['seconds/update']:.2f}"


def curve(values: list[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


def make_display() -> Lines:
    console = Console(stderr=True)
    return Panel(console) if console.is_terminal else Lines()
