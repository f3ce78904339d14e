"""GSM8K as demonstrations and tasks. Its solutions mark their calculations, <<48/2=24>>, and end with `#### 72`: with
tools each calculation becomes a calculator call, without tools the marks are removed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from TrainingFactory.common.arithmetic import format_result
from TrainingFactory.data.datasets import read_rows

HUB_ID = "openai/gsm8k:main"
SPLITS = ("sft", "sft_dev", "tasks", "dev", "test")  # one file of rows per part
DEV_EVERY = 15  # one row in 15 of the training set goes to the dev split, chosen by a hash of its question
_MARKED_CALCULATION = re.compile(r"<<([^<>]*)=([^<>=]*)>>")


@dataclass(slots=True)
class PreparedRows:
    """Rows of each part; `dropped` counts the skipped rows by part and reason, which are keys of recipe.json."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def row_counts(self) -> dict[str, int]:
        return {split: len(rows) for split, rows in self.rows.items()}


def prepare_gsm8k(source: str | Path, tools: Sequence[dict[str, Any]] = ()) -> PreparedRows:
    """Read both splits from a folder with train.jsonl and test.jsonl, or from a hub id. `tools` are the schemas for
    the demonstrations, including a calculator's; without tools, demonstrations contain no calls."""
    prepared_rows = PreparedRows()
    for split in ("train", "test"):
        for index, row in enumerate(read_rows(source, split)):
            try:
                task, solution = _parse_task(row.columns, f"{split}-{index}", row.problem)
                target = "test" if split == "test" else "dev" if is_dev_question(task["prompt"]) else "tasks"
                prepared_rows.rows[target].append(task)
            except ValueError as error:
                prepared_rows.dropped[f"{split}: {error}"] += 1
                continue
            if target == "test":
                continue
            sft_split = "sft_dev" if target == "dev" else "sft"
            try:
                messages = _write_messages(solution, task["answer"], bool(tools))
            except (ValueError, ZeroDivisionError) as error:
                prepared_rows.dropped[f"{sft_split}: {error}"] += 1
                continue
            messages = [{"role": "user", "content": task["prompt"]}, *messages]
            tools_column = {"tools": list(tools)} if tools else {}
            prepared_rows.rows[sft_split].append({"id": task["id"], "messages": messages} | tools_column)
    return prepared_rows


def is_dev_question(question: str) -> bool:
    """Return whether a training row belongs to the dev split, which depends on its question alone."""
    return int.from_bytes(blake2b(question.strip().encode(), digest_size=8).digest(), "big") % DEV_EVERY == 0


def _parse_task(row: dict[str, Any], task_id: str, problem: str | None) -> tuple[dict[str, Any], str]:
    question, answer = row.get("question"), row.get("answer")
    if problem is not None or not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError("no question and answer in the row")
    solution, separator, final_answer = answer.rpartition("####")
    final_answer = final_answer.replace(",", "").strip()
    if not separator or not re.fullmatch(r"-?\d*\.?\d+", final_answer):
        raise ValueError("no number after ####")
    return {"id": task_id, "prompt": question, "answer": final_answer}, solution


def _write_messages(solution: str, final_answer: str, with_calls: bool) -> list[dict[str, Any]]:
    """Return the messages after the question: one assistant turn per call, then the rest of the solution."""
    messages, position = list[dict[str, Any]](), 0
    for index, match in enumerate(_MARKED_CALCULATION.finditer(solution) if with_calls else ()):
        expression, reply = _to_expression(match[1]), format_result(_to_expression(match[2]))
        if format_result(expression) != reply:
            raise ValueError("a marked sum has another result")
        function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        call = {"id": f"call{index}", "type": "function", "function": function}
        text = solution[position : match.start()].strip()
        messages += [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": "calculator", "content": reply},
        ]
        position = match.end()
    if with_calls and (not messages or "<<" in solution[position:]):
        raise ValueError("no sum is marked, or one not as <<48/2=24>>")
    remaining_text = _MARKED_CALCULATION.sub("", solution[position:]).strip()
    return [*messages, {"role": "assistant", "content": f"{remaining_text}\n#### {final_answer}".strip()}]


def _to_expression(calculation: str) -> str:
    """Return a marked calculation in the calculator's syntax."""
    calculation = re.sub(r"[\s$,]", "", calculation)
    return re.sub(r"(\d*\.?\d+)%", r"(\1/100)", re.sub("[xX]", "*", calculation))
