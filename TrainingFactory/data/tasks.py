"""Tasks from the rows of a dataset. A row has a "prompt" and optionally "id", "answer" and other columns. Common other
names of "prompt" and "answer" are recognized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.data.conversations import read_text_or_messages, with_system
from TrainingFactory.data.datasets import DatasetRow, get_column, parse_rows
from TrainingFactory.data.row_images import IMAGE_COLUMNS, with_images
from TrainingFactory.types import Message, Task

PROMPT_COLUMNS = ("question", "query", "problem", "instruction", "input", "messages")
# The first that exists is used; several are no error, because an answer is optional.
ANSWER_COLUMNS = (
    "ground_truth",
    "reward_model.ground_truth.target",
    "reward_model.ground_truth",
    "solution",
    "target",
    "expected_answer",
)


def load_tasks(
    source: Any,
    split: str = "train",
    count: int | None = None,
    columns: Mapping[str, str] | None = None,
    image_urls: bool = False,
) -> list[Task]:
    """Return the first `count` tasks (None: all) of any source of `read_rows`, or of a list of tasks. A task without
    `id` gets its row number. Columns that are not fields of a task become metadata. `image_urls`: download images."""
    stem = Path(source).stem if isinstance(source, str | Path) else "task"
    if not isinstance(source, str | Path | Mapping) and not type(source).__module__.startswith("datasets."):
        source = list(source)
        if all(isinstance(task, Task) for task in source):
            return source[:count]
    locations: dict[str, str] = {}

    def parse_task(row: DatasetRow, row_number: int) -> Task:
        task = _make_task(row, f"{stem}-{row_number}", image_urls)
        if task.id in locations:
            raise ValueError(f"has the same id {task.id!r} as {locations[task.id]}")
        locations[task.id] = row.location
        return task

    return parse_rows(source, 'tasks such as {"prompt": "..."}', parse_task, split, count, columns)


def _make_task(dataset_row: DatasetRow, default_id: str, image_urls: bool) -> Task:
    row = dataset_row.columns
    if "prompt" not in row:
        row = row | {"prompt": row[_find_prompt_column(row)]}
    if "answer" not in row:
        answers = (get_column(row, name) for name in ANSWER_COLUMNS)
        row = row | {"answer": next((answer for answer in answers if answer is not None), None)}
    columns = with_images(
        {key: row[key] for key in ("prompt", *IMAGE_COLUMNS) if key in row}, dataset_row, image_urls
    )
    row = {key: value for key, value in row.items() if key not in IMAGE_COLUMNS} | dict(columns)
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError('has invalid "metadata": it must be an object')
    metadata_columns = {
        key: value for key, value in row.items() if key not in ("id", "prompt", "answer", "metadata")
    }
    prompt: str | list[Message] = with_system(row, read_text_or_messages(row, "prompt", "user"))
    if prompt[-1].role == "assistant":
        raise ValueError('has a "prompt" that ends with the assistant; it must end before the model\'s turn')
    if isinstance(row["prompt"], str) and prompt == [Message("user", row["prompt"])]:
        prompt = row["prompt"]
    return Task(str(row.get("id", default_id)), prompt, row.get("answer"), metadata_columns | metadata)


def _find_prompt_column(row: Mapping[str, Any]) -> str:
    """Return the column to use as prompt in a row without "prompt". Raise ValueError unless exactly one matches."""
    candidates = [column for column in PROMPT_COLUMNS if column in row]
    if len(candidates) == 1:
        return candidates[0]
    remedy = "name the column: data.columns={prompt: NAME}"
    if candidates:
        raise ValueError(f'has no "prompt", and it could be {" or ".join(candidates)}; {remedy}')
    raise ValueError(f'has no "prompt"; its columns are: {", ".join(row) or "none"}; {remedy}')
