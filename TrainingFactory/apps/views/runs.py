"""Views of runs: the list of runs in a folder, one run in full, and its metrics and log from a byte offset on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from statistics import fmean

from TrainingFactory.apps.views import shapes
from TrainingFactory.apps.views.episodes import READ_ERRORS
from TrainingFactory.apps.views.files import (
    FilePosition,
    ReadProblems,
    format_reason,
    read_json,
    read_last_lines,
    read_new_lines,
)
from TrainingFactory.common.texts import pluralize, replace_surrogates
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.disk import read_small_file
from TrainingFactory.evaluation.records import read_records
from TrainingFactory.registry.lineage import describe_node, get_base, get_parent, list_ancestors, read_tools
from TrainingFactory.runs import folder as run_files
from TrainingFactory.runs.annotations import ANNOTATIONS_FILE, read_annotations
from TrainingFactory.runs.folder import CONFIG, ENVIRONMENT, FINDINGS, METRICS, STATUS, RunFolder, is_run
from TrainingFactory.tools.recording import SPECS_FILE

NUM_SPARK_POINTS = 60  # of a sparkline
LOCK_STATES = ("running", "killed")  # states that only the lock distinguishes
MAX_METRICS_BYTES = 8 << 20  # maximum bytes of metrics in a response
LOG = "run.log"  # output of the run, if it was redirected
MAX_LOG_BYTES = 256 << 10  # maximum bytes of the log in a response
LISTED_METRICS = (
    "step", "reward", "loss", "tokens_per_second", "eval/success", "eval/success_low", "eval/success_high",
)  # fmt: skip
NUMERIC = (int, float)
# Files that a row is computed from; the last one is no progress of the run.
WATCHED_FILES = (METRICS, STATUS, CONFIG, ENVIRONMENT, FINDINGS, run_files.EVALUATIONS, ANNOTATIONS_FILE)
BASE_MODEL = "the base model"
UNLISTED_OPTIONS = ("logging.", "registry.")  # of a row: where results go, not how they come about
MAX_OPTION_CHARS = 80  # characters of an option's value in a row
RUN_COMMANDS = ("runs show", "runs stop", "runs resume", "runs report", "eval", "serve", "runs episodes")


@dataclass(slots=True)
class _CachedRun:
    """The cached row of a run, the state of its files when the row was made, and the position up to which metrics.jsonl
    was read."""

    file_stats: list[tuple[int, int]] = field(default_factory=list)
    row: shapes.RunRow | None = None
    position: FilePosition = field(default_factory=FilePosition)
    curves: dict[str, array[float]] = field(default_factory=dict)
    latest_metrics: dict[str, float] = field(default_factory=dict)

    def add_metrics(self, path: Path) -> None:
        """Read the metrics that were appended since the last call; skip invalid lines."""
        has_more = True
        while has_more:
            chunk = read_new_lines(path, self.position, MAX_METRICS_BYTES)
            if chunk.was_truncated:
                self.curves, self.latest_metrics = {}, {}
            self.position, has_more = chunk.position, chunk.has_more
            for line in chunk.lines:
                with contextlib.suppress(*READ_ERRORS):
                    self._add_row(read_json(line))

    def _add_row(self, row: shapes.Json) -> None:
        numbers = {name: float(row[name]) for name in LISTED_METRICS if isinstance(row.get(name), NUMERIC)}
        self.latest_metrics |= numbers
        if "eval/success" in numbers:
            self.latest_metrics["eval/step"] = numbers.get("step", 0.0)
        for name in ("reward", "loss"):
            if isfinite(numbers.get(name, nan)):
                self.curves.setdefault(name, array("d")).append(numbers[name])


class Runs:
    """Thread-safe list of the runs in a folder. It reads a run again only if the run's files have changed; otherwise
    its row stays the same object."""

    def __init__(self, folder: str | Path = "runs") -> None:
        self.folder = Path(folder).expanduser()
        self._cached_runs, self._lock = dict[Path, _CachedRun](), threading.Lock()

    def list_rows(self) -> list[shapes.RunRow]:
        """Return a row for each run, the oldest first. `problem` says why a run cannot be read."""
        with self._lock:
            self._cached_runs = {
                path: self._cached_runs.get(path, _CachedRun()) for path in self._list_folders()
            }
            return [self._load_row(RunFolder(path)) for path in self._cached_runs]

    def get_row(self, run: RunFolder) -> shapes.RunRow:
        with self._lock:
            return self._load_row(run)

    def find(self, name: str) -> RunFolder:
        """Return the run of that name; raise ValueError if the folder has none. The name is never used as a path."""
        if name in {path.name for path in self._list_folders()}:
            return RunFolder(self.folder / name)
        raise ValueError(f"there is no run {name!r} in {self.folder}")

    def _list_folders(self) -> list[Path]:
        files = [file for name in (ENVIRONMENT, CONFIG) for file in self.folder.glob(f"[!.]*/{name}")]
        times_by_folder = {file.parent: (stat_file(file)[0], file) for file in files}
        return sorted(times_by_folder, key=times_by_folder.__getitem__)

    def _load_row(self, run: RunFolder) -> shapes.RunRow:
        cached = self._cached_runs.setdefault(run.path, _CachedRun())
        stats = [stat_file(run.path / name) for name in WATCHED_FILES]
        row = cached.row
        if row is None or stats != cached.file_stats or (row.state in LOCK_STATES and row.state != run.state):
            updated_at = max(stats[:-1])[0] / 1e9  # an annotation is no progress of the run
            cached.file_stats, cached.row = stats, (row := _make_run_row(run, cached, updated_at))
        return row


def stat_file(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def _make_run_row(run: RunFolder, cached_run: _CachedRun, updated_at: float) -> shapes.RunRow:
    """Summarise one run for the list. If a file cannot be read, `problem` names it, and the data of the other files is
    still shown."""
    row = shapes.RunRow(name=replace_surrogates(run.name), state="unreadable", updated=updated_at)
    if row.name != run.name:
        row.problem = "Run folder name is not valid UTF-8. Rename the folder."
        return row
    problems, config = ReadProblems(), None
    with problems.record_errors(METRICS):
        cached_run.add_metrics(run.path / METRICS)
        _add_metrics(row, cached_run)
    if not is_run(run.path):
        row.problem = f"Incomplete run: {CONFIG} or {ENVIRONMENT} is missing."
        return row
    with problems.record_errors(CONFIG):
        config = run.config
        _add_config(row, config)
    with problems.record_errors(STATUS):
        status = run.status
        row.step, row.steps, row.seconds = status.step, status.steps, status.seconds
        row.state = run.state
    with problems.record_errors(FINDINGS):
        row.findings = sum(finding.last_step is None for finding in list_findings(run, problems.texts.append))
    with problems.record_errors(run_files.EVALUATIONS):
        if config is not None and row.state != "running":  # a running run's own evaluations are the newest
            row.heldout = _find_newest_evaluation(run, row.heldout, config) or row.heldout
    with problems.record_errors(ANNOTATIONS_FILE):
        annotations = read_annotations(run)
        row.archived, row.tags, row.note = annotations.archived, annotations.tags, annotations.note
    with problems.record_errors(ENVIRONMENT):
        row.started = str(run.run_info["started"]).replace(" ", "T")
    row.problem = problems.texts[0] if problems.texts else None
    return row


def _add_metrics(row: shapes.RunRow, cached_run: _CachedRun) -> None:
    latest = cached_run.latest_metrics
    row.reward, row.loss, row.tokens_per_second = map(latest.get, ("reward", "loss", "tokens_per_second"))
    row.spark_of = "reward" if "reward" in cached_run.curves else "loss"
    row.spark = _downsample(cached_run.curves.get(row.spark_of, ()))
    if isfinite(latest.get("eval/step", nan)):
        low, high = latest.get("eval/success_low"), latest.get("eval/success_high")
        row.heldout = shapes.Heldout(
            value=latest["eval/success"], low=low, high=high, step=int(latest["eval/step"])
        )


def _add_config(row: shapes.RunRow, config: TrainingConfig) -> None:
    row.algorithm, row.model = config.training.algorithm, config.model.name
    environment, data = config.environment, config.data
    default_environment = "conversation" if config.tools or data.tasks else None
    row.environment = environment.environment_id or environment.command or data.dataset or default_environment
    row.seed, row.options = config.training.seed, _select_options(config)


def _select_options(config: TrainingConfig) -> shapes.Json:
    """Return the options that differ from their defaults. A long value is cut, with a digest that distinguishes it from
    other values with the same beginning."""
    options, defaults = _flatten(config.model_dump()), _flatten_defaults()
    changes = {key: value for key, value in options.items() if key not in defaults or defaults[key] != value}
    return {
        key: _shorten_value(value) for key, value in changes.items() if not key.startswith(UNLISTED_OPTIONS)
    }


def _shorten_value(value: object) -> object:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= MAX_OPTION_CHARS:
        return value
    return f"{text[:MAX_OPTION_CHARS]}… {hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"


@cache
def _flatten_defaults() -> shapes.Json:
    return _flatten(TrainingConfig().model_dump())


def _find_newest_evaluation(
    run: RunFolder, heldout: shapes.Heldout | None, config: TrainingConfig
) -> shapes.Heldout | None:
    """Return the most recent `tfactory eval` result in the run's environment (in any, if the run has none), if it
    evaluates the best checkpoint or no earlier step than the run's own evaluation."""
    env_id = config.environment.environment_id
    for line in reversed(read_last_lines(run.path / run_files.EVALUATIONS, MAX_METRICS_BYTES)[0]):
        with contextlib.suppress(*READ_ERRORS):  # the run's page reports unreadable lines
            row = make_evaluation_row(read_json(line)) if b'"by": "eval"' in line else None
            if row is None or row.success is None or row.step is None or row.suite:
                continue
            if env_id is not None and row.environment not in (env_id, Path(env_id).name):
                continue
            if heldout is None or row.step >= heldout.step or run.checkpoint_folder(row.step) == run.best():
                note = f"tfactory eval, {pluralize(row.tasks, 'task')} of {row.environment or 'conversation'}"
                return shapes.Heldout(**row.model_dump() | {"value": row.success, "by": note})
    return None


def _downsample(values: Sequence[float]) -> list[float]:
    """Return at most NUM_SPARK_POINTS values: the first, the last, and means of equal parts between them."""
    if len(values) <= NUM_SPARK_POINTS:
        return list(values)
    bounds = [1 + n * (len(values) - 2) // (NUM_SPARK_POINTS - 2) for n in range(NUM_SPARK_POINTS - 1)]
    return [values[0], *(fmean(values[start:end]) for start, end in pairwise(bounds)), values[-1]]


def list_findings(run: RunFolder, notify: Callable[[str], None] = lambda _: None) -> list[shapes.FindingRow]:
    """Return each finding of a run once, with the steps of its last occurrence. `notify` gets a text for each invalid
    row."""
    rows: dict[str, shapes.FindingRow] = {}
    for row_number, record in enumerate(run.read_findings(), 1):
        try:
            earlier_row = rows.get(record["name"])
            if not record.get("gone"):
                num_times = earlier_row.times + 1 if earlier_row else 1
                rows[record["name"]] = shapes.FindingRow(**record, first_step=record["step"], times=num_times)
            elif earlier_row is not None and earlier_row.last_step is None:
                earlier_row.last_step = record["step"] - 1
        except READ_ERRORS as error:
            notify(f"{FINDINGS}: row {row_number} is not a finding: {format_reason(error)}")
    return list(rows.values())


def make_run_view(run: RunFolder, runs: Runs) -> shapes.RunView:
    """Return a run in full; `notes` names the files that cannot be read."""
    problems, row, prefix_length = ReadProblems(), runs.get_row(run), len("step-")
    files = sorted(path for path in run.path.iterdir() if path.is_file() and not path.name.startswith("."))
    view = shapes.RunView(
        row=row, commands={command.split()[-1]: f"tfactory {command} {run.display_path}" for command in RUN_COMMANDS},
        files=[{"name": path.name, "bytes": path.stat().st_size} for path in files], notes=[],
    )  # fmt: skip
    with problems.record_errors(ENVIRONMENT):
        run_info = run.run_info
        view.about = {key: value for key, value in run_info.items() if key != "model"}
        parent = get_parent({"about": run_info})
        base_row = {"name": row.model, "what": BASE_MODEL, "rows": []}
        view.lineage = make_lineage_rows(parent) if parent else [base_row]
    with problems.record_errors(STATUS):
        view.reason = run.status.reason
    with problems.record_errors("checkpoints"):
        best_checkpoint = run.best()
        pairs = [(path.name, path == best_checkpoint) for path in run.checkpoints()]
        view.checkpoints = [
            {"name": name, "step": int(name[prefix_length:]), "best": is_best} for name, is_best in pairs
        ]
    with problems.record_errors(FINDINGS):
        view.findings = list_findings(run, problems.texts.append)
    with problems.record_errors(run_files.EVALUATIONS):
        records = read_records(
            run.path / run_files.EVALUATIONS, lambda note: problems.texts.append(note.removeprefix("note: "))
        )
        view.evaluations = [make_evaluation_row(entry.model_dump(exclude={"outcomes"})) for entry in records]
    with problems.record_errors("tools"):
        for name in (SPECS_FILE, run_files.TRAJECTORIES):
            read_new_lines(run.path / name, FilePosition(), 1)  # raises for a file that is not a regular one
        view.tools = read_tools(run)["names"]
    view.notes = problems.texts
    return view


def make_lineage_rows(node: shapes.Json) -> list[shapes.Json]:
    descriptions = [(ancestor.get("run"), *describe_node(ancestor)) for ancestor in list_ancestors(node)]
    run_rows = [{"name": run, "what": title, "rows": rows} for run, title, rows in descriptions if run]
    return [{"name": get_base(node), "what": BASE_MODEL, "rows": []}, *run_rows]


def make_evaluation_row(record: shapes.Json) -> shapes.EvaluationRow:
    """Return the row of an evaluation record; keys that another version did not write are optional."""
    metrics = record.get("metrics", {})
    success, low, high = (metrics.get(f"success{suffix}") for suffix in ("", "_low", "_high"))
    conditions, suite = record.get("conditions", {}), [record.get("suite"), record.get("entry")]
    return shapes.EvaluationRow(
        id=record.get("id", ""), step=record.get("model", {}).get("step"), success=success, low=low, high=high,
        by=record.get("by", ""), suite="/".join(filter(None, suite)) or None, environment=conditions.get("environment"),
        tasks=conditions.get("count", 0), time=record.get("time", ""),
    )  # fmt: skip


def make_config_view(run: RunFolder) -> shapes.ConfigView:
    """Return the options of a run, and the keys that differ from the defaults."""
    yaml_text = read_small_file(run.path / CONFIG).decode("utf-8", "replace")
    try:
        options, defaults = _flatten(run.config.model_dump()), _flatten_defaults()
    except ValueError as error:
        return shapes.ConfigView(yaml=yaml_text, options={}, changed=[], problem=str(error))
    changed_keys = [key for key, value in options.items() if key not in defaults or defaults[key] != value]
    return shapes.ConfigView(yaml=yaml_text, options=options, changed=changed_keys)


def diff_runs(runs: Sequence[RunFolder]) -> shapes.RunDiff:
    """Return the options in which the runs differ, and the last value of each metric."""
    options = _align_columns([_flatten(run.config.model_dump()) for run in runs])
    latest_metrics = [{key: value for row in run.metrics() for key, value in row.items()} for run in runs]
    rows = [row for row in options if any(value != row["values"][0] for value in row["values"])]
    return shapes.RunDiff(runs=[run.name for run in runs], rows=rows, metrics=_align_columns(latest_metrics))


def _align_columns(columns: Sequence[shapes.Json]) -> list[shapes.Json]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return [{"key": key, "values": [column.get(key) for column in columns]} for key in keys]


def _flatten(options: shapes.Json, prefix: str = "") -> shapes.Json:
    flattened: shapes.Json = {}
    for key, value in options.items():
        flattened |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flattened


def read_metrics_part(run: RunFolder, start_offset: int = 0) -> shapes.MetricsPart:
    """Return the metrics after byte `start_offset` of metrics.jsonl, as columns."""
    chunk = read_new_lines(run.path / METRICS, _make_position(start_offset), MAX_METRICS_BYTES)
    metrics = shapes.MetricsPart(offset=chunk.position.offset, again=chunk.was_truncated, more=chunk.has_more)
    for line in chunk.lines:
        try:
            row: shapes.Json = read_json(line)
            step, timestamp = int(row.pop("step")), row.pop("time", None)
            numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        except READ_ERRORS:
            metrics.unread += 1
            continue
        metrics.steps.append(step)
        metrics.times.append(timestamp if isinstance(timestamp, int | float) else None)
        for name, value in numbers.items():
            column = metrics.series.setdefault(run_files.NEW_NAMES.get(name, name), [])
            column += [None] * (len(metrics.steps) - 1 - len(column)) + [value]
    for column in metrics.series.values():
        column += [None] * (len(metrics.steps) - len(column))
    return metrics


def read_log_part(run: RunFolder, offset: int = 0) -> shapes.LogPart:
    """Return the log after byte `offset` of its file; a negative value counts from the end."""
    path = run.path / LOG
    if offset < 0 and (offset := max(0, stat_file(path)[1] + offset)):
        offset = read_new_lines(path, FilePosition(offset), 1).position.offset  # start of the next whole line
    chunk = read_new_lines(path, _make_position(offset), MAX_LOG_BYTES)
    text = "".join(f"{line.decode('utf-8', 'replace')}\n" for line in chunk.lines)
    return shapes.LogPart(
        offset=chunk.position.offset, again=chunk.was_truncated, more=chunk.has_more, text=text
    )


def _make_position(offset: int) -> FilePosition:
    return FilePosition(offset, b"\n" if offset else b"")
