"""Write and read what an evaluation leaves behind: one JSON object in a line of `evaluations.jsonl`, in the folder of a
run, or of all runs for a model that is none. Records of the same tasks and seeds can be compared task by task."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from TrainingFactory.data.disk import read_lines, writing
from TrainingFactory.evaluation import statistics
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.runs.folder import EVALUATIONS, list_runs
from TrainingFactory.types import Task, Trajectory

try:
    import fcntl
except ImportError:  # not on Windows: there two processes are not kept apart
    fcntl = None

VERSION = 1
Say = Callable[[str], None]


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EpisodeOutcome(_Plain):
    """Holds what came of one episode; its random numbers are a function of seed, task and member."""

    member: int
    reward: float | None  # outcome and steps together; None: it could not be scored
    success: bool | None  # an outcome over 0
    turns: int
    tool_calls: int
    tool_successes: int
    tokens: int  # sampled
    status: str

    @classmethod
    def of(cls, played: Trajectory) -> EpisodeOutcome:
        results = [result.ok for turn in played.turns for result in turn.tool_results]
        reward = played.reward
        return cls(
            member=played.member,
            reward=None if reward is None else reward.outcome + sum(reward.steps),
            success=None if reward is None else reward.outcome > 0,
            turns=len(played.turns),
            tool_calls=len(results),
            tool_successes=sum(results),
            tokens=sum(len(turn.completion.token_ids) for turn in played.turns),
            status=played.status,
        )


class TaskOutcome(_Plain):
    task: str
    digest: str  # of all that the task says: the same id may be that of another task
    episodes: list[EpisodeOutcome]

    @property
    def scored(self) -> list[bool]:
        return [each.success for each in self.episodes if each.success is not None]


class ModelIdentity(_Plain):
    """`digest` is that of the weights, or says which they are; None for a run's model on the way, which `run_id` and
    `step` tell. `options` are those of its section that change what it samples."""

    name: str
    digest: str | None
    options: dict[str, Any] = Field(default_factory=dict)
    run: str | None = None
    run_id: str | None = None
    step: int | None = None


class Conditions(_Plain):
    """Holds all that must be the same for two models to be compared; rewards, tools and environments by digest."""

    environment: str | None
    tasks: str  # digest
    count: int
    seed: int
    episodes: int  # a task
    sampling: dict[str, Any]
    rest: str  # digest of environment, tools and reward, and of the files that these name

    def differences(self, other: Conditions) -> list[str]:
        """Return what is not the same in the other, in words."""
        ours, theirs = _flat(self), _flat(other)
        return [
            f"{key} is {ours.get(key)} and {theirs.get(key)}"
            for key in ours | theirs
            if ours.get(key) != theirs.get(key)
        ]


class EvaluationRecord(_Plain):
    version: int = VERSION
    id: str = ""
    time: str
    by: Literal["eval", "training"]
    model: ModelIdentity
    conditions: Conditions
    scored_by: str
    suite: str | None = None
    entry: str | None = None  # of the suite
    metrics: dict[str, float]
    outcomes: list[TaskOutcome]
    episodes_file: str | None = None  # JSONL with the episodes, from the folder of the record

    @property
    def scored(self) -> dict[str, list[bool]]:
        """Return the tasks of which an episode was scored."""
        return {each.task: each.scored for each in self.outcomes if each.scored}


def make_record(
    played: Sequence[Trajectory],
    model: ModelIdentity,
    conditions: Conditions,
    metrics: dict[str, float],
    **more: Any,
) -> EvaluationRecord:
    """Sum the episodes up; `metrics` are what else is known, such as seconds and what judges have spent."""
    by_task: dict[str, list[Trajectory]] = {}
    for each in played:
        by_task.setdefault(each.task.id, []).append(each)
    outcomes = [
        TaskOutcome(
            task=name, digest=task_digest(group[0].task), episodes=[EpisodeOutcome.of(e) for e in group]
        )
        for name, group in by_task.items()
    ]
    scored = [each.scored for each in outcomes if each.scored]
    record = EvaluationRecord(
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        model=model,
        conditions=conditions,
        metrics=metrics | rollout_metrics(played) | success_metrics(scored, conditions.episodes),
        outcomes=outcomes,
        **more,
    )
    return record.model_copy(update={"id": f"eval-{_digest(record.model_dump(), 5)}"})


def success_metrics(scored: Sequence[Sequence[bool]], episodes: int) -> dict[str, float]:
    """Return the success with its interval, and pass@k and pass^k where there are several episodes a task."""
    if not scored:
        return {}
    found = statistics.success(scored)
    metrics = {"success": found.value, "success_low": found.low, "success_high": found.high}
    for k in statistics.powers(episodes) if episodes > 1 else ():
        for name, value in (
            (f"pass@{k}", statistics.pass_at(k, scored)),
            (f"pass^{k}", statistics.pass_all(k, scored)),
        ):
            if value is not None:
                metrics[name] = value
    return metrics


def task_digest(task: Task) -> str:
    prompt = task.prompt if isinstance(task.prompt, str) else [repr(message) for message in task.prompt]
    return _digest([task.id, prompt, task.answer, task.metadata], 8)


def tasks_digest(tasks: Iterable[Task]) -> str:
    """Return a digest of all tasks, in whatever order: seeds go by task and member."""
    return _digest(sorted(map(task_digest, tasks)), 16)


def digest_of(value: Any) -> str:
    return _digest(value, 16)


def _digest(value: Any, size: int) -> str:
    # What is no JSON, such as an answer that is an object of a user's, counts by its kind alone.
    text = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()


def _flat(conditions: Conditions) -> dict[str, Any]:
    found = conditions.model_dump()
    return {f"sampling.{key}": value for key, value in found.pop("sampling").items()} | found


# files


def append_record(path: Path, record: EvaluationRecord) -> None:
    """Write the record as one more line, brought to the disk. A line that a killed process left half is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record.model_dump()).encode() + b"\n"
    with writing(path), path.open("a+b") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        if end and (file.seek(end - 1), file.read(1))[1] != b"\n":
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path, say: Say = lambda _: None) -> list[EvaluationRecord]:
    """Return the records of a file, the oldest first. Half a line at its end is being written; of other lines that
    cannot be read it is said which and why."""
    found = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            found.append(_read(line))
        except ValueError as error:
            if line.endswith(b"\n"):
                say(f"note: {path}, line {number} is left out: {error}")
    return found


def _read(line: bytes) -> EvaluationRecord:
    try:
        row = json.loads(line)
        version = row["version"]
        if isinstance(version, int) and version > VERSION:
            raise ValueError(
                f"a record of version {version}, made by a newer TrainingFactory than this one, which reads up to "
                f"{VERSION}: update it"
            )
        return EvaluationRecord.model_validate(row)
    except (
        LookupError,
        TypeError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        RecursionError,
        ValidationError,
    ) as error:
        raise ValueError(f"it is no record of an evaluation ({type(error).__name__})") from None


def all_records(runs: str | Path = "runs", say: Say = lambda _: None) -> list[tuple[Path, EvaluationRecord]]:
    """Return all records of a folder of runs, each with its file."""
    files = [run.path / EVALUATIONS for run in list_runs(runs)] + [Path(runs).expanduser() / EVALUATIONS]
    found: list[tuple[Path, EvaluationRecord]] = []
    for file in files:
        try:
            found += [(file, record) for record in read_records(file, say)]
        except ValueError as error:
            say(f"note: {error}")
    return found
