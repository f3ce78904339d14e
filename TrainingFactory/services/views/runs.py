"""Runs as shapes: all of a folder in a list, one in full, its metrics and its log from a byte on."""

from __future__ import annotations

import contextlib
import re
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import ConfigLoader
from TrainingFactory.config.names import expand
from TrainingFactory.services.evaluation.records import read_records
from TrainingFactory.services.registry.lineage import chain, origin, parent_of, told, tools_of
from TrainingFactory.services.runs import folder as kept
from TrainingFactory.services.runs.folder import ABOUT, CONFIG, FINDINGS, METRICS, STATUS, RunFolder, is_run
from TrainingFactory.services.views import shapes
from TrainingFactory.services.views.episodes import WRONG
from TrainingFactory.services.views.files import Place, read_end, read_json, read_on
from TrainingFactory.texts import valid_text

SPARK, LOCKED = 60, ("running", "killed")  # points of a small curve; states that only the lock tells apart
PART = 8 << 20  # bytes of metrics in an answer
LOG, LOG_PART = "run.log", 256 << 10  # what a run's process has printed, where something kept it
SUMMED = re.compile(
    rb'"(step|reward|loss|tokens_per_second|eval/success(?:_low|_high)?)": '
    rb"(NaN|-?(?:Infinity|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?))(?=[,}])"
)
SEEN = (METRICS, STATUS, CONFIG, ABOUT, FINDINGS, kept.EVALUATIONS)  # what a row is made of
BEGAN = "the model it began with"
COMMANDS = ("runs show", "runs stop", "runs resume", "runs report", "eval", "serve", "runs episodes")


class _QuickLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # pyright: ignore[reportGeneralTypeIssues]
    """Reads a config as `ConfigLoader` does, many times as fast; it has no limit for aliases."""


_QuickLoader.yaml_implicit_resolvers = ConfigLoader.yaml_implicit_resolvers


@dataclass(slots=True)
class _Known:
    """Holds what was read of a run, and what its files were then."""

    seen: list[tuple[int, int]] = field(default_factory=list)
    row: shapes.RunRow | None = None
    place: Place = field(default_factory=Place)
    curves: dict[str, array[float]] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)


class Runs:
    """The runs of a folder, for any thread. What has not changed is not read again: its row is the same object."""

    def __init__(self, folder: str | Path = "runs") -> None:
        self.folder = Path(folder).expanduser()
        self._known, self._lock = dict[Path, _Known](), threading.Lock()

    def rows(self) -> list[shapes.RunRow]:
        """Return a row for each run, the oldest first. One that cannot be read says why."""
        with self._lock:
            self._known = {path: self._known.get(path, _Known()) for path in self._folders()}
            return [self._row(RunFolder(path)) for path in self._known]

    def row(self, run: RunFolder) -> shapes.RunRow:
        with self._lock:
            return self._row(run)

    def find(self, name: str) -> RunFolder:
        """Return the run of that name in this folder, which is looked up; raise ValueError where there is none."""
        if name in {path.name for path in self._folders()}:
            return RunFolder(self.folder / name)
        raise ValueError(f"there is no run {name!r} in {self.folder}")

    def _folders(self) -> list[Path]:
        files = [file for name in (ABOUT, CONFIG) for file in self.folder.glob(f"[!.]*/{name}")]
        made = {file.parent: (stat_of(file)[0], file) for file in files}
        return sorted(made, key=made.__getitem__)

    def _row(self, run: RunFolder) -> shapes.RunRow:
        known = self._known.setdefault(run.path, _Known())
        seen = [stat_of(run.path / name) for name in SEEN]
        row = known.row
        if row is None or seen != known.seen or (row.state in LOCKED and row.state != run.state):
            known.seen, known.row = seen, (row := _new_row(run, known, max(seen)[0] / 1e9))
        return row


def stat_of(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _sum_up(path: Path, known: _Known) -> None:
    """Read what is new of the metrics, without making objects of what no list shows."""
    part = None
    while part is None or part.more:
        part = read_on(path, known.place, PART)
        if part.again:
            known.curves, known.last = {}, {}
        known.place = part.place
        for line in part.lines:
            found = {name.decode(): float(value) for name, value in SUMMED.findall(line)}
            known.last |= found | ({"eval/step": found.get("step", 0)} if "eval/success" in found else {})
            for name in {"reward", "loss"} & {name for name, value in found.items() if isfinite(value)}:
                known.curves.setdefault(name, array("d")).append(found[name])


def _new_row(run: RunFolder, known: _Known, updated: float) -> shapes.RunRow:
    row, file = shapes.RunRow(name=valid_text(run.name), state="unreadable", updated=updated), ""
    try:
        if row.name != run.name:
            raise ValueError("the name of its folder is no text; rename it")
        _sum_up(run.path / (file := METRICS), known)
        last, of, file = known.last, "reward" if "reward" in known.curves else "loss", CONFIG
        row.reward, row.loss, row.tokens_per_second = map(last.get, ("reward", "loss", "tokens_per_second"))
        row.spark, row.spark_of = _thinned(known.curves.get(of, ())), of
        if "eval/success" in last and isfinite(last["eval/step"]):
            low, high = last.get("eval/success_low"), last.get("eval/success_high")
            value, step = last["eval/success"], int(last["eval/step"])
            row.heldout = shapes.Heldout(value=value, low=low, high=high, step=step)
        if not is_run(run.path):
            raise ValueError(f"it is half written: it needs {CONFIG} and {ABOUT}")
        config = quick_config(run)
        row.algorithm, row.model = config.training.algorithm, config.model.name
        place, data = config.environment, config.data
        alone = "conversation" if config.tools or data.tasks else None
        row.environment, file = place.environment_id or place.command or data.dataset or alone, STATUS
        status, state = run.status, run.state
        row.step, row.steps, row.seconds, file = status.step, status.steps, status.seconds, FINDINGS
        row.findings = sum(each.last_step is None for each in findings(run))
        row.state, file = state, ABOUT
        if state != "running":  # then its own are the newest
            row.heldout = _asked_for(run, row.heldout, place.environment_id) or row.heldout
        row.started = str(run.about["started"]).replace(" ", "T")
    except Exception as error:  # files that anybody may have changed
        reason = " ".join(str(error).split())
        row.problem = reason if file in reason else f"{file}: {reason}"
    return row


def _asked_for(run: RunFolder, own: shapes.Heldout | None, place: str | None) -> shapes.Heldout | None:
    """Return the newest success by `tfactory eval` in the run's environment (any if it has none), where that is of the
    best checkpoint, or of no earlier step than the run's own."""
    for line in reversed(read_end(run.path / kept.EVALUATIONS, PART)[0]):
        with contextlib.suppress(*WRONG):  # the page of the run says which cannot be read
            found = evaluation_row(read_json(line)) if b'"by": "eval"' in line else None
            if found is None or found.success is None or found.step is None or found.suite:
                continue
            if place is not None and found.environment not in (place, Path(place).name):
                continue
            if own is None or found.step >= own.step or run.checkpoint_folder(found.step) == run.best():
                by = f"tfactory eval, {found.tasks} tasks of {found.environment or 'conversation'}"
                return shapes.Heldout(**found.model_dump() | {"value": found.success, "by": by})
    return None


def _thinned(values: Sequence[float]) -> list[float]:
    """Return at most SPARK values: the first, the last, and means of equal parts between them."""
    if len(values) <= SPARK:
        return list(values)
    ends = [1 + n * (len(values) - 2) // (SPARK - 2) for n in range(SPARK - 1)]
    return [values[0], *(fmean(values[start:end]) for start, end in pairwise(ends)), values[-1]]


def quick_config(run: RunFolder) -> TrainingConfig:
    """Return the config of a run, without the lines that its keys stand in; raise ConfigError as `run.config` does."""
    text = (run.path / CONFIG).read_text(encoding="utf-8", errors="replace")
    # No alias, nor so many levels that the quick one, which is no Python, would end this process.
    if not re.search(r"(^|\s)[&*]\S", text) and sum(map(text.count, "[{?-")) < 1000:
        with contextlib.suppress(Exception):  # then the other one says where
            return TrainingConfig(**expand(yaml.load(text, _QuickLoader)))  # a SafeLoader
    return run.config


def findings(run: RunFolder) -> list[shapes.FindingRow]:
    """Return what was seen going wrong in a run, each once, with the steps of the last time."""
    found: dict[str, shapes.FindingRow] = {}
    for row in run.findings():
        old = found.get(row["name"])
        if not row.get("gone"):
            times = old.times + 1 if old else 1
            found[row["name"]] = shapes.FindingRow(**row, first_step=row["step"], times=times)
        elif old is not None and old.last_step is None:
            old.last_step = row["step"] - 1
    return list(found.values())


def run_view(run: RunFolder, runs: Runs) -> shapes.RunView:
    """Return a run in full; of what cannot be read it is noted why."""
    notes: list[str] = []

    def tried(make: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return make()
        except Exception as error:  # files that anybody may have changed
            notes.append(" ".join(str(error).split()))
            return otherwise

    about, best, steps = tried(lambda: run.about, {}), tried(run.best, None), len("step-")
    records = read_records(run.path / kept.EVALUATIONS, lambda say: notes.append(say.removeprefix("note: ")))
    parent, began = parent_of({"about": about}), {"name": runs.row(run).model, "what": BEGAN, "rows": []}
    files = sorted(path for path in run.path.iterdir() if path.is_file() and not path.name.startswith("."))
    return shapes.RunView(
        row=runs.row(run), about={key: value for key, value in about.items() if key != "model"},
        reason=tried(lambda: run.status.reason, None), findings=tried(lambda: findings(run), []),
        checkpoints=[{"name": c.name, "step": int(c.name[steps:]), "best": c == best} for c in run.checkpoints()],
        evaluations=[evaluation_row(record.model_dump(exclude={"outcomes"})) for record in records],
        lineage=tried(lambda: lineage_rows(parent) if parent else [began], []),
        commands={command.split()[-1]: f"tfactory {command} {run.shown}" for command in COMMANDS},
        files=[{"name": path.name, "bytes": path.stat().st_size} for path in files],
        tools=tried(lambda: tools_of(run)["names"], []), notes=notes,
    )  # fmt: skip


def lineage_rows(node: shapes.Json) -> list[shapes.Json]:
    """Return the way from the base model to a node."""
    made = [(each.get("run"), *told(each)) for each in chain(node)]
    found = [{"name": run, "what": what, "rows": rows} for run, what, rows in made if run]
    return [{"name": origin(node), "what": BEGAN, "rows": []}, *found]


def evaluation_row(record: shapes.Json) -> shapes.EvaluationRow:
    """Return what a record of an evaluation says, be it of a version that this one does not know."""
    success, low, high = (record.get("metrics", {}).get(f"success{end}") for end in ("", "_low", "_high"))
    asked, suite = record.get("conditions", {}), [record.get("suite"), record.get("entry")]
    return shapes.EvaluationRow(
        id=record.get("id", ""), step=record.get("model", {}).get("step"), success=success, low=low, high=high,
        by=record.get("by", ""), suite="/".join(filter(None, suite)) or None, environment=asked.get("environment"),
        tasks=asked.get("count", 0), time=record.get("time", ""),
    )  # fmt: skip


def config_view(run: RunFolder) -> shapes.ConfigView:
    """Return the options of a run, and which are not as they are by default."""
    text = (run.path / CONFIG).read_text(encoding="utf-8", errors="replace")
    try:
        options, usual = (_flat(each.model_dump()) for each in (quick_config(run), TrainingConfig()))
    except ValueError as error:
        return shapes.ConfigView(yaml=text, options={}, changed=[], problem=str(error))
    changed = [key for key, value in options.items() if key not in usual or usual[key] != value]
    return shapes.ConfigView(yaml=text, options=options, changed=changed)


def diff(runs: Sequence[RunFolder]) -> shapes.Diff:
    """Return the options in which runs differ, and their last metrics."""
    options = _beside([_flat(quick_config(run).model_dump()) for run in runs])
    last = [{key: value for row in run.metrics() for key, value in row.items()} for run in runs]
    rows = [row for row in options if any(value != row["values"][0] for value in row["values"])]
    return shapes.Diff(runs=[run.name for run in runs], rows=rows, metrics=_beside(last))


def _beside(columns: Sequence[shapes.Json]) -> list[shapes.Json]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return [{"key": key, "values": [column.get(key) for column in columns]} for key in keys]


def _flat(data: shapes.Json, prefix: str = "") -> shapes.Json:
    flat: shapes.Json = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def metrics_part(run: RunFolder, after: int = 0) -> shapes.MetricsPart:
    """Return the metrics of the steps after a byte, as columns."""
    part = read_on(run.path / METRICS, _after(after), PART)
    found = shapes.MetricsPart(offset=part.place.offset, again=part.again, more=part.more)
    for line in part.lines:
        try:
            row: shapes.Json = read_json(line)
            step, time = int(row.pop("step")), row.pop("time", None)
            numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        except WRONG:
            found.unread += 1
            continue
        found.steps.append(step)
        found.times.append(time if isinstance(time, int | float) else None)
        for name, value in numbers.items():
            column = found.series.setdefault(kept.OLD_METRICS.get(name, name), [])
            column += [None] * (len(found.steps) - 1 - len(column)) + [value]
    for column in found.series.values():
        column += [None] * (len(found.steps) - len(column))
    return found


def log_part(run: RunFolder, after: int = 0) -> shapes.LogPart:
    """Return what a run's process has printed after a byte; a negative one counts from the end."""
    path = run.path / LOG
    if after < 0 and (after := max(0, stat_of(path)[1] + after)):
        after = read_on(path, Place(after), 1).place.offset  # not half a line
    part = read_on(path, _after(after), LOG_PART)
    text = "".join(f"{line.decode('utf-8', 'replace')}\n" for line in part.lines)
    return shapes.LogPart(offset=part.place.offset, again=part.again, more=part.more, text=text)


def _after(offset: int) -> Place:
    return Place(offset, b"\n" if offset else b"")
