"""`tfactory compare`: models on the same tasks, task by task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from TrainingFactory.cli import show
from TrainingFactory.cli.evaluate import RECORD_COLUMNS, play, record_row
from TrainingFactory.cli.options import Count, Flags, Json, Where, places
from TrainingFactory.common.texts import clean
from TrainingFactory.config.loading import key_value
from TrainingFactory.runs.episode_texts import conversation, ending
from TrainingFactory.types import Trajectory

if TYPE_CHECKING:
    from TrainingFactory.evaluation.comparison import Comparison, Flip, Side


def compare(
    *given: Annotated[str, Parameter(name="model-or-run")],
    env: str | None = None,
    suite: str | None = None,
    episodes: Count | None = None,
    flags: Flags | None = None,
    show_tasks: Annotated[int, Parameter(name="--show")] = 1,
    html: Path | None = None,
    again: bool = False,
    as_json: Json = False,
    where: Where = "runs",
) -> int:
    """Compare two models or more with the first, on the same tasks and with the same random numbers. What has been
    evaluated under the same conditions before is not played again.

    ```
    tfactory compare runs/warm runs/grpo-search-1
    tfactory compare qwen3-4b runs/a runs/b --suite release.yaml --html compare.html
    tfactory compare builtin:tiny runs/a --env calculator --tasks 200 --episodes 4 sampling.top_p=0.9
    tfactory compare eval-3c239549c9 eval-90b1f0a2c4
    tfactory compare agent:1 agent@champion --runs /data/runs
    ```

    Args:
        given: Models, runs, checkpoints, and recorded evaluations: an id, or a file of records, of which the last is
            taken; and options of the config for all, as key=value.
        env: The environment; else that of the first run that is named and has one.
        suite: A YAML file with several environments or files of tasks, or builtin or quick.
        episodes: Episodes per task.
        show_tasks: How many flipped tasks of each direction to print with both episodes.
        html: Write a page with everything to this file.
        again: Play what has a record, too: those of a run on its way have kept no episodes.
    """
    from TrainingFactory.evaluation import comparison

    flags = flags or Flags()
    names = [each for each in given if "=" not in each or Path(each).exists()]
    if len(names) < 2 or flags.model is not None:
        raise ValueError("name two models, runs or recorded evaluations or more: tfactory compare A B")
    overrides = [*(each for each in given if each not in names), *flags.overrides()]
    overrides.insert(0, key_value("logging.output_dir", where))
    if episodes is not None:
        overrides.append(key_value("training.group_size", episodes))
    sides, weights = comparison.sides(names, overrides, env, suite, show.note, places(overrides)[0], again)
    if status := _play(sides):
        return status
    found = [comparison.compare(sides[0], side, weights) for side in sides[1:]]
    if html is not None:
        from TrainingFactory.apps.reports.comparison_page import comparison_page

        show.write_page(html, comparison_page(sides, found))
    if as_json:
        print(json.dumps({"comparisons": [each.as_json() for each in found]}))
        return 0
    rows = [[f"{side.name} {each.entry or ''}", *record_row(each)] for side in sides for each in side.records]
    show.columns(["model", *RECORD_COLUMNS], rows)
    for each in found:
        _print(each, show_tasks)
    return 0


def _play(sides: Sequence[Side]) -> int:
    """Run what has no record yet, and return the exit status."""
    for side in sides:
        for evaluation in filter(None, side.wanted):
            if status := play(evaluation, f"{side.name} {evaluation.asked.entry or ''}".rstrip()):
                return status
        side.take()
    return 0


def _print(found: Comparison, count: int) -> None:
    better, worse, change = found.better, found.worse, found.difference
    rows = [
        ("compared", f"{found.second.name} with {found.first.name}, {show.count(found.tasks, 'task')}"),
        ("difference", f"{change.value:+.3f} (95 % interval {change.low:+.3f} to {change.high:+.3f})"),
        ("flipped", f"{len(better)} better, {len(worse)} worse; exact McNemar p = {found.p:.3g}"),
    ]
    rows += [(name, _ids(flips)) for name, flips in (("better on", better), ("worse on", worse)) if flips]
    show.table(rows)
    for flip, episodes in found.episodes([*better[:count], *worse[:count]]):
        _side_by_side(found, flip, episodes)
    for text in found.notes:
        show.note(f"note: {text}")


def _ids(flips: Sequence[Flip], most: int = 20) -> str:
    more = f" and {len(flips) - most} more" if len(flips) > most else ""
    return ", ".join(flip.task for flip in flips[:most]) + more


def _side_by_side(found: Comparison, flip: Flip, episodes: Sequence[Trajectory | None]) -> None:
    screen = show.console(stderr=False)
    screen.print(Rule(Text(clean(f"task {flip.task}")), align="left"))
    grid = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for side, share in zip((found.first, found.second), flip.shares, strict=True):
        grid.add_column(Text(clean(f"{side.name}: {share:g}")), ratio=1, overflow="fold")
    grid.add_row(*map(_conversation, episodes))
    screen.print(grid)


def _conversation(episode: Trajectory | None) -> Table | Text:
    if episode is None:
        return Text("(its episodes were not kept; --again plays them)", style="dim")
    rows = show.grid()
    for who, what in conversation(episode):
        rows.add_row(Text(who, style=show.ROLE_STYLES[who]), show.body(what or "(no text)"))
    rows.add_row("", Text(clean(ending(episode)), style="bold"))
    return rows
