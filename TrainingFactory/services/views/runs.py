"""Runs as shapes: all of a folder in a list, one in full, its metrics and its log from a byte on."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import ConfigLoader
from TrainingFactory.config.names import expand
from TrainingFactory.services.evaluation.records import EvaluationRecord, read_records
from TrainingFactory.services.registry.lineage import chain, origin, parent_of, tools_of
from TrainingFactory.services.registry.lineage import told as node_in_words
from TrainingFactory.services.runs.folder import (
    ABOUT,
    CONFIG,
    EVALUATIONS,
    FINDINGS,
    METRICS,
    OLD_METRICS,
    STATUS,
    RunFolder,
    is_run,
)
from TrainingFactory.services.views import shapes
from TrainingFactory.services.views.files import Place, read_json, read_on

SPARK = 60  # points of a small curve
PART = 8 << 20  # bytes of metrics in an answer
LOG, LOG_PART = "run.log", 256 << 10  # what a run's process has printed, where something kept it
SUMMED = (
    "step",
    "time",
    "reward",
    "loss",
    "tokens_per_second",
    "eval/success",
    "eval/success_low",
    "eval/success_high",
)
SUMMED_IN = re.compile(rb'"(%s)": (-?\d[\d.eE+-]*)' % "|".join(SUMMED).encode())
COMMANDS = {
    "show": "runs show {}", "resume": "runs resume {}", "stop": "runs stop {}", "report": "runs report {}",
    "eval": "eval {}", "serve": "serve {}", "episodes": "runs episodes {}",
}  # fmt: skip


class _QuickLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Reads a config as `ConfigLoader` does, twenty times as fast; not for files with aliases, which it does not limit."""


_QuickLoader.yaml_implicit_resolvers = ConfigLoader.yaml_implicit_resolvers


@dataclass(slots=True)
class _Known:
    """What was read of a run, and what its files were then."""

    seen: tuple[Any, ...] = ()
    row: shapes.RunRow = field(default_factory=lambda: shapes.RunRow(name="", state="unreadable"))
    place: Place = field(default_factory=Place)
    curves: dict[str, array[float]] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    evaluated: int = 0


class Runs:
    """The runs of a folder. What has not changed is not read again, and its row is the same object as before."""

    def __init__(self, folder: str | Path = "runs") -> None:
        self.folder = Path(folder).expanduser()
        self._known: dict[Path, _Known] = {}

    def rows(self) -> list[shapes.RunRow]:
        """Return a row for each run, the oldest first. One that cannot be read says why."""
        files = [file for name in (CONFIG, ABOUT) for file in self.folder.glob(f"[!.]*/{name}")]
        made = {file.parent: _stat(file)[0] for file in reversed(files)}
        self._known = {
            path: self._known.get(path, _Known()) for path in sorted(made, key=lambda p: (made[p], p))
        }
        return [self._row(path, known) for path, known in self._known.items()]

    def find(self, name: str) -> RunFolder:
        """Return the run of that name in this folder; raise ValueError where there is none. A name is never a path."""
        if name in {path.name for path in self.folder.glob("[!.]*/") if is_run(path)}:
            return RunFolder(self.folder / name)
        raise ValueError(f"there is no run {name!r} in {self.folder}")

    def row(self, run: RunFolder) -> shapes.RunRow:
        return self._row(run.path, self._known.setdefault(run.path, _Known()))

    def _row(self, path: Path, known: _Known) -> shapes.RunRow:
        seen = tuple(_stat(path / name) for name in (CONFIG, ABOUT, STATUS, METRICS, FINDINGS))
        run = RunFolder(path)
        if seen == known.seen and (known.row.state != "running" or run.state == "running"):
            return known.row
        if seen[3:4] != known.seen[3:4]:
            _sum_up(path / METRICS, known)
        known.seen, known.row = seen, _new_row(run, known, max(seen[2][0], seen[3][0]) / 1e9)
        return known.row


def _stat(path: Path) -> tuple[int, int]:
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
        for line in part.data.splitlines():
            found = {name.decode(): float(value) for name, value in SUMMED_IN.findall(line)}
            known.last |= found
            for name in ("reward", "loss"):
                if name in found:
                    known.curves.setdefault(name, array("d")).append(found[name])
            if "eval/success" in found:
                known.evaluated = int(found.get("step", 0))


def _new_row(run: RunFolder, known: _Known, updated: float) -> shapes.RunRow:
    last, of = known.last, "reward" if "reward" in known.curves else "loss"
    row = shapes.RunRow(
        name=run.name, state="unreadable", updated=updated, reward=last.get("reward"), loss=last.get("loss"),
        spark=_thinned(known.curves.get(of, ())), spark_of=of, tokens_per_second=last.get("tokens_per_second"),
    )  # fmt: skip
    if (value := last.get("eval/success")) is not None:
        low, high = last.get("eval/success_low"), last.get("eval/success_high")
        row.heldout = shapes.Heldout(value=value, low=low, high=high, step=known.evaluated)
    file = CONFIG
    try:
        if not is_run(run.path):
            raise ValueError(f"it is half written: it needs {CONFIG} and {ABOUT}")
        config = quick_config(run)
        row.algorithm, row.model = config.training.algorithm, config.model.name
        row.environment = config.environment.environment_id or config.data.dataset
        file = STATUS
        status, state = run.status, run.state
        row.step, row.steps, row.seconds = status.step, status.steps, status.seconds
        file = FINDINGS
        row.findings = sum(each.last_step is None for each in findings(run))
        row.state, file = state, ABOUT
        row.started = str(run.about["started"]).replace(" ", "T")
    except Exception as error:  # files that anybody may have changed
        reason = " ".join(str(error).split())
        row.problem = reason if file in reason else f"{file}: {reason}"
    return row


def _thinned(values: Sequence[float]) -> list[float]:
    """Return the means of so many parts of equal length."""
    count = min(SPARK, len(values))
    return [fmean(values[n * len(values) // count : (n + 1) * len(values) // count]) for n in range(count)]


def quick_config(run: RunFolder) -> TrainingConfig:
    """Return the config of a run, without the lines that its keys stand in; raise ConfigError as `run.config` does."""
    text = (run.path / CONFIG).read_text(encoding="utf-8", errors="replace")
    if not re.search(r"(^|\s)[&*]\S", text):
        try:
            return TrainingConfig(**expand(yaml.load(text, _QuickLoader)))  # a SafeLoader
        except Exception:  # the loader that says where
            pass
    return run.config


def findings(run: RunFolder) -> list[shapes.FindingRow]:
    """Return what was seen going wrong in a run, each with its steps."""
    found: list[shapes.FindingRow] = []
    since: dict[str, shapes.FindingRow] = {}  # those that are not gone yet
    for row in run.findings():
        if row.get("gone"):
            if (old := since.pop(row["name"], None)) is not None:
                old.last_step = row["step"] - 1
        else:
            given = {key: row[key] for key in ("name", "sentence", "remedy", "severity")}
            since[row["name"]] = shapes.FindingRow(**given, first_step=row["step"], last_step=None)
            found.append(since[row["name"]])
    return found


def run_view(run: RunFolder, runs: Runs) -> shapes.RunView:
    """Return a run in full; of what cannot be read it is noted why."""
    notes: list[str] = []

    def tried(make: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return make()
        except Exception as error:  # files that anybody may have changed
            notes.append(" ".join(str(error).split()))
            return otherwise

    def noted(note: str) -> None:
        notes.append(note.removeprefix("note: "))

    about, best = tried(lambda: run.about, {}), tried(run.best, None)
    records = read_records(run.path / EVALUATIONS, noted)
    files = sorted(path for path in run.path.iterdir() if path.is_file() and not path.name.startswith("."))
    found = shapes.RunView(
        row=runs.row(run),
        about={key: value for key, value in about.items() if key != "model"},
        reason=tried(lambda: run.status.reason, None),
        checkpoints=[_checkpoint(path, best) for path in run.checkpoints()],
        findings=tried(lambda: findings(run), []),
        evaluations=[evaluation_row(record) for record in records],
        lineage=tried(lambda: _ancestors(run, about), []),
        commands={name: f"tfactory {text.format(run.shown)}" for name, text in COMMANDS.items()},
        files=[shapes.FileRow(name=path.name, bytes=path.stat().st_size) for path in files],
        tools=tried(lambda: tools_of(run)["names"], []),
        notes=notes,
    )
    return found


def _checkpoint(path: Path, best: Path | None) -> shapes.CheckpointRow:
    return shapes.CheckpointRow(name=path.name, step=int(path.name.removeprefix("step-")), best=path == best)


def _ancestors(run: RunFolder, about: dict[str, Any]) -> list[shapes.LineageRow]:
    parent, model = parent_of({"about": about}), quick_config(run).model.name
    return [
        *(lineage_rows(parent) if parent else [shapes.LineageRow(name=model, what="the model it began with")])
    ]


def lineage_rows(node: dict[str, Any]) -> list[shapes.LineageRow]:
    """Return the way from the base model to a node."""
    found = [shapes.LineageRow(name=origin(node), what="the model it began with")]
    for each in chain(node):
        what, rows = node_in_words(each)
        if "config" in each:
            found.append(shapes.LineageRow(name=each["run"], what=what, rows=rows))
    return found


def evaluation_row(record: EvaluationRecord) -> shapes.EvaluationRow:
    low, high = (record.metrics.get(f"success_{end}") for end in ("low", "high"))
    suite = "/".join(each for each in (record.suite, record.entry) if each) or None
    return shapes.EvaluationRow(
        id=record.id, step=record.model.step, success=record.metrics.get("success"), low=low, high=high, by=record.by,
        suite=suite, environment=record.conditions.environment, tasks=len(record.outcomes), time=record.time,
    )  # fmt: skip


def config_view(run: RunFolder) -> shapes.ConfigView:
    text, problem = (run.path / CONFIG).read_text(encoding="utf-8", errors="replace"), None
    try:
        options = _flat(quick_config(run).model_dump())
    except ValueError as error:
        problem = str(error)
        options = {}
    usual = _flat(TrainingConfig().model_dump())
    changed = [key for key, value in options.items() if key not in usual or usual[key] != value]
    return shapes.ConfigView(yaml=text, options=options, changed=changed, problem=problem)


def diff(runs: Sequence[RunFolder]) -> shapes.Diff:
    """Return the options in which runs differ, and their last metrics."""
    options = [_flat(quick_config(run).model_dump()) for run in runs]
    last = [
        {k: v for row in run.metrics() for k, v in row.items() if k not in ("step", "time")} for run in runs
    ]
    rows = [row for row in _beside(options) if any(value != row.values[0] for value in row.values)]
    return shapes.Diff(runs=[run.name for run in runs], rows=rows, metrics=_beside(last))


def _beside(columns: Sequence[dict[str, Any]]) -> list[shapes.DiffRow]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return [shapes.DiffRow(key=key, values=[column.get(key) for column in columns]) for key in keys]


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def metrics_part(run: RunFolder, after: int = 0) -> shapes.MetricsPart:
    """Return the metrics of the steps after a byte, as columns."""
    part = read_on(run.path / METRICS, _after(after), PART)
    found = shapes.MetricsPart(
        offset=part.place.offset, again=part.again, more=part.more, steps=[], times=[], series={}
    )
    for line in part.data.splitlines():
        try:
            row = read_json(line)
            step, count = int(row.pop("step")), len(found.steps)
        except (ValueError, LookupError, TypeError, AttributeError):
            found.unread += 1
            continue
        found.steps.append(step)
        found.times.append(row.pop("time", None))
        for name, value in row.items():
            if isinstance(value, int | float):
                column = found.series.setdefault(OLD_METRICS.get(name, name), [])
                column += [None] * (count - len(column)) + [float(value)]
    for column in found.series.values():
        column += [None] * (len(found.steps) - len(column))
    return found


def log_part(run: RunFolder, after: int = 0) -> shapes.LogPart:
    """Return what a run's process has printed after a byte; a negative one counts from the end."""
    path = run.path / LOG
    if after < 0:
        after = max(0, _stat(path)[1] + after)
        skip = len(read_on(path, Place(after), 1).data) if after else 0  # half a line
        after += skip
    part = read_on(path, _after(after), LOG_PART)
    text = part.data.decode("utf-8", "replace")
    return shapes.LogPart(offset=part.place.offset, again=part.again, more=part.more, text=text)


def _after(offset: int) -> Place:
    return Place(offset, b"\n" if offset else b"")
