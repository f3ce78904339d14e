"""A run is a folder; everything in it can be read without us.

    config.yaml         every option of the run
    environment.json    what it ran on: versions, device, commit; and what its ids were found to be
    status.json         how far it is, and how it ended
    metrics.jsonl       a line per step
    consumed.jsonl      which tasks each step took, with number, attempt and place of their groups
    trajectories.jsonl  every episode of training
    kept.jsonl          rft: the episodes that were learned from
    findings.jsonl      what was seen going wrong, and when it was gone
    evaluations.jsonl   what its models did on held-out tasks, on the way and by `tfactory eval`
    tool_calls.jsonl    every tool call, as `--replay` serves it again; tools.json: what the model was told of them
    checkpoints/        step-000025/: the model, its optimiser, and in state.json how long the files above were

The files of lines only grow. After `kill -9` at any moment a run goes on from its last checkpoint: the files are cut
back to what they were then, and all that follows is a function of the config and the step.
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
from TrainingFactory.common.texts import redacted, secrets_in
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.problems import Problem
from TrainingFactory.data.disk import (
    drop_state,
    open_regular,
    read_lines,
    read_whole,
    remove,
    sync,
    write_aside,
    writing,
)
from TrainingFactory.data.trajectories import load_trajectories, save_trajectories
from TrainingFactory.runs.scores import Scores
from TrainingFactory.tools.recording import CALLS
from TrainingFactory.types import Trajectory

try:
    import fcntl
except ImportError:  # not on Windows: there two processes are not kept apart
    fcntl = None

METRICS, CONSUMED, TRAJECTORIES, KEPT = "metrics.jsonl", "consumed.jsonl", "trajectories.jsonl", "kept.jsonl"
FINDINGS, EVALUATIONS = "findings.jsonl", "evaluations.jsonl"
GROWING = (METRICS, CONSUMED, TRAJECTORIES, KEPT, FINDINGS, EVALUATIONS, CALLS)
PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors", "numpy")
CONFIG, ABOUT, STATUS = "config.yaml", "environment.json", "status.json"
RESOLVED = "resolved"  # key of environment.json: what the ids of the config were found to be, a line each
SECRET = (
    "holds a secret, and the config is kept with the run; put it into an environment variable, and its name into the "
    "option that ends in _env, or write ${NAME} where options of tools take it"
)
# Metrics by the names that older versions gave them.
OLD_METRICS = {"clipped": "clip_fraction", "sampler_gap": "logprob_diff", "explained": "explained_variance"}
State = Literal["running", "finished", "interrupted", "failed", "killed"]


@dataclass(slots=True)
class Status:
    """`status` running means that a process said so; whether it still lives, `RunFolder.state` tells."""

    status: State
    step: int = 0
    steps: int = 0
    reason: str | None = None
    seconds: float = 0.0


_STATUS = TypeAdapter(Status)  # making it takes longer than reading a file


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def shown(self) -> str:
        """Return what commands find it by: its name alone only in the usual folder."""
        return shlex.quote(self.name if self.path.parent == Path("runs") else str(self.path))

    @property
    def resume_command(self) -> str:
        return f"tfactory runs resume {self.shown}"

    @property
    def mend(self) -> str:
        """Say what to do about a run that has stopped."""
        return f"Mend it (options are in {self.path / CONFIG}), then go on with: {self.resume_command}"

    # making and opening

    @classmethod
    def create(cls, config: TrainingConfig, name: str, about: dict[str, Any], steps: int = 0) -> RunFolder:
        """Make a new run, locked; `about` goes to environment.json beside what we find out ourselves. The folder is
        made aside and renamed when it is whole; what a killed process left aside is used up."""
        if not re.fullmatch(r"[^\s./\\][^/\\\n]*", name):
            raise ValueError(f"{name!r} cannot name a run: it is the name of a folder, such as search-1")
        path, options = Path(config.logging.output_dir).expanduser() / name, config.model_dump()
        if path.is_dir() and any(path.iterdir()):
            go_on = f"go on with it: {cls(path).resume_command}"
            there = go_on if is_run(path) else "remove it: it is no run"
            raise ValueError(
                f"run {name} exists already in {path}; choose another name with --name, or {there}"
            )
        if found := [Problem(key, SECRET) for key, _ in secrets_in(options)]:
            raise config.wrong(found)
        run = cls(path.with_name(f".{name}.part"))
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
            write_aside(run.path / CONFIG, yaml.safe_dump(redacted(options), sort_keys=False))
            write_aside(run.path / ABOUT, json.dumps(redacted(fingerprint() | about), indent=1))
            run.write_status(Status("running", steps=steps))
            os.rename(run.path, path)
            sync(path.parent)
        except OSError as error:
            run.discard()
            raise ValueError(f"run folder {path} cannot be written: {error.strerror or error}") from error
        run.path = path
        return run

    @classmethod
    def find(cls, name: str, runs: str | Path = "runs") -> RunFolder:
        """Return the run of that name in the folder of runs, or of that path."""
        for path in (Path(runs).expanduser() / name, Path(name).expanduser()):
            if is_run(path):
                return cls(path)
        if (path := Path(runs).expanduser() / name).is_dir():
            raise ValueError(
                f"{path} is no run: {CONFIG} or {ABOUT} is missing; put it back, or remove the folder"
            )
        known = ", ".join(run.name for run in list_runs(runs)) or "none"
        raise ValueError(f"there is no run {name!r} in {runs}; the runs are: {known}")

    def lock(self) -> None:
        """Keep other processes from writing the run; the system gives the lock back however this one ends."""
        if fcntl is None or self._lock is not None:
            return
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(3):  # somebody may just be looking whether it is held
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = descriptor
                return
            time.sleep(0.1)
        os.close(descriptor)
        raise ValueError(
            f"run {self.name} is being written by another process; wait for it to end or stop it"
        )

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove a run that came to nothing before its first step."""
        self.unlock()
        with contextlib.suppress(OSError):
            remove(self.path)

    # what is in it

    @property
    def config(self) -> TrainingConfig:
        with contextlib.suppress(OSError):  # which load_config explains better
            read_whole(self.path / CONFIG)
        return load_config(self.path / CONFIG)

    @property
    def about(self) -> dict[str, Any]:
        """Return what environment.json says; raise ValueError where it is damaged."""
        try:
            found = json.loads(read_whole(self.path / ABOUT))
            date.fromisoformat(itemgetter("day", "versions", "commit", "started")(found)[0])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{self.path / ABOUT} cannot be read ({error!r}), so run {self.name} cannot go on as it began; "
                f"begin a new one: tfactory train {self.path / CONFIG} --name NAME"
            ) from error
        return found

    @property
    def status(self) -> Status:
        """Return what status.json says; where it is damaged, what the other files tell."""
        with contextlib.suppress(OSError, ValueError):
            return _STATUS.validate_json(read_whole(self.path / STATUS))
        rows, steps = self._rows(METRICS), self.config.training.max_steps or 0
        step = max((row.get("step", 0) for row in rows), default=0)
        return Status("running", step, steps, f"{STATUS} cannot be read; this is what {METRICS} tells")

    @property
    def state(self) -> State:
        status = self.status.status
        return "killed" if status == "running" and not self._held() else status

    def metrics(self) -> list[dict[str, Any]]:
        """Return one row per step; metrics that older versions wrote under another name have today's."""
        rows = self._rows(METRICS)
        return [{OLD_METRICS.get(name, name): value for name, value in row.items()} for row in rows]

    def findings(self) -> list[dict[str, Any]]:
        """Return a row for each thing that was seen going wrong, and one where it was gone."""
        return self._rows(FINDINGS)

    def consumed(self) -> dict[int, list[str]]:
        """Return the ids of the tasks that each step took."""
        return {row["step"]: row["tasks"] for row in self._rows(CONSUMED)}

    def ledger(self) -> list[dict[str, Any]]:
        """Return a row per step: its `tasks`, and number, attempt and place of each in `groups`."""
        return self._rows(CONSUMED)

    def episodes(self, step: int) -> list[Trajectory]:
        """Return the episodes of a step; groups are named by their step, counted from 0."""
        return list(load_trajectories(self.path / TRAJECTORIES, f"{step - 1}/", growing=True))

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a file, without half a line at the end, from a process that was killed."""
        rows = []
        for line in read_lines(self.path / name):
            with contextlib.suppress(ValueError, RecursionError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, the oldest first; only those written to the end have such a name."""
        found = (self.path / "checkpoints").glob("step-*")
        return sorted((path for path in found if re.fullmatch(r"step-\d+", path.name)), key=_step_of)

    def best(self) -> Path | None:
        """Return the checkpoint that did best on held-out tasks or rows, of those that are there; None where nothing
        was evaluated when one was made."""
        folders = {_step_of(path): path for path in self.checkpoints()}
        found = Scores.of(row for row in self.metrics() if row.get("step") in folders).best
        return None if found is None else folders[found[0]]

    # writing

    def write_status(self, status: Status) -> None:
        write_aside(self.path / STATUS, json.dumps(redacted(asdict(status)), indent=1))

    def append(self, name: str, row: dict[str, Any]) -> None:
        with writing(path := self.path / name), path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row) + "\n")

    def append_trajectories(self, trajectories: Iterable[Trajectory], name: str = TRAJECTORIES) -> None:
        save_trajectories(self.path / name, trajectories, append=True)

    def checkpoint_folder(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    def offsets(self) -> dict[str, int]:
        """Return how long the growing files are, when all of it is on the disk."""
        found: dict[str, int] = dict.fromkeys(GROWING, 0)
        for name in GROWING:
            if (path := self.path / name).exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                found[name] = path.stat().st_size
        return found

    def prune(self, last: int, every: int | None, best: bool = False, states: str = "all") -> None:
        """Keep the last `last` checkpoints, those at multiples of `every` steps, and if asked to the best. Where
        `states` is newest, the newest alone keeps its optimizer state."""
        kept = self.best() if best else None
        for old in self.checkpoints()[:-last]:
            if old != kept and (every is None or _step_of(old) % every):
                remove(old)
        for old in self.checkpoints()[:-1] if states == "newest" else ():
            drop_state(old)

    def rewind(self, offsets: dict[str, int]) -> None:
        """Cut the growing files back to a checkpoint (none: to nothing) and clear away what was half done."""
        for name in GROWING:
            path, wanted = self.path / name, offsets.get(name, 0)
            size = path.stat().st_size if path.exists() else 0
            if size < wanted:
                raise ValueError(f"{path} has {size} bytes, its checkpoint knows of {wanted}: it was changed")
            if size > wanted:
                kept = self._asked_for(wanted) if name == EVALUATIONS else b""
                os.truncate(path, wanted)
                with path.open("ab") as file:
                    file.write(kept)
        for leftover in (self.path / "checkpoints").glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _asked_for(self, start: int) -> bytes:
        """Return the lines of evaluations that somebody asked for; those of steps to be done again come again."""
        lines = (self.path / EVALUATIONS).read_bytes()[start:].splitlines(keepends=True)
        return b"".join(line for line in lines if b'"by": "eval"' in line and line.endswith(b"\n"))

    def _held(self) -> bool:
        if fcntl is None or self._lock is not None:
            return True
        try:
            with open_regular(self.path / "lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (OSError, ValueError):  # no lock file, or none that a run has made
            pass
        return False


@dataclass(slots=True)
class TrainingReport:
    """`metrics` are those of the last step; `rows` has those of all; `tools` has those of all tool calls together,
    since the start or the last resume."""

    run: Path
    steps: int
    state: State
    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    tools: dict[str, float] = field(default_factory=dict)
    version: str | None = None  # where the run was registered, such as agent:3

    @property
    def checkpoint(self) -> Path | None:
        found = RunFolder(self.run).checkpoints()
        return found[-1] if found else None

    @property
    def best(self) -> Path | None:
        return RunFolder(self.run).best()


def is_run(path: Path) -> bool:
    return all(os.path.isfile(path / name) for name in (CONFIG, ABOUT))  # one that is closed to us is none


def list_runs(runs: str | Path = "runs") -> list[RunFolder]:
    """Return the runs of a folder, the oldest first."""
    found = [path for path in Path(runs).expanduser().glob("[!.]*/") if is_run(path)]
    return [RunFolder(path) for path in sorted(found, key=lambda path: (path / CONFIG).stat().st_mtime)]


def new_name(config: TrainingConfig) -> str:
    """Return a name such as grpo-search-20260131-120000."""
    folder, environment = Path(config.logging.output_dir).expanduser(), config.environment.environment_id
    return not_taken(folder, f"{config.training.algorithm}-{short_name(environment or 'custom')}").name


def short_name(environment: str) -> str:
    return Path(environment).name.partition(".py")[0]


def not_taken(folder: Path, stem: str, suffix: str = "") -> Path:
    """Return a path in the folder that does not exist yet, with the time in its name."""
    stem = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = folder / f"{stem}{suffix}", 1
    while path.exists() or path.with_name(path.name + ".part").exists():
        number += 1
        path = folder / f"{stem}-{number}{suffix}"
    return path


def fingerprint() -> dict[str, Any]:
    """Return what a run depends on besides its config."""
    versions = {"python": platform.python_version(), "training-factory": __version__}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "id": uuid4().hex,  # a name may be used again
        "versions": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "commit": _commit(),
        "day": date.today().isoformat(),  # some templates print it; a run keeps the one it started with
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _commit() -> str | None:
    """Return the commit of the folder in which the run was started, if it is a git repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
