"""What the tests of datasets share: tool dialogues as rows, episodes with rewards, the built-in model with its chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from TrainingFactory.data.examples import Examples, Form, load_examples
from TrainingFactory.envs import SearchEnvironment
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.rollout import play
from TrainingFactory.training.dataset import find_call_problem
from TrainingFactory.types import Reward, Trajectory

LOOK = {
    "name": "look",
    "description": "Looks something up.",
    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
}


SEARCH = {
    "name": "search",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
USER = {"role": "user", "content": "Where is Kyoto?"}
RESULT = {"role": "tool", "content": "Japan", "tool_call_id": "c1"}
ANSWER = {"role": "assistant", "content": "In Japan."}
BROKEN = '<tool_call>{"name": "search", "arguments": {]</tool_call>'


def calling(name: str, arguments: Any, call_id: str = "") -> dict[str, Any]:
    calls = [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def call(what: str) -> dict[str, Any]:
    return calling("look", json.dumps({"what": what}), "c") | {"content": ""}


CALL = calling("search", '{"query": "Kyoto"}', "c1")
DIALOGUE = [USER, CALL, RESULT, ANSWER]


@cache
def loaded() -> tuple[Any, Any, Any]:
    """The built-in model, its tokenizer, its way to write conversations. Not to be trained: all tests share it."""
    found = load_model("builtin:tiny")
    return found.model, found.tokenizer, chat_format(found.tokenizer, stop_ids=found.stop_ids)


def tool_dialogues(count: int) -> list[dict[str, Any]]:
    """Rows with one or two calls and an answer."""
    rows = []
    for number in range(count):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Where is town {number}?"}]
        for step in range(1 + number % 2):
            messages += [call(f"town {number} {step}"), {"role": "tool", "content": f"near {number * step}"}]
        messages.append({"role": "assistant", "content": f"It is near {number}."})
        rows.append({"messages": messages, "tools": [LOOK]})
    return rows


def pairs(count: int) -> list[dict[str, Any]]:
    """The better answer looks the thing up, the worse one does not."""
    rows = []
    for number in range(count):
        prompt = [{"role": "user", "content": f"Where is town {number}?"}]
        rows.append(
            {"prompt": prompt, "chosen": [call(f"town {number}")],
             "rejected": [{"role": "assistant", "content": f"I do not know {number}."}], "tools": [LOOK]}
        )  # fmt: skip
    return rows


def played(tasks: int, rewards: Iterable[Reward | None]) -> list[Trajectory]:
    """Episodes of the search environment by its expert; those of a task differ in their reward, and each odd one in
    its answer too."""
    chat = loaded()[2]
    rewards = list(rewards)

    async def one(task: Any, member: int) -> Trajectory:
        environment = SearchEnvironment(task)
        script = list(environment.expert())
        if member % 2:
            script[-1].content = f"Somewhere {member}."
        episode = await play(environment, chat, script)
        episode.group, episode.member, episode.reward = f"1/{task.id}", member, rewards[member]
        return episode

    async def every() -> list[Trajectory]:
        found = SearchEnvironment.tasks("train", 0, tasks)
        return [await one(task, member) for task in found for member in range(len(rewards))]

    return asyncio.run(every())


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(rows: list[Any], form: Form, **options: Any) -> Examples:
    return load_examples(rows, form, check_call=find_call_problem, **options)


def one(row: dict[str, Any], form: Form = "sft") -> Any:
    (example,) = load([row], form).usable
    return example.conversations[0] if len(example.conversations) == 1 else example.conversations
