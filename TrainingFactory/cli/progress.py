"""How far the episodes are: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from TrainingFactory.cli.show import note
from TrainingFactory.types import Trajectory

LINE_EVERY = 5.0  # seconds


class Progress:
    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._rewards: list[float] = []
        self._last_line = time.monotonic()
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}{task.fields[figures]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._row = self._bar.add_task("loading the model", total=self.total, figures="")
        else:
            note("loading the model")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def episode(self, trajectory: Trajectory) -> None:
        """Called for each episode as it ends."""
        self.done += 1
        if trajectory.reward is not None:
            self._rewards.append(trajectory.reward.outcome)
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._row, advance=1, description="episodes", figures=self._figures())
        elif self.done == self.total or now - self._last_line > LINE_EVERY:
            self._last_line = now
            note(f"{self.done} of {self.total} episodes{self._figures()}")

    def _figures(self) -> str:
        return f", mean reward {sum(self._rewards) / len(self._rewards):.2f}" if self._rewards else ""
