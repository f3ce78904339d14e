"""`tfactory runs`: what has been trained, how it went, and going on with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, validators

from TrainingFactory.cli import show

if TYPE_CHECKING:
    from TrainingFactory.services.runs.folder import RunFolder

runs = App(name="runs", help="List, show, compare and resume training runs.")
Where = Annotated[str, Parameter(name="--runs")]
Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
# What is shown of a run's metrics, where it has them: key -> format
FIGURES = {
    "loss": "{:.4f}",
    "reward": "{:.3f}",
    "accuracy": "{:.3f}",
    "eval/success": "{:.3f}",
    "eval/loss": "{:.4f}",
    "eval/perplexity": "{:.3f}",
    "eval/accuracy": "{:.3f}",
    "tool_success": "{:.3f}",
    "turns": "{:.2f}",
    "entropy": "{:.3f}",
    "tokens_per_second": "{:.0f}",
    "tokens_saved": "{:.1%}",
    "seconds/step": "{:.2f}",
    "seconds/generate": "{:.2f}",
    "seconds/tools": "{:.2f}",
    "seconds/reward": "{:.2f}",
    "seconds/update": "{:.2f}",
    "episodes/unscored": "{:.0f}",
    "episodes/failed": "{:.0f}",
    "rows_left_out/bad": "{:.0f}",
    "rows_left_out/long": "{:.0f}",
    "rows_left_out/unused": "{:.0f}",
}
PARTED = {"reward": "reward", "eval/success": "eval/reward"}  # parts of the reward go after these
ASKED = ("judge/", "pool/")


@runs.command(name="list")
def list_(*, where: Where = "runs") -> None:
    """List the runs, the oldest first.

    Parameters
    ----------
    where
        The folder of runs.
    """
    from TrainingFactory.services.runs.folder import list_runs

    found = list_runs(where)
    if not found:
        show.note(f"there are no runs in {where}")
        return
    rows = []
    for run in found:
        status, config = run.status, run.config
        what = f"{config.training.algorithm} {config.environment.environment_id or ''} {config.model.name}"
        rows.append((run.name, run.state, f"{status.step}/{status.steps}", _last(run), what))
    show.columns(["run", "state", "steps", "last", "what"], rows)


@runs.command(name="show")
def show_(name: str, *, where: Where = "runs") -> None:
    """Show how a run went: its state, its figures over time, its checkpoints.

    Parameters
    ----------
    name
        The run's name or folder.
    where
        The folder of runs.
    """
    from TrainingFactory.cli.display import curve, duration
    from TrainingFactory.services.runs.folder import RunFolder

    run = RunFolder.find(name, where)
    status, about, config = run.status, run.about, run.config
    versions = about["versions"]
    rows = [
        ("run", f"{run.name} in {run.path}"),
        ("state", run.state + (f": {status.reason}" if status.reason else "")),
        ("steps", f"{status.step} of {status.steps}, {duration(status.seconds)}"),
        ("model", config.model.name),
        (
            "training",
            f"{config.training.algorithm} in {config.environment.environment_id or 'no environment'}",
        ),
        ("started", f"{about['started']}, torch {versions['torch']}, commit {about['commit'] or 'none'}"),
    ]
    rows += [("checkpoint", str(path)) for path in run.checkpoints()]
    show.table(rows)
    metrics = run.metrics()
    table = []
    for key, form in _figures(metrics).items():
        values = [row[key] for row in metrics if key in row]
        if values:
            figures = [form.format(value) for value in (values[0], values[-1], min(values), max(values))]
            table.append((key, *figures, curve(values[-40:])))
    show.columns(["figure", "first", "last", "least", "most", "curve"], table)
    show.table(_asked(metrics))
    if run.state in ("interrupted", "failed", "killed"):
        show.note(f"go on with: {run.resume_command}")


@runs.command
def compare(*names: str, where: Where = "runs") -> None:
    """Compare runs: the options in which they differ, their last figures, and what judges have been asked in all.

    Parameters
    ----------
    names
        Names or folders of two runs or more.
    where
        The folder of runs.
    """
    from TrainingFactory.services.runs.folder import RunFolder

    if len(names) < 2:
        raise ValueError("name two runs or more to compare")
    found = [RunFolder.find(name, where) for name in names]
    options = [_flat(run.config.model_dump()) for run in found]
    rows = []
    for key in dict.fromkeys(key for option in options for key in option):
        values = [option.get(key) for option in options]
        if any(value != values[0] for value in values):
            rows.append((key, *map(str, values)))
    rows.append(("steps", *(str(run.status.step) for run in found)))
    metrics = [run.metrics() for run in found]
    last = [_latest(each) | _totals(each) for each in metrics]
    asked = dict.fromkeys((key for each in metrics for key in _totals(each)), "{:.6g}")
    for key, form in (_figures([row for each in metrics for row in each]) | asked).items():
        if any(key in figures for figures in last):
            rows.append((key, *(form.format(f[key]) if key in f else "" for f in last)))
    show.columns(["", *(run.name for run in found)], rows)


@runs.command
def episodes(
    name: str,
    *,
    step: int | None = None,
    task: str | None = None,
    best: Count | None = None,
    worst: Count | None = None,
    show_tasks: Annotated[Count | None, Parameter(name="--show")] = None,
    html: Path | None = None,
    where: Where = "runs",
) -> None:
    """Show the episodes of a step with every token coloured by its advantage: what was paid, and what was blamed.

    ```
    tfactory runs episodes search
    tfactory runs episodes search --step 12 --task search-7-1212 --best 1 --worst 1
    tfactory runs episodes search --step 12 --html credit.html
    ```

    Parameters
    ----------
    name
        The run's name or folder.
    step
        Which step, from 1; the last if none is named, or the last that took the task.
    task
        Only the episodes of this task.
    best
        Of each task only so many episodes with the highest rewards.
    worst
        Of each task only so many with the lowest rewards; with --best both.
    show_tasks
        How many tasks, those with the largest advantages first; one on a terminal, all on a page.
    html
        Write a page with everything to this file, instead of printing it.
    where
        The folder of runs.
    """
    from TrainingFactory.cli import credit as printing
    from TrainingFactory.services.reports.credit_page import credit_page
    from TrainingFactory.services.reports.run_credit import choose, credit_title, run_credit
    from TrainingFactory.services.runs.folder import RunFolder

    run = RunFolder.find(name, where)
    step, credit = run_credit(run, step, task)
    found = [group for group in credit.groups if task is None or group.task == task]
    limit = show_tasks or (1 if html is None and task is None else len(found))
    shown = choose(credit, found[:limit], best, worst)
    title = credit_title(run, step)
    if html is not None:
        _write(html, credit_page(replace(credit, groups=shown), title))
        show.note(f"the page: {html}")
        return
    printing.groups(credit, shown, found)
    for text in (title, *credit.notes):
        show.note(text)


@runs.command
def resume(name: str, *, where: Where = "runs") -> int:
    """Go on with a run from its last checkpoint, exactly as if it had not stopped. Its options are those in its
    config.yaml. What does not change what is learned may be edited there before: addresses, budgets and time-outs in
    reward.options, reward.max_unscored, reward.max_equal_steps, environment.episode_timeout, logging.checkpoint_every.
    Other changes belong into a new run.

    Parameters
    ----------
    name
        The run's name or folder.
    where
        The folder of runs.
    """
    from TrainingFactory.cli.display import make_display
    from TrainingFactory.cli.train import follow
    from TrainingFactory.services.build.training import resume as resume_run
    from TrainingFactory.services.runs.folder import RunFolder

    if RunFolder.find(name, where).status.status == "finished":
        show.note(f"run {name} is finished; nothing to do")
        return 0
    display = make_display()
    return follow(resume_run(name, where, display), display)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--html {path} cannot be written: {error.strerror}") from error


def _figures(metrics: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What is shown of these metrics, with its format: FIGURES, and the parts of the reward after it."""
    names = dict.fromkeys(key for row in metrics for key in row)
    found: dict[str, str] = {}
    for key, form in FIGURES.items():
        found[key] = form
        if key in PARTED:
            found |= {part: form for part in names if part.startswith(f"{PARTED[key]}/")}
    return found


def _totals(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What judges and pools were asked and have spent in all steps together, evaluations included."""
    total: dict[str, float] = {}
    for row in metrics:
        for key, value in row.items():
            if (name := key.removeprefix("eval/")).startswith(ASKED):
                total[name] = total.get(name, 0.0) + value
    return total


def _asked(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Those in words, a row for judges and one for pools, without what is 0."""
    total, lines = _totals(metrics), []
    for prefix in ASKED:
        told = [
            f"{key.removeprefix(prefix).replace('_', ' ')} {value:.6g}"
            for key, value in total.items()
            if key.startswith(prefix) and value
        ]
        if told:
            lines.append((prefix.removesuffix("/"), f"in all: {', '.join(told)}"))
    return lines


def _latest(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last value of each figure; not every step has all."""
    latest: dict[str, Any] = {}
    for row in metrics:
        latest |= row
    return latest


def _last(run: RunFolder) -> str:
    latest = _latest(run.metrics())
    keys: Sequence[str] = ("eval/success", "reward", "loss")
    key = next((key for key in keys if key in latest), None)
    return f"{key} {latest[key]:.3f}" if key else ""


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
