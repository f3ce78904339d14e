"""Tasks for any phone or emulator with Google's or AOSP's settings and contacts, and tasks from a file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import yaml

from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.envs.android.state import TaskState
from TrainingFactory.envs.builtin.splits import in_split
from TrainingFactory.models.words import NAMES
from TrainingFactory.types import Task

CONTACT_PACKAGES = ["com.android.contacts", "com.google.android.contacts"]
PHONES_URI = "content://com.android.contacts/data/phones"


def _make_wifi_task(rng: random.Random) -> tuple[str, dict[str, Any]]:
    # 2 is Wi-Fi that stays on in airplane mode.
    check = {"type": "setting", "namespace": "global", "key": "wifi_on", "equals": ["1", "2"]}
    return "Turn Wi-Fi on.", {"setup": [{"type": "wifi", "enabled": False}], "checks": [check]}


def _make_airplane_mode_task(rng: random.Random) -> tuple[str, dict[str, Any]]:
    check = {"type": "setting", "namespace": "global", "key": "airplane_mode_on", "equals": "1"}
    return "Turn on airplane mode.", {
        "setup": [{"type": "airplane_mode", "enabled": False}],
        "checks": [check],
    }


def _make_open_contacts_task(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "Open Contacts.", {"checks": [{"type": "foreground", "package": CONTACT_PACKAGES}]}


def _make_add_contact_task(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = rng.choice(NAMES)
    phone_number = f"555{rng.randint(100, 9999):04d}"
    row_values = {
        "display_name": name,
        "data1": [phone_number, f"{phone_number[:3]}-{phone_number[3:]}"],
    }  # apps insert the hyphen
    check = {"type": "content", "uri": PHONES_URI, "where": row_values}
    return f"Add the contact {name} with the phone number {phone_number}.", {"checks": [check]}


TaskKind = Literal["wifi", "airplane_mode", "open_contacts", "add_contact"]
TASK_MAKERS: dict[TaskKind, Callable[[random.Random], tuple[str, dict[str, Any]]]] = {
    "wifi": _make_wifi_task,
    "airplane_mode": _make_airplane_mode_task,
    "open_contacts": _make_open_contacts_task,
    "add_contact": _make_add_contact_task,
}


def generate_builtin_tasks(kinds: list[TaskKind], split: str, seed: int) -> Iterator[Task]:
    """Yield tasks of these kinds in turn, without end. Contacts differ between splits; tasks of other kinds do not."""
    rng = random.Random(f"android {split} {seed}")
    for index in itertools.count():
        kind = kinds[index % len(kinds)]
        prompt, metadata = TASK_MAKERS[kind](rng)
        while kind == "add_contact" and not in_split(prompt, split):
            prompt, metadata = TASK_MAKERS[kind](rng)
        yield Task(f"android-{kind}-{split}-{seed}-{index}", prompt, None, metadata)


def load_file_tasks(path: str, count: int) -> list[Task]:
    """Return the tasks of a YAML list or a JSONL file. Raise ValueError for invalid setup or checks."""
    rows_or_path: Any = path
    if path.endswith((".yaml", ".yml")):
        try:
            rows_or_path = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"cannot read the tasks {path}: {error}") from error
        if not isinstance(rows_or_path, list) or not all(isinstance(row, dict) for row in rows_or_path):
            raise ValueError(f"{path} must be a list of tasks, each with `prompt` and `checks`")
    tasks = load_tasks(rows_or_path, count=count)
    for task in tasks:
        TaskState(task.id, task.metadata)
    return tasks
