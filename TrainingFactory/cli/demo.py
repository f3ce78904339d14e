"""`tfactory demo`: an agent learns to use its tools while one watches."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from TrainingFactory.cli import show

if TYPE_CHECKING:
    from TrainingFactory.services.demo.report import Report

INTRO = """\
A Qwen3 of half a million random weights learns to use tools: first from generated demonstrations, many of them
wrong on purpose, then with GRPO from nothing but whether its answers are right. It is tried before and after GRPO
on held-out tasks. Offline, on any CPU; a few minutes on two cores.
"""
LINE_EVERY = 5.0  # seconds
CHART_WIDTH, CHART_HEIGHT = 60, 8


def demo(*, env: str = "search", seed: int = 0, out: Path = Path("runs/demo")) -> int:
    """Train the built-in model to use tools, from nothing, in minutes on a CPU.

    ```
    tfactory demo
    tfactory demo --env calculator --seed 1 --out runs/sums
    ```

    Parameters
    ----------
    env
        What to learn: search (two lookups, one after the other) or calculator.
    seed
        For the weights, the tasks and the sampling.
    out
        Folder for the report, the models and the episodes; an earlier demo in it is replaced.
    """
    from TrainingFactory.services.demo.folder import check

    check(env, seed, out)  # before the seconds that torch takes to load
    show.note(INTRO)
    from TrainingFactory.services.demo.demo import Demo

    with Phases() as phases:
        report = Demo(env, seed, out, on_progress=phases.progress).run()
    _show(report, out)
    return 0


class Phases:
    """A bar per phase on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figure]}"),
        )
        bar = Bar(TextColumn("{task.description:<16}"), *columns, console=console)
        self._bar = bar if console.is_terminal else None
        self._rows: dict[str, TaskID] = {}
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Phases:
        os.environ.setdefault("TQDM_DISABLE", "1")
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def progress(self, phase: str, done: int, total: int, figure: str) -> None:
        if self._bar is not None:
            if phase not in self._rows or (done == 0 and self._bar.tasks[self._rows[phase]].finished):
                self._rows[phase] = self._bar.add_task(phase, total=total, figure="")
            self._bar.update(self._rows[phase], completed=done, total=total, figure=figure)
            return
        now = time.monotonic()
        if done == total or now - self._last_line > LINE_EVERY:
            self._last_line = now
            show.note(f"{now - self._started:4.0f} s  {phase} {done} of {total}, {figure}".rstrip(", "))


def _show(report: Report, out: Path) -> None:
    from TrainingFactory.services.demo.report import ending, next_commands

    for title, episode in (("before", report.trial.before), ("after", report.trial.after)):
        show.episode(episode, f"held-out task {episode.task.id}, {title}: {ending(episode)}")
    plain = not _can_print("█▄")
    print(chart([point["success"] for point in report.curve], plain=plain))
    print()
    show.columns(("held-out tasks", "before", "after"), report.table)
    print()
    show.note(report.learned)
    temperature = report.plan["temperature"]
    show.note(
        f"The trials are sampled at temperature 1, training at {temperature:g}, where slips are more frequent."
    )
    show.note(f"{report.seconds:.0f} s in all. The whole story: {out / 'report.html'}\n")
    show.note("What to type next:")
    for command, what in next_commands(report.environment, str(out)):
        show.note(f"  {command}  # {what}")


def chart(values: Sequence[float], width: int = CHART_WIDTH, plain: bool = False) -> str:
    """Values between 0 and 1 by step, as bars; `plain` where the terminal has no block characters."""
    columns = [_mean(part) for part in _parts(values, min(width, len(values)))]
    lines = ["reward by step: the share of right answers while training"]
    for row in range(CHART_HEIGHT, 0, -1):
        label = {CHART_HEIGHT: "1.0", CHART_HEIGHT // 2: "0.5"}.get(row, "")
        lines.append(
            f"{label:>4} |" + "".join(_cell(value * CHART_HEIGHT - row + 1, plain) for value in columns)
        )
    lines.append(f"{'0.0':>4} +" + "-" * len(columns))
    last = f"step {len(values)}"
    lines.append("      " + "step 1".ljust(max(len(columns) - len(last), 7)) + last)
    return "\n".join(line.rstrip() for line in lines)


def _cell(filled: float, plain: bool) -> str:
    full, half = ("#", ".") if plain else ("█", "▄")
    return full if filled >= 0.75 else half if filled >= 0.25 else " "


def _parts(values: Sequence[float], count: int) -> list[Sequence[float]]:
    borders = [round(number * len(values) / count) for number in range(count + 1)] if count else [0]
    return [values[start:end] for start, end in pairwise(borders)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
