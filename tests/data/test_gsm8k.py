"""GSM8K's rows become dialogues with a calculator, and tasks; what cannot be used is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from TrainingFactory.apps.recipes.gsm8k import is_dev_question, prepare_gsm8k
from TrainingFactory.data.examples import load_examples
from TrainingFactory.data.tasks import load_tasks

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
GOOD = "Half is 1,200/2 = $<<1,200/2=600>>600.\nWith 50% more, 600 x 150% = <<600 x 150%=900>>900 in all.\n#### 1,900"
REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"


def question(dev: bool, number: int = 0) -> str:
    """A question that goes to this part, by its text alone."""
    return next(text for n in range(9999) if is_dev_question(text := f"How many {number}-{n}?") is dev)


def written(folder: Path, train: list[tuple[str, str]], test: list[tuple[str, str]]) -> Path:
    for split, rows in (("train", train), ("test", test)):
        lines = [json.dumps({"question": asked, "answer": answer}) for asked, answer in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def roles(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_sums_become_calls(tmp_path: Path) -> None:
    bad = ["<<2+2=5>>5\n#### 5", "No sum.\n#### 3", "<<6//2=3>>3\n#### 3", "<<1/0=1>>1\n#### 1"]
    unanswered = ["<<1+1=2>>2", "x\n#### many"]
    train = [(question(False, n), text) for n, text in enumerate([GOOD, *bad, *unanswered])]
    done = prepare_gsm8k(
        written(tmp_path, [*train, (question(True), GOOD)], [("Q", GOOD), ("R", "?")]), TOOLS
    )
    assert done.row_counts == {"sft": 1, "sft_dev": 1, "tasks": 5, "dev": 1, "test": 1}
    assert sum(done.dropped.values()) == 4 + 2 + 1
    assert done.dropped["sft: a marked sum has another result"] == 1
    assert (
        done.dropped["train: no number after ####"] == 2 and done.dropped["test: no number after ####"] == 1
    )
    [row] = done.rows["sft"]
    assert roles(row["messages"]) == [
        ("user", train[0][0]),
        ("assistant", "Half is 1,200/2 = $"),
        ("tool", "600"),
        ("assistant", "600.\nWith 50% more, 600 x 150% ="),
        ("tool", "900"),
        ("assistant", "900 in all.\n#### 1900"),
    ]
    calls = [call["function"] for message in row["messages"] for call in message.get("tool_calls", [])]
    assert [json.loads(call["arguments"])["expression"] for call in calls] == ["1200/2", "600*(150/100)"]
    assert done.rows["test"] == [{"id": "test-0", "prompt": "Q", "answer": "1900"}]
    assert len(load_examples(done.rows["sft"], "sft")) == 1 and len(load_tasks(done.rows["tasks"])) == 5
    plain = prepare_gsm8k(tmp_path)
    assert plain.row_counts["sft"] == 5 and "tools" not in plain.rows["sft"][0]
    text = "Half is 1,200/2 = $600.\nWith 50% more, 600 x 150% = 900 in all.\n#### 1900"
    assert roles(plain.rows["sft"][0]["messages"])[1:] == [("assistant", text)]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=f"GSM8K is not in {REAL}")
def test_the_real_rows() -> None:
    done = prepare_gsm8k(REAL, TOOLS)
    assert done.row_counts == {"sft": 6921, "sft_dev": 455, "tasks": 7008, "dev": 465, "test": 1319}
    assert sum(done.dropped.values()) == 97
