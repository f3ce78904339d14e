"""Read tasks from rows of any format: each has a "prompt" and, as wanted, "id", "answer" and other columns. Where one
has neither, common names are known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.data.conversations import text_or_messages, with_system
from TrainingFactory.data.datasets import Row, column_at, read_each
from TrainingFactory.types import Message, Task

PROMPTS = ("question", "query", "problem", "instruction", "input", "messages")
# The first that is there; an answer is not needed, so that several are no mistake.
ANSWERS = (
    "ground_truth",
    "reward_model.ground_truth.target",
    "reward_model.ground_truth",
    "solution",
    "target",
    "expected_answer",
)


def load_tasks(
    source: Any, split: str = "train", count: int | None = None, columns: Mapping[str, str] | None = None
) -> list[Task]:
    """Return the first `count` tasks of whatever `read_rows` reads, or of a list of tasks; one without `id` is named
    after its place, columns that are not part of a task are metadata, and so are those of other names."""
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

    return read_each(source, 'tasks such as {"prompt": "..."}', read, split, count, columns)


def _task(row: dict[str, Any], default_id: str) -> Task:
    if "prompt" not in row:
        row = row | {"prompt": row[_prompt_column(row)]}
    if "answer" not in row:
        row = row | {
            "answer": next((each for name in ANSWERS if (each := column_at(row, name)) is not None), None)
        }
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError('has a "metadata" that is not an object')
    rest = {key: value for key, value in row.items() if key not in ("id", "prompt", "answer", "metadata")}
    prompt: str | list[Message] = with_system(row, text_or_messages(row, "prompt", "user"))
    if prompt[-1].role == "assistant":
        raise ValueError('has a "prompt" that must end before the model\'s turn')
    if prompt == [Message("user", row["prompt"])]:
        prompt = row["prompt"]
    return Task(str(row.get("id", default_id)), prompt, row.get("answer"), rest | metadata)


def _prompt_column(row: Mapping[str, Any]) -> str:
    """Return the column that is meant where none is called "prompt"."""
    found = [name for name in PROMPTS if name in row]
    if len(found) == 1:
        return found[0]
    remedy = "say which column it is: data.columns={prompt: NAME}"
    if found:
        raise ValueError(f'has no "prompt", and it could be {" or ".join(found)}; {remedy}')
    raise ValueError(f'has no "prompt"; its keys are: {", ".join(row) or "none"}; {remedy}')
