"""How far the episodes are: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from TrainingFactory.cli.show import note
from TrainingFactory.types import Trajectory

LINE_EVERY = 5.0  # seconds


class Progress:
    """Around a run of episodes; `episode` is told of each one that ends."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._rewards: list[float] = []
        self._last_line = time.monotonic()
        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        bar = Bar(TextColumn("{task.description}"), *columns, console=console, transient=True)
        self._bar = bar if console.is_terminal else None
        self._row = bar.add_task("episodes", total=total)

    def __enter__(self) -> Progress:
        note("loading the model")
        if self._bar is None:
            os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of loading make a log unreadable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def episode(self, trajectory: Trajectory) -> None:
        self.done += 1
        if trajectory.reward is not None:
            self._rewards.append(trajectory.reward.outcome)
        mean = f", mean reward {sum(self._rewards) / len(self._rewards):.2f}" if self._rewards else ""
        if self._bar is not None:
            self._bar.start()  # only now: loading has bars of its own
            self._bar.update(self._row, advance=1, description=f"episodes{mean}")
        elif self.done == self.total or time.monotonic() - self._last_line > LINE_EVERY:
            self._last_line = time.monotonic()
            note(f"{self.done} of {self.total} episodes{mean}")
