"""Evaluation records: JSON lines in the `evaluations.jsonl` of a run, or of the folder of runs for other models.
Records of the same tasks and seeds can be compared task by task."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from TrainingFactory.data.disk import name_file_on_error, read_lines
from TrainingFactory.evaluation import statistics
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.runs.folder import EVALUATIONS, list_runs
from TrainingFactory.types import Task, Trajectory

try:
    import fcntl
except ImportError:  # Windows: without a lock, two processes can write at the same time
    fcntl = None

RECORD_VERSION = 1
Notify = Callable[[str], None]


class _FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EpisodeOutcome(_FrozenModel):
    """Result of one episode; seed, task and member determine its sampling."""

    member: int
    reward: float | None  # outcome plus step rewards; None if the episode could not be scored
    success: bool | None  # whether the outcome is above 0
    turns: int
    tool_calls: int
    tool_successes: int
    tokens: int  # sampled
    status: str

    @classmethod
    def from_trajectory(cls, episode: Trajectory) -> EpisodeOutcome:
        successes = [result.ok for turn in episode.turns for result in turn.tool_results]
        reward = episode.reward
        return cls(
            member=episode.member,
            reward=None if reward is None else reward.outcome + sum(reward.steps),
            success=None if reward is None else reward.outcome > 0,
            turns=len(episode.turns),
            tool_calls=len(successes),
            tool_successes=sum(successes),
            tokens=sum(turn.sampled_tokens for turn in episode.turns),
            status=episode.status,
        )


class TaskOutcome(_FrozenModel):
    task: str
    digest: str  # of the task's contents, because another task can have the same id
    episodes: list[EpisodeOutcome]

    @property
    def scored_episodes(self) -> list[bool]:
        """Return the success of each scored episode."""
        return [episode.success for episode in self.episodes if episode.success is not None]


class ModelIdentity(_FrozenModel):
    """`digest` identifies the weights; it is None during training, when `run_id` and `step` identify them. `options`
    are the keys of the model section that change the outputs."""

    name: str
    digest: str | None
    options: dict[str, Any] = Field(default_factory=dict)
    run: str | None = None
    run_id: str | None = None
    step: int | None = None


class Conditions(_FrozenModel):
    """Conditions that two evaluations must share to be comparable."""

    environment: str | None
    tasks: str  # digest
    count: int
    seed: int
    episodes: int  # per task
    sampling: dict[str, Any]
    rest: str  # digest of environment, tools, reward and the files that they name

    def list_differences(self, other: Conditions) -> list[str]:
        """Return a text for each key that differs."""
        self_values, other_values = _flatten_conditions(self), _flatten_conditions(other)
        return [
            f"{key} is {self_values.get(key)} and {other_values.get(key)}"
            for key in self_values | other_values
            if self_values.get(key) != other_values.get(key)
        ]


class EvaluationRecord(_FrozenModel):
    version: int = RECORD_VERSION
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
    episodes_file: str | None = None  # JSONL with the episodes, relative to the folder of the record

    @property
    def scored_episodes(self) -> dict[str, list[bool]]:
        """Return the success of each scored episode, by task."""
        return {outcome.task: outcome.scored_episodes for outcome in self.outcomes if outcome.scored_episodes}


def make_record(
    episodes: Sequence[Trajectory],
    model: ModelIdentity,
    conditions: Conditions,
    metrics: dict[str, float],
    **fields: Any,
) -> EvaluationRecord:
    """Summarise episodes in a record, with `metrics` added to the metrics that are computed from them."""
    episodes_by_task: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        episodes_by_task.setdefault(episode.task.id, []).append(episode)
    outcomes = [
        TaskOutcome(
            task=task_id,
            digest=digest_task(group[0].task),
            episodes=list(map(EpisodeOutcome.from_trajectory, group)),
        )
        for task_id, group in episodes_by_task.items()
    ]
    scored_episodes = [outcome.scored_episodes for outcome in outcomes if outcome.scored_episodes]
    record = EvaluationRecord(
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        model=model,
        conditions=conditions,
        metrics=metrics
        | rollout_metrics(episodes)
        | compute_success_metrics(scored_episodes, conditions.episodes),
        outcomes=outcomes,
        **fields,
    )
    return record.model_copy(update={"id": f"eval-{_hash_json(record.model_dump(), 5)}"})


def compute_success_metrics(successes: Sequence[Sequence[bool]], episodes_per_task: int) -> dict[str, float]:
    """Return the success rate with its interval; with several episodes per task also pass@k and pass^k."""
    if not successes:
        return {}
    rate = statistics.estimate_success(successes)
    metrics = {"success": rate.value, "success_low": rate.low, "success_high": rate.high}
    for k in statistics.choose_k_values(episodes_per_task) if episodes_per_task > 1 else ():
        for metric_name, value in (
            (f"pass@{k}", statistics.estimate_pass_at(k, successes)),
            (f"pass^{k}", statistics.estimate_pass_all(k, successes)),
        ):
            if value is not None:
                metrics[metric_name] = value
    return metrics


def digest_task(task: Task) -> str:
    prompt = task.prompt if isinstance(task.prompt, str) else [repr(message) for message in task.prompt]
    return _hash_json([task.id, prompt, task.answer, task.metadata], 8)


def digest_tasks(tasks: Iterable[Task]) -> str:
    """Return a digest of all tasks, independent of their order, because seeds depend only on task and member."""
    return _hash_json(sorted(map(digest_task, tasks)), 16)


def digest_json(value: Any) -> str:
    return _hash_json(value, 16)


def _hash_json(value: Any, num_bytes: int) -> str:
    # A value that is not JSON, such as a user's object as the answer, is represented by its type.
    text = json.dumps(value, sort_keys=True, default=lambda value_object: type(value_object).__name__)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=num_bytes).hexdigest()


def _flatten_conditions(conditions: Conditions) -> dict[str, Any]:
    fields = conditions.model_dump()
    return {f"sampling.{key}": value for key, value in fields.pop("sampling").items()} | fields


# files


def append_record(path: Path, record: EvaluationRecord) -> None:
    """Append the record as a flushed line, after ending an incomplete line of a killed process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record.model_dump()).encode() + b"\n"
    with name_file_on_error(path), path.open("a+b") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        if file_size := file.seek(0, os.SEEK_END):
            file.seek(file_size - 1)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path, notify: Notify = lambda _: None) -> list[EvaluationRecord]:
    """Return the records of a file, oldest first. Invalid lines are reported with `notify` and skipped. An incomplete
    last line is skipped silently, because another process may be writing it."""
    records = []
    for line_number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            records.append(_parse_record(line))
        except ValueError as error:
            if line.endswith(b"\n"):
                notify(f"note: skipped {path}, line {line_number}: {error}")
    return records


def _parse_record(line: bytes) -> EvaluationRecord:
    try:
        row = json.loads(line)
        version = row["version"]
        if isinstance(version, int) and version > RECORD_VERSION:
            raise ValueError(
                f"record version {version} is newer than the supported {RECORD_VERSION}. Update TrainingFactory"
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
        raise ValueError(f"not an evaluation record ({type(error).__name__})") from None


def read_all_records(
    runs: str | Path = "runs", notify: Notify = lambda _: None
) -> list[tuple[Path, EvaluationRecord]]:
    """Return all records in a folder of runs, each with its file."""
    files = [run.path / EVALUATIONS for run in list_runs(runs)] + [Path(runs).expanduser() / EVALUATIONS]
    records: list[tuple[Path, EvaluationRecord]] = []
    for file in files:
        try:
            records += [(file, record) for record in read_records(file, notify)]
        except ValueError as error:
            notify(f"note: {error}")
    return records
