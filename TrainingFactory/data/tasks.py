"""Tasks from a file: one JSON object a line with a "prompt" and, as wanted, "id", "answer" and other keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from TrainingFactory.openai_form import message_from_dict
from TrainingFactory.types import Message, Task

MAX_PROBLEMS = 10  # told at once


def load_tasks(path: str | Path) -> list[Task]:
    """`prompt` is a text or a list of OpenAI-style messages. A task without `id` is named after its line;
    keys that are not part of a task go to its metadata."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file of tasks at {path}")
    tasks: list[Task] = []
    line_of: dict[str, int] = {}
    problems: list[str] = []
    with path.open(encoding="utf-8-sig") as file:  # some programs put a mark at the beginning
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                task = _task(line, f"{path.stem}-{number}")
                if task.id in line_of:
                    raise ValueError(
                        f"has the id {task.id!r}, which is already that of line {line_of[task.id]}"
                    )
            except ValueError as error:
                problems.append(f"{path}, line {number} {error}")
            else:
                line_of[task.id] = number
                tasks.append(task)
    if problems:
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise ValueError("\n".join(problems[:MAX_PROBLEMS] + more))
    if not tasks:
        raise ValueError(f"{path} is empty: one JSON object a line is needed")
    return tasks


def _task(line: str, default_id: str) -> Task:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f'must be an object like {{"prompt": "..."}}, not {line.strip()[:40]}')
    if "prompt" not in row:
        raise ValueError(f'has no "prompt"; its keys are: {", ".join(row) or "none"}')
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError('has a "metadata" that is not an object')
    rest = {key: value for key, value in row.items() if key not in ("id", "prompt", "answer", "metadata")}
    return Task(str(row.get("id", default_id)), _prompt(row["prompt"]), row.get("answer"), rest | metadata)


def _prompt(prompt: Any) -> str | list[Message]:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError('has a "prompt" that must be a text or a list of messages, and not empty')
    try:
        messages = [message_from_dict(message) for message in prompt]
    except ValueError as error:
        raise ValueError(f'has a bad message in its "prompt": {error}') from error
    if messages[-1].role == "assistant":
        raise ValueError(
            'has a "prompt" that must end before the model\'s turn, not with an assistant message'
        )
    return messages
