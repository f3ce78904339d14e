"""The folder of a run. All its files are plain JSON, YAML or safetensors.

    config.yaml         every option of the run
    chat_template.jinja the file that `model.chat_template` names, if it is set
    environment.json    where it ran: versions, device, commit; and what the ids of its config resolved to
    status.json         progress, and how the run ended
    metrics.jsonl       one line per step, with the machine's own metrics (`runs/system_metrics.py`)
    consumed.jsonl      the tasks of each step, with number, attempt and place of their groups
    trajectories.jsonl  every training episode
    kept.jsonl          rft: the episodes selected for training
    findings.jsonl      problems detected during training, and when each was gone
    evaluations.jsonl   held-out evaluations, during training and by `tfactory eval`
    tool_calls.jsonl    every tool call, for `--replay`; tools.json: the tool schemas that the model saw
    images/             images of episodes and tool calls, ab/<digest>.png, each written once
    annotations.json    tags, note and archive mark that the user sets; see `runs/annotations.py`
    checkpoints/        step-000025/: model, optimizer, and state.json with the sizes of the .jsonl files above

The .jsonl files are append-only. After `kill -9` at any moment a run resumes from its last checkpoint: the files are
truncated to their size at that checkpoint, and everything after it depends only on the config and the step.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import yaml
from pydantic import TypeAdapter

from TrainingFactory import __version__
from TrainingFactory.common.images import IMAGES_FOLDER, ImageStore
from TrainingFactory.common.texts import iter_secrets, redact_environment
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.problems import Problem
from TrainingFactory.data.disk import (
    delete_training_state,
    name_file_on_error,
    open_regular_file,
    read_lines,
    read_small_file,
    remove_folder,
    sync,
    write_atomically,
)
from TrainingFactory.data.trajectories import load_trajectories, save_trajectories
from TrainingFactory.runs.notebook_view import render_run
from TrainingFactory.runs.scores import Scores
from TrainingFactory.runs.tracking import format_metrics_line
from TrainingFactory.tools.recording import CALLS_FILE
from TrainingFactory.types import Trajectory

try:
    import fcntl
except ImportError:  # Windows: without a lock, two processes can write the same run
    fcntl = None

IMAGE_DIGEST = re.compile(rb'"digest": ?"([0-9a-f]{64})"')  # of an image
METRICS, CONSUMED, TRAJECTORIES, KEPT = "metrics.jsonl", "consumed.jsonl", "trajectories.jsonl", "kept.jsonl"
FINDINGS, EVALUATIONS = "findings.jsonl", "evaluations.jsonl"
APPEND_ONLY_FILES = (METRICS, CONSUMED, TRAJECTORIES, KEPT, FINDINGS, EVALUATIONS, CALLS_FILE)
LOGGED_PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors", "numpy")
CONFIG, ENVIRONMENT, STATUS = "config.yaml", "environment.json", "status.json"
CHAT_TEMPLATE = "chat_template.jinja"  # copy of the file that `model.chat_template` names
NOTES_KEY = "resolved"  # key of environment.json: what the config's ids and model resolved to, a line each
SECRET_IN_CONFIG = (
    "contains a secret, which would be saved in the run's config. Put the secret into an environment variable and set "
    "the option that ends in _env to its name, or write ${NAME} in options of tools"
)
# old name of a metric -> present name
NEW_NAMES = {"clipped": "clip_fraction", "sampler_gap": "logprob_diff", "explained": "explained_variance"}
State = Literal["running", "finished", "interrupted", "failed", "killed"]


@dataclass(slots=True)
class Status:
    """Contents of status.json. `status` stays "running" if the process is killed; `RunFolder.state` detects that."""

    status: State
    step: int = 0
    steps: int = 0
    reason: str | None = None
    seconds: float = 0.0


_STATUS_ADAPTER = TypeAdapter(Status)  # built once, because building it takes longer than reading a file


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_descriptor: int | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def images(self) -> ImageStore:
        """Return the store with the images of the run's episodes and tool calls."""
        return ImageStore(self.path / IMAGES_FOLDER)

    @property
    def display_path(self) -> str:
        """Return the run as an argument of a shell command: its name if it is in `runs`, else its path."""
        return shlex.quote(self.name if self.path.parent == Path("runs") else str(self.path))

    @property
    def resume_command(self) -> str:
        return f"tfactory runs resume {self.display_path}"

    @property
    def fix_instruction(self) -> str:
        """Return the instruction for a run that stopped with an error."""
        return f"Fix the problem (options are in {self.path / CONFIG}), then run: {self.resume_command}"

    # creating and opening

    @classmethod
    def create(
        cls,
        config: TrainingConfig,
        name: str,
        run_info: dict[str, Any],
        num_steps: int = 0,
        chat_template: str | None = None,
    ) -> RunFolder:
        """Create and lock a new run. `run_info` is added to the `fingerprint` in environment.json, and `chat_template`
        is the text of `model.chat_template`. The folder has a temporary name until it is complete; a temporary folder
        that a killed process left is reused."""
        check_run_name(name)
        path = Path(config.logging.output_dir).expanduser() / name
        options = config.model_dump()
        if path.is_dir() and any(path.iterdir()):
            resume_hint = f"resume it: {cls(path).resume_command}"
            remedy = resume_hint if is_run(path) else "remove the folder, which is not a run"
            raise ValueError(f"run {name} already exists in {path}. Choose another --name, or {remedy}")
        if problems := [Problem(key, SECRET_IN_CONFIG) for key, _ in iter_secrets(options)]:
            raise config.wrong(problems)
        run = cls(path.with_name(f".{name}.part"))
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
            write_atomically(run.path / CONFIG, yaml.safe_dump(redact_environment(options), sort_keys=False))
            write_atomically(
                run.path / ENVIRONMENT, json.dumps(redact_environment(fingerprint() | run_info), indent=1)
            )
            if chat_template is not None:
                write_atomically(run.path / CHAT_TEMPLATE, chat_template)
            run.write_status(Status("running", steps=num_steps))
            os.rename(run.path, path)
            sync(path.parent)
        except OSError as error:
            run.discard()
            raise ValueError(f"cannot write run folder {path}: {error.strerror or error}") from error
        run.path = path
        return run

    @classmethod
    def find(cls, name: str, runs: str | Path = "runs") -> RunFolder:
        """Return the run with this name in the folder `runs`, or at this path; raise ValueError if there is none."""
        for path in (Path(runs).expanduser() / name, Path(name).expanduser()):
            if is_run(path):
                return cls(path)
        if (path := Path(runs).expanduser() / name).is_dir():
            raise ValueError(
                f"{path} is not a complete run: {CONFIG} or {ENVIRONMENT} is missing. Restore or remove it"
            )
        run_names = ", ".join(run.name for run in list_runs(runs)) or "none"
        raise ValueError(f"there is no run {name!r} in {runs}. Existing runs: {run_names}")

    def lock(self) -> None:
        """Lock the run against other writers; the operating system releases the lock when this process exits."""
        if fcntl is None or self._lock_descriptor is not None:
            return
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(3):  # `_is_locked` of another process may hold it for a moment
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock_descriptor = descriptor
                return
            time.sleep(0.1)
        os.close(descriptor)
        raise ValueError(f"run {self.name} is in use by another process. Stop that process, or wait for it")

    def unlock(self) -> None:
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def discard(self) -> None:
        """Remove a run that failed before its first step."""
        self.unlock()
        with contextlib.suppress(OSError):
            remove_folder(self.path)

    # reading

    @property
    def config(self) -> TrainingConfig:
        with contextlib.suppress(OSError):  # load_config raises a clearer error
            read_small_file(self.path / CONFIG)
        return load_config(self.path / CONFIG)

    @property
    def run_info(self) -> dict[str, Any]:
        """Return the contents of environment.json; raise ValueError if the file is damaged."""
        try:
            run_info = json.loads(read_small_file(self.path / ENVIRONMENT))
            date.fromisoformat(itemgetter("day", "versions", "commit", "started")(run_info)[0])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"cannot read {self.path / ENVIRONMENT} ({error!r}), so run {self.name} cannot be resumed. Start a new "
                f"run: tfactory train {self.path / CONFIG} --name NAME"
            ) from error
        return run_info

    @property
    def status(self) -> Status:
        """Return the contents of status.json; if it is damaged, a status derived from the metrics and the config."""
        with contextlib.suppress(OSError, ValueError):
            return _STATUS_ADAPTER.validate_json(read_small_file(self.path / STATUS))
        step = max((row.get("step", 0) for row in self._read_rows(METRICS)), default=0)
        steps = self.config.training.max_steps or 0
        return Status("running", step, steps, f"cannot read {STATUS}; the step is taken from {METRICS}")

    @property
    def state(self) -> State:
        saved_state = self.status.status
        return "killed" if saved_state == "running" and not self._is_locked() else saved_state

    def metrics(self) -> list[dict[str, Any]]:
        """Return one row of metrics per step, with present names for metrics that older versions recorded."""
        rows = self._read_rows(METRICS)
        return [{NEW_NAMES.get(name, name): value for name, value in row.items()} for row in rows]

    def read_findings(self) -> list[dict[str, Any]]:
        """Return the rows of findings.jsonl: one when a finding appeared, and one with `gone` when it disappeared."""
        return self._read_rows(FINDINGS)

    def read_consumed_tasks(self) -> dict[int, list[str]]:
        """Return the task ids of each step."""
        return {row["step"]: row["tasks"] for row in self._read_rows(CONSUMED)}

    def read_ledger(self) -> list[dict[str, Any]]:
        """Return one row per step, with its `tasks` and the number, attempt and place of each of its `groups`."""
        return self._read_rows(CONSUMED)

    def episodes(self, step: int) -> list[Trajectory]:
        """Return the episodes of a step, counted from 1; the names of groups count steps from 0."""
        return list(load_trajectories(self.path / TRAJECTORIES, f"{step - 1}/", is_growing=True))

    def _read_rows(self, file_name: str) -> list[dict[str, Any]]:
        """Return the rows of a .jsonl file. Invalid lines are skipped, such as the last line of a killed process."""
        rows = []
        for line in read_lines(self.path / file_name):
            with contextlib.suppress(ValueError, RecursionError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first. An incomplete checkpoint has a name with a leading dot."""
        paths = (self.path / "checkpoints").glob("step-*")
        return sorted((path for path in paths if re.fullmatch(r"step-\d+", path.name)), key=_parse_step)

    def best(self) -> Path | None:
        """Return the existing checkpoint with the best held-out score; None if no checkpoint has one."""
        checkpoints = {_parse_step(path): path for path in self.checkpoints()}
        best_score = Scores.from_rows(row for row in self.metrics() if row.get("step") in checkpoints).best
        return None if best_score is None else checkpoints[best_score[0]]

    # writing

    def write_status(self, status: Status) -> None:
        write_atomically(self.path / STATUS, json.dumps(redact_environment(asdict(status)), indent=1))

    def record_notes(self, notes: Iterable[str]) -> None:
        """Add lines to the notes of environment.json. Skip lines that it already has, because a resumed run adds them
        again."""
        run_info = self.run_info
        recorded_notes = run_info.setdefault(NOTES_KEY, [])
        if new_notes := [note for note in notes if note not in recorded_notes]:
            recorded_notes += new_notes
            write_atomically(self.path / ENVIRONMENT, json.dumps(redact_environment(run_info), indent=1))

    def append(self, file_name: str, row: dict[str, Any]) -> None:
        with (
            name_file_on_error(path := self.path / file_name),
            path.open("a", encoding="utf-8", newline="\n") as file,
        ):
            file.write(json.dumps(row) + "\n")

    def append_trajectories(self, trajectories: Iterable[Trajectory], file_name: str = TRAJECTORIES) -> None:
        save_trajectories(self.path / file_name, trajectories, append=True)

    def checkpoint_folder(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    def sync_files(self) -> dict[str, int]:
        """Flush the append-only files to disk and return their sizes in bytes, 0 for a missing one."""
        file_sizes: dict[str, int] = dict.fromkeys(APPEND_ONLY_FILES, 0)
        for file_name in APPEND_ONLY_FILES:
            if (path := self.path / file_name).exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                file_sizes[file_name] = path.stat().st_size
        return file_sizes

    def prune(
        self, keep_last: int, keep_every: int | None, keep_best: bool = False, optimizer_states: str = "all"
    ) -> None:
        """Keep the last `keep_last` checkpoints, those at every `keep_every` steps and, with `keep_best`, the best;
        remove the others. If `optimizer_states` is "newest", remove the optimizer state of all but the newest."""
        best_checkpoint = self.best() if keep_best else None
        for checkpoint in self.checkpoints()[:-keep_last]:
            if checkpoint != best_checkpoint and (keep_every is None or _parse_step(checkpoint) % keep_every):
                remove_folder(checkpoint)
        if optimizer_states == "newest":
            for checkpoint in self.checkpoints()[:-1]:
                delete_training_state(checkpoint)

    def rewind(self, offsets: dict[str, int]) -> None:
        """Truncate the append-only files to the `offsets` of a checkpoint (files not in it: to 0 bytes) and remove
        incomplete checkpoints."""
        for file_name in APPEND_ONLY_FILES:
            path, offset = self.path / file_name, offsets.get(file_name, 0)
            size = path.stat().st_size if path.exists() else 0
            if size < offset:
                raise ValueError(
                    f"{path} has {size} bytes, but {offset} when the checkpoint was saved. Restore the file, or start "
                    "a new run"
                )
            if size > offset:
                eval_lines = self._read_eval_lines(offset) if file_name == EVALUATIONS else b""
                os.truncate(path, offset)
                with path.open("ab") as file:
                    file.write(eval_lines)
        for leftover_folder in (self.path / "checkpoints").glob(".*"):
            shutil.rmtree(leftover_folder, ignore_errors=True)
        self.remove_unused_images()

    def remove_unused_images(self) -> int:
        """Remove the images that no file of the run names, and return their number. The run must be locked."""
        if not self.images.folder.is_dir():
            return 0
        used_digests: set[str] = set()
        for path in self.path.glob("*.jsonl*"):  # also files that an evaluation is writing
            with path.open("rb") as file:
                used_digests.update(digest.decode() for line in file for digest in IMAGE_DIGEST.findall(line))
        return self.images.remove_unused(used_digests)

    def _read_eval_lines(self, offset: int) -> bytes:
        """Return the lines that `tfactory eval` wrote to evaluations.jsonl, from byte `offset`. Those of training are
        left out, because the resumed run repeats these evaluations."""
        lines = (self.path / EVALUATIONS).read_bytes()[offset:].splitlines(keepends=True)
        return b"".join(line for line in lines if b'"by": "eval"' in line and line.endswith(b"\n"))

    def _is_locked(self) -> bool:
        if fcntl is None or self._lock_descriptor is not None:
            return True
        try:
            with open_regular_file(self.path / "lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (OSError, ValueError):  # no lock file, or not a regular file
            pass
        return False


@dataclass(slots=True)
class TrainingReport:
    """Result of a training run. `metrics` are the metrics of the last step, `rows` the metrics of every step. `tools`
    are the metrics over all tool calls since the start or the last resume."""

    run: Path
    steps: int
    state: State
    # Not in repr(), which would fill a screen.
    metrics: dict[str, float] = field(default_factory=dict, repr=False)
    rows: list[dict[str, float]] = field(default_factory=list, repr=False)
    tools: dict[str, float] = field(default_factory=dict, repr=False)
    version: str | None = None  # registered version, such as agent:3; None if the run was not registered

    @property
    def checkpoint(self) -> Path | None:
        checkpoints = RunFolder(self.run).checkpoints()
        return checkpoints[-1] if checkpoints else None

    @property
    def best(self) -> Path | None:
        return RunFolder(self.run).best()

    def _repr_html_(self) -> str:
        """Return the report for a notebook: a table and charts by step."""
        facts = [("run", self.run), ("state", self.state), ("steps", self.steps)]
        facts += [] if self.version is None else [("registered as", self.version)]
        facts += [("last step", metrics_text)] if (metrics_text := format_metrics_line(self.metrics)) else []
        return render_run(f"Run {self.run.name}", facts, self.rows)


def check_run_name(name: str) -> None:
    if not re.fullmatch(r"[^\s./\\][^/\\\n]*", name):
        raise ValueError(f"invalid run name {name!r}: use a folder name, such as search-1")


def is_run(path: Path) -> bool:
    # `isfile` returns False without permission, and raises no error.
    return all(os.path.isfile(path / name) for name in (CONFIG, ENVIRONMENT))


def list_runs(runs: str | Path = "runs") -> list[RunFolder]:
    """Return the runs of a folder, oldest first."""
    paths = [path for path in Path(runs).expanduser().glob("[!.]*/") if is_run(path)]
    return [RunFolder(path) for path in sorted(paths, key=lambda path: (path / CONFIG).stat().st_mtime)]


def pick_run_name(config: TrainingConfig) -> str:
    """Return a name such as grpo-search-20260131-120000."""
    folder = Path(config.logging.output_dir).expanduser()
    environment_id = config.environment.environment_id or "custom"
    return find_unused_path(folder, f"{config.training.algorithm}-{shorten_environment(environment_id)}").name


def shorten_environment(environment_id: str) -> str:
    return Path(environment_id).name.partition(".py")[0]


def find_unused_path(folder: Path, stem: str, suffix: str = "") -> Path:
    """Return an unused path in the folder, with the present time in its name."""
    stem = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = folder / f"{stem}{suffix}"
    attempt = 1
    while path.exists() or path.with_name(path.name + ".part").exists():
        attempt += 1
        path = folder / f"{stem}-{attempt}{suffix}"
    return path


def fingerprint() -> dict[str, Any]:
    """Return the run's dependencies besides its config: software versions, platform, commit and date."""
    versions = {"python": platform.python_version(), "training-factory": __version__}
    for package in LOGGED_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "id": uuid4().hex,  # because the name of a deleted run can be reused
        "versions": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "commit": _find_git_commit(),
        "day": date.today().isoformat(),  # some chat templates print the date; a resumed run keeps the first one
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _find_git_commit() -> str | None:
    """Return the git commit of the current folder; None outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def _parse_step(checkpoint_folder: Path) -> int:
    return int(checkpoint_folder.name.removeprefix("step-"))
