"""Rows as ms-swift and Alpaca have them: read, written, and read by ms-swift itself where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits.data import ANSWER, DIALOGUE, SEARCH, USER, one
from TrainingFactory.data.convert import to_swift_row
from TrainingFactory.data.examples import Form
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.types import Message

ROOT = Path(__file__).resolve().parents[2]
SWIFT = ROOT / ".servers" / "swift"
WANTED = one({"messages": DIALOGUE, "tools": [SEARCH]})
CALLED = {"role": "tool_call", "content": json.dumps({"name": "search", "arguments": {"query": "Kyoto"}})}
BACK = {"role": "tool_response", "content": "Japan"}


def said(conversation: Any) -> list[tuple[str, str, Any]]:
    return [
        (each.role, each.content, [(call.name, call.arguments) for call in each.tool_calls])
        for each in conversation.messages
    ]


@pytest.mark.parametrize("tools", [[SEARCH], json.dumps([SEARCH]), [json.dumps(SEARCH)]])
def test_calls_by_role(tools: Any) -> None:
    found = one({"messages": [USER, CALLED, BACK, ANSWER], "tools": tools})
    assert said(found) == said(WANTED) and found.tools == WANTED.tools
    thought = {"role": "assistant", "content": "I look it up."}
    both = one({"messages": [USER, thought, CALLED, CALLED, {**BACK, "content": {"in": "Japan"}}, ANSWER]})
    assert both.messages[1].content == "I look it up." and len(both.messages[1].tool_calls) == 2
    assert both.messages[2].content == '{"in": "Japan"}'


PAIRS: list[dict[str, Any]] = [
    {"messages": [USER, ANSWER], "rejected_response": "No idea."},
    {"messages": [USER, ANSWER], "rejected_response": [{"role": "assistant", "content": "No idea."}]},
    {"messages": [USER, ANSWER], "rejected_messages": [USER, {"role": "assistant", "content": "No idea."}]},
    {"query": USER["content"], "response": "In Japan.", "rejected_response": "No idea."},
]


@pytest.mark.parametrize("row", PAIRS)
def test_pairs(row: dict[str, Any]) -> None:
    chosen, rejected = one(row, "dpo")
    assert chosen.messages == [Message("user", "Where is Kyoto?"), Message("assistant", "In Japan.")]
    assert rejected.messages == [chosen.messages[0], Message("assistant", "No idea.")]


ASKED = [
    ("system", "Be brief.", []),
    ("user", "a", []),
    ("assistant", "b", []),
    ("user", "c", []),
    ("assistant", "d", []),
]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"system": "Be brief.", "query": "c", "response": "d", "history": [["a", "b"]]}, ASKED),
        ({"query": "c", "response": "d", "history": '[["a", "b"]]'}, ASKED[1:]),
        ({"conversation": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]}, ASKED[1:]),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, [("user", "Add\n1 2", []), ("assistant", "3", [])]),
        ({"instruction": "Say hi", "input": "", "output": "hi"}, [("user", "Say hi", []), ("assistant", "hi", [])]),
    ],
)  # fmt: skip
def test_questions_and_answers_in_columns(row: dict[str, Any], wanted: Any) -> None:
    assert said(one(row)) == wanted


def test_what_is_marked_is_not_learned() -> None:
    found = one({"messages": [USER, {**ANSWER, "loss": False}, USER, ANSWER]})
    assert found.start == 3 and len(found.messages) == 4
    with pytest.raises(ValueError, match='"loss" false in message 3'):
        one({"messages": [USER, ANSWER, USER, {**ANSWER, "loss": False}]})


@pytest.mark.parametrize(
    ("row", "form", "says"),
    [
        (
            {"messages": [USER, ANSWER], "videos": ["a.mp4"]},
            "sft",
            'has "videos"',
        ),
        ({"messages": [ANSWER], "rejected_response": "x"}, "dpo", "no user message"),
        (
            {"query": "a", "response": "b", "history": ["x"]},
            "sft",
            '"history" or "conversation" that is not a list',
        ),
        ({"query": "a", "response": "b", "history": "x"}, "sft", 'not valid JSON in "history"'),
        ({"messages": [USER, {"role": "tool_call", "content": "{"}]}, "sft", "invalid call in message 1"),
    ],
)
def test_mistakes(row: dict[str, Any], form: Form, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        one(row, form)


ROWS: dict[Form, dict[str, Any]] = {
    "sft": {"id": "a", "messages": DIALOGUE, "tools": [SEARCH]},
    "dpo": {"prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "No."}]},
    "kto": {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "label": True},
}


@pytest.mark.parametrize("form", ROWS)
def test_what_is_written_reads_the_same(form: Form) -> None:
    ours, back = one(ROWS[form], form), one(to_swift_row(ROWS[form]), form)
    for mine, other in zip(
        *(each if isinstance(each, list) else [each] for each in (ours, back)), strict=True
    ):
        assert said(mine) == said(other) and mine.start == other.start and mine.tools == other.tools
        assert mine.reward == other.reward


def test_thoughts_are_written_and_labels_of_turns_are_not() -> None:
    row = to_swift_row({"messages": [USER, {**ANSWER, "reasoning_content": "Asia"}]})
    assert row["messages"][1]["content"] == "<think>\nAsia\n</think>\n\nIn Japan."
    with pytest.raises(ValueError, match="--to prm without --format swift"):
        to_swift_row({"prompt": [USER], "completion": [ANSWER], "labels": [True]})


READ = """
import json, sys, datasets
from swift.dataset.preprocessor.core import AutoPreprocessor
from swift.model import get_model_processor
from swift.template.template_inputs import TemplateInputs
from swift.tuners import Swift
rows, model, adapter = sys.argv[1:]
for line in open(rows):
    row = AutoPreprocessor()(datasets.Dataset.from_list([json.loads(line)]), load_from_cache_file=False, strict=True)[0]
    read = TemplateInputs.from_dict({key: value for key, value in row.items() if value is not None})
    sides = [read.chosen.messages, read.rejected.messages if read.rejected else None]
    print(json.dumps({"sides": sides, "tools": read.chosen.tools}))
loaded, tokenizer = get_model_processor(model, model_type="qwen3")
kinds = [type(loaded).__name__, type(Swift.from_pretrained(loaded, adapter)).__name__]
print(json.dumps({"kinds": kinds, "words": len(tokenizer)}))
"""
FOLDER = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}


def trained(model: str, folder: str, **options: Any) -> Path:
    """One step of ours, written as a folder for others."""
    small = {
        "max_steps": 1,
        "batch_size": 1,
        "group_size": 2,
        "max_tokens": 4,
        "reward_function": lambda episode: 1.0,
    }
    trainer = GRPOTrainer(model, tasks=[{"prompt": "hi"}], **small, **options)
    trainer.train()
    trainer.save_model(folder)
    return Path(folder).resolve()


@pytest.mark.slow
@pytest.mark.program("ms-swift", "3", "ms-swift's row reader and model loader, on our files")
def test_ms_swift_reads_rows_and_loads_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package's own readers and loaders, in a process of its own."""
    if not (SWIFT / "swift").is_dir():
        pytest.skip("ms-swift is not installed: make servers")
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(to_swift_row(row)) + "\n" for row in ROWS.values()))
    model = trained("builtin:tiny", "model")
    adapter = trained(str(model), "adapter", use_lora=True)
    weights = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in model.iterdir()} == FOLDER | weights
    assert {path.name for path in adapter.iterdir()} == FOLDER | {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    env = {"PYTHONPATH": str(SWIFT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", READ, "rows.jsonl", str(model), str(adapter)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sft, dpo, kto, loaded = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["role"] for row in sft["sides"][0]] == ["user", "tool_call", "tool", "assistant"]
    assert json.loads(sft["sides"][0][1]["content"])["arguments"] == {"query": "Kyoto"}
    assert "search" in json.dumps(sft["tools"])
    assert [side[-1]["content"] for side in dpo["sides"]] == ["In Japan.", "No."]
    assert [row.get("loss") for row in kto["sides"][0]] == [None, False, None, None]
    assert loaded["kinds"] == ["Qwen3ForCausalLM", "PeftModelForCausalLM"] and loaded["words"] > 0
