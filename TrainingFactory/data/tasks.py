"""Read tasks from rows of any format: each has a "prompt" and, as wanted, "id", "answer" and other columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.data.conversations import text_or_messages
from TrainingFactory.data.datasets import Row, read_each
from TrainingFactory.types import Message, Task


def load_tasks(source: Any, split: str = "train", count: int | None = None) -> list[Task]:
    """Return the first `count` tasks of whatever `read_rows` reads, or of a list of tasks; one without `id` is named
    after its place, columns that are not part of a task are metadata."""
    stem = Path(source).stem if isinstance(source, str | Path) else "task"
    if not isinstance(source, str | Path | Mapping) and not type(source).__module__.startswith("datasets."):
        source = list(source)
        if all(isinstance(each, Task) for each in source):
            return source[:count]
    taken: dict[str, str] = {}

    def read(row: Row, number: int) -> Task:
        task = _task(row.columns, f"{stem}-{number}")
        if task.id in taken:
            raise ValueError(f"has the id {task.id!r}, which is already that of {taken[task.id]}")
        taken[task.id] = row.where
        return task

    return read_each(source, 'tasks such as {"prompt": "..."}', read, split, count)


def _task(row: dict[str, Any], default_id: str) -> Task:
    if "prompt" not in row:
        raise ValueError(f'has no "prompt"; its keys are: {", ".join(row) or "none"}')
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError('has a "metadata" that is not an object')
    rest = {key: value for key, value in row.items() if key not in ("id", "prompt", "answer", "metadata")}
    prompt: str | list[Message] = text_or_messages(row, "prompt", "user")
    if prompt[-1].role == "assistant":
        raise ValueError('has a "prompt" that must end before the model\'s turn')
    if prompt == [Message("user", row["prompt"])]:
        prompt = row["prompt"]
    return Task(str(row.get("id", default_id)), prompt, _answer(row), rest | metadata)


def _answer(row: dict[str, Any]) -> Any:
    """Return the right answer, or several; rows of verl and RL-Factory have theirs in reward_model.ground_truth."""
    if "answer" in row or not isinstance(model := row.get("reward_model"), dict):
        return row.get("answer")
    truth = model.get("ground_truth")
    return truth.get("target", truth) if isinstance(truth, dict) else truth
