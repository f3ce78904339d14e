"""GSM8K as demonstrations and tasks. Its solutions mark their sums, <<48/2=24>>, and end with `#### 72`: with tools
each sum becomes a call of a calculator, without them the marks are left out."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from TrainingFactory.common.arithmetic import calculated
from TrainingFactory.data.datasets import read_rows

HUB = "openai/gsm8k:main"
PARTS = ("sft", "sft_dev", "tasks", "dev", "test")  # each a file of rows
ONE_IN = 15  # rows of the training set is for development, chosen by a hash of its question
_MARK = re.compile(r"<<([^<>]*)=([^<>=]*)>>")


@dataclass(slots=True)
class Prepared:
    """Holds the rows of each part; `dropped` counts those that could not be used by part and reason."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {part: [] for part in PARTS})
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def counts(self) -> dict[str, int]:
        return {part: len(rows) for part, rows in self.rows.items()}


def prepare(source: str | Path, tools: Sequence[dict[str, Any]] = ()) -> Prepared:
    """Read both splits of a folder with train.jsonl and test.jsonl, or of a hub id. `tools` are the schemas that go
    with a demonstration, that of a calculator among them; without any, demonstrations have no calls."""
    done = Prepared()
    for split in ("train", "test"):
        for number, row in enumerate(read_rows(source, split)):
            try:
                task, solution = _task(row.columns, f"{split}-{number}", row.problem)
                part = "test" if split == "test" else "dev" if for_development(task["prompt"]) else "tasks"
                done.rows[part].append(task)
            except ValueError as error:
                done.dropped[f"{split}: {error}"] += 1
                continue
            if part == "test":
                continue
            taught = "sft_dev" if part == "dev" else "sft"
            try:
                said = _spoken(solution, task["answer"], bool(tools))
            except (ValueError, ZeroDivisionError) as error:
                done.dropped[f"{taught}: {error}"] += 1
                continue
            messages = [{"role": "user", "content": task["prompt"]}, *said]
            given = {"tools": list(tools)} if tools else {}
            done.rows[taught].append({"id": task["id"], "messages": messages} | given)
    return done


def for_development(question: str) -> bool:
    """Tell whether a row of the training set is held out; always the same, whatever its place."""
    return int.from_bytes(blake2b(question.strip().encode(), digest_size=8).digest(), "big") % ONE_IN == 0


def _task(row: dict[str, Any], name: str, problem: str | None) -> tuple[dict[str, Any], str]:
    question, answer = row.get("question"), row.get("answer")
    if problem is not None or not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError("no question and answer in the row")
    solution, found, final = answer.rpartition("####")
    final = final.replace(",", "").strip()
    if not found or not re.fullmatch(r"-?\d*\.?\d+", final):
        raise ValueError("no number after ####")
    return {"id": name, "prompt": question, "answer": final}, solution


def _spoken(solution: str, final: str, with_calls: bool) -> list[dict[str, Any]]:
    """Return the messages that follow the question; the model goes on after a reply where the solution does."""
    said, place = list[dict[str, Any]](), 0
    for number, mark in enumerate(_MARK.finditer(solution) if with_calls else ()):
        expression, reply = _sum(mark[1]), calculated(_sum(mark[2]))
        if calculated(expression) != reply:
            raise ValueError("a marked sum has another result")
        function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        call = {"id": f"call{number}", "type": "function", "function": function}
        text = solution[place : mark.start()].strip()
        said += [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": "calculator", "content": reply},
        ]
        place = mark.end()
    if with_calls and (not said or "<<" in solution[place:]):
        raise ValueError("no sum is marked, or one not as <<48/2=24>>")
    rest = _MARK.sub("", solution[place:]).strip()
    return [*said, {"role": "assistant", "content": f"{rest}\n#### {final}".strip()}]


def _sum(text: str) -> str:
    """Return a marked sum as the calculator takes it; ValueError where it would not."""
    text = re.sub(r"[\s$,]", "", text)
    return re.sub(r"(\d*\.?\d+)%", r"(\1/100)", re.sub("[xX]", "*", text))
