"""Read tasks from a file: one JSON object a line with a "prompt" and, as wanted, "id", "answer" and other keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from TrainingFactory.data.conversations import text_or_messages
from TrainingFactory.data.datasets import read_lines
from TrainingFactory.types import Message, Task


def load_tasks(path: str | Path) -> list[Task]:
    """Return the tasks; one without `id` is named after its line, keys that are not part of a task are metadata."""
    stem = Path(path).stem
    line_of: dict[str, int] = {}

    def read(row: dict[str, Any], number: int) -> Task:
        task = _task(row, f"{stem}-{number}")
        if task.id in line_of:
            raise ValueError(f"has the id {task.id!r}, which is already that of line {line_of[task.id]}")
        line_of[task.id] = number
        return task

    return read_lines(path, "tasks", 'like {"prompt": "..."}', read)


def _task(row: dict[str, Any], default_id: str) -> Task:
    if "prompt" not in row:
        raise ValueError(f'has no "prompt"; its keys are: {", ".join(row) or "none"}')
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError('has a "metadata" that is not an object')
    rest = {key: value for key, value in row.items() if key not in ("id", "prompt", "answer", "metadata")}
    prompt: str | list[Message] = row["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        prompt = text_or_messages(row, "prompt", "user")
        if prompt[-1].role == "assistant":
            raise ValueError('has a "prompt" that must end before the model\'s turn')
    return Task(str(row.get("id", default_id)), prompt, row.get("answer"), rest | metadata)
