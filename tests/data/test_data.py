"""Rows of datasets as what algorithms learn from: all forms, all kinds of files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.data import ANSWER, BROKEN, CALL, DIALOGUE, RESULT, SEARCH, USER, calling, load, one
from TrainingFactory.data.examples import load_examples
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.training.dataset import find_call_problem
from TrainingFactory.types import Message

# -- forms


def test_messages_with_tools() -> None:
    found = one({"messages": [*DIALOGUE, {"role": "user", "content": "Thanks"}], "tools": [SEARCH], "id": 7})
    call = found.messages[1].tool_calls[0]
    assert (call.name, call.arguments) == ("search", {"query": "Kyoto"})
    assert found.messages[2].name == "search"  # by the id of the call
    assert [message.role for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.start == 1 and found.id == "7" and found.tools[0].name == "search"


def test_sharegpt_with_calls() -> None:
    calls = [{"name": "search", "arguments": {"query": city}} for city in ("Kyoto", "Oslo")]
    said = {
        "human": ["Where are Kyoto and Oslo?"],
        "gpt": ["Let me look."],
        "function_call": [json.dumps(calls)],
        "observation": ["Japan", "Norway"],
        "chatgpt": ["In Japan and Norway."],
    }
    turns = [{"from": who, "value": text} for who, texts in said.items() for text in texts]
    found = one({"system": "Use tools.", "tools": json.dumps([SEARCH]), "conversations": turns})
    roles = [message.role for message in found.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
    said = found.messages[2]
    assert said.content == "Let me look."
    assert [call.arguments["query"] for call in said.tool_calls] == ["Kyoto", "Oslo"]
    assert found.messages[3] == Message("tool", "Japan", name="search")


def test_prompts_and_completions() -> None:
    said = [Message("user", "hi"), Message("assistant", "hello")]
    assert one({"prompt": "hi", "completion": "hello"}).messages == said
    # answers in a prompt are not learned
    found = one({"prompt": [USER, ANSWER, USER], "completion": [CALL, RESULT, ANSWER], "tools": [SEARCH]})
    assert found.context == found.start == 3 and len(found.messages) == 6


def test_pairs() -> None:
    chosen, rejected = one({"prompt": "hi", "chosen": "hello", "rejected": "what?"}, "dpo")
    assert (chosen.reward.outcome, rejected.reward.outcome) == (1.0, 0.0)
    assert chosen.messages[-1].content == "hello" and rejected.messages[-1].content == "what?"
    assert chosen.start == rejected.start == 1
    # whole conversations: what they have in common is the prompt, with the answers in it
    bad = {"role": "assistant", "content": "In China."}
    row = {"chosen": DIALOGUE, "rejected": [USER, CALL, RESULT, bad], "tools": [SEARCH], "margin": 0.25}
    chosen, rejected = one(row, "rm")
    assert chosen.start == rejected.start == 3
    assert chosen.reward.outcome == 0.25
    # they part where the answers are the same and what came back is not: that call is where they differ
    other = {"role": "tool", "content": "China", "tool_call_id": "c1"}
    chosen, rejected = one({"chosen": DIALOGUE, "rejected": [USER, CALL, other, bad]}, "dpo")
    assert chosen.start == rejected.start == 1
    # a prompt in a column of its own that both sides repeat
    chosen, _ = one({"prompt": USER["content"], "chosen": [USER, ANSWER], "rejected": [USER, bad]}, "dpo")
    assert [message.role for message in chosen.messages] == ["user", "assistant"]


def test_labels() -> None:
    for label, wanted in ((True, 1.0), (0, 0.0), ("false", 0.0), ("1", 1.0)):
        assert one({"prompt": "a", "completion": "b", "label": label}, "kto").reward.outcome == wanted
    assert one({"messages": DIALOGUE, "label": True}, "kto").reward.outcome == 1.0
    assert one({"messages": DIALOGUE, "labels": [True, False]}, "prm").reward.steps == [1.0, -1.0]
    found = one({"prompt": "2+2+1?", "completions": ["2+2=4", "so 6"], "labels": [True, False]}, "prm")
    assert found.steps == ["2+2=4", "so 6"] and found.reward.steps == [1.0, -1.0]
    assert found.messages[-1].content == "2+2=4\nso 6"


def test_a_bad_example_may_show_a_bad_call() -> None:
    wrong = [USER, calling("serach", {"query": "Kyoto"})]
    row = {"prompt": [USER], "chosen": [ANSWER], "rejected": wrong[1:], "tools": [SEARCH]}
    assert one(row, "dpo")[1].messages[-1].tool_calls[0].name == "serach"
    assert one({"messages": wrong, "tools": [SEARCH], "label": False}, "kto").reward.outcome == 0.0
    with pytest.raises(ValueError, match="serach"):
        one({"messages": wrong, "tools": [SEARCH], "label": True}, "kto")
    with pytest.raises(ValueError, match='"chosen"'):
        one(row | {"chosen": row["rejected"], "rejected": row["chosen"]}, "dpo")


def test_calls_that_cannot_be_read_may_be_shown_as_bad_ones() -> None:
    """As texts, with what was written in them; on the good side they are mistakes."""
    broken, raw = calling("search", '{"query": '), '"arguments": {"query": }'
    row = {"prompt": [USER], "chosen": [ANSWER], "rejected": [broken], "tools": [SEARCH]}
    said = one(row, "dpo")[1].messages[-1]
    assert raw in said.content and '"name": "search"' in said.content and not said.tool_calls
    assert one(row | {"rejected": BROKEN}, "rm")[1].messages[-1].content == BROKEN
    assert raw in one({"messages": [USER, broken], "label": False}, "kto").messages[-1].content
    with pytest.raises(ValueError, match="call of 'search' in message 1"):
        one({"messages": [USER, broken], "label": True}, "kto")
    dialogue = [USER, broken, RESULT, ANSWER]
    found = one({"messages": dialogue, "labels": [0, 1]}, "prm")
    assert raw in found.messages[1].content and found.bad == {1}
    with pytest.raises(ValueError, match="invalid call in message 1"):
        one({"messages": dialogue, "labels": [1, 0]}, "prm")
    turns = [{"from": "human", "value": "Where?"}, {"from": "function_call", "value": "{bad"}]
    assert "{bad" in one({"conversations": turns, "label": False}, "kto").messages[-1].content


def test_the_system_text_is_in_both_sides_of_a_pair() -> None:
    bad = {"role": "assistant", "content": "In China."}
    sides = {"system": "Be brief.", "chosen": [USER, ANSWER], "rejected": [USER, bad]}
    for prompt in ({}, {"prompt": USER["content"]}, {"prompt": [USER]}):
        for side in one(sides | prompt, "dpo"):
            assert [message.role for message in side.messages] == ["system", "user", "assistant"], prompt
            assert side.messages[0].content == "Be brief." and side.start == 2
    # a prompt without a question, as JSON in a text
    row = sides | {"prompt": '[{"role": "system", "content": "S"}]', "system": None}
    assert [message.role for message in one(row, "dpo")[0].messages] == ["system", "user", "assistant"]


def test_columns_that_are_null_are_not_there(tmp_path: Path) -> None:
    row = {"id": None, "messages": None, "prompt": "a", "completion": "b", "tools": None, "system": None}
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": None}
    assert one(row).id == "row-1" and one(pair, "rm")[0].reward.outcome == 1.0
    for name, text in (("a.jsonl", json.dumps(row)), ("a.json", json.dumps([row]))):
        (tmp_path / name).write_text(text)
        assert load_examples(tmp_path / name, "sft").usable[0].id == "a-1"


def test_labels_of_one_class_are_noted() -> None:
    fine = {"messages": DIALOGUE, "labels": [1, 0]}
    assert load([fine], "prm").notes == []
    (note,) = load([fine | {"labels": [1, 1]}] * 2, "prm").notes
    assert note.startswith("all 4 labels are positive at reward_model.threshold 0")
    (note,) = load([{"prompt": "a", "completion": "b", "label": 0}], "kto").notes
    assert note.startswith("all 1 labels are negative at kto.threshold 0.5")


# -- files


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    import datasets

    asked = [calling("search", {"query": f"{n}"}) for n in range(5)]
    said = [[USER, call, RESULT, ANSWER] for call in asked]
    table = [{"id": f"{n}", "messages": messages, "tools": [SEARCH]} for n, messages in enumerate(said)]
    wanted = load(table, "sft").usable
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, table)))
    (tmp_path / "a.json").write_text(json.dumps(table, indent=1))
    (tmp_path / "wrapped.json").write_text(json.dumps({"data": table}))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, table)))
    # As datasets keep them: Arrow gives every object the keys of all, null where a row has none.
    now = {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}
    mixed = [row | {"tools": [SEARCH, now]} for row in table]
    made = datasets.Dataset.from_list(mixed)
    assert "zone" in made[0]["tools"][0]["parameters"]["properties"]
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(str(tmp_path / "splits"))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "messages", "tools"])
        writer.writerows([row["id"], json.dumps(row["messages"]), json.dumps(row["tools"])] for row in table)
    for name in ("a.jsonl", "a.json", "wrapped.json", "lines.json", "a.csv"):
        found = load_examples(tmp_path / name, "sft", check_call=find_call_problem).usable
        assert [each.conversations for each in found] == [each.conversations for each in wanted], name
    arrow = [each.conversations[0] for each in load(mixed, "sft").usable]
    for source in (tmp_path / "a.parquet", str(tmp_path / "saved"), tmp_path / "splits", made):
        found = load_examples(source, "sft", check_call=find_call_problem).usable
        assert [each.conversations[0].messages for each in found] == [each.messages for each in arrow]
        assert [each.conversations[0].tools for each in found] == [each.tools for each in arrow]
    assert len(load_examples(tmp_path / "splits", "sft", split="test")) == 1
    with pytest.raises(ValueError, match="no split 'dev'; its splits are: train, test"):
        load_examples(tmp_path / "splits", "sft", split="dev")
    assert load_examples(tmp_path / "a.jsonl", "sft").usable[3].location == f"{tmp_path / 'a.jsonl'}, line 7"
    assert len(load_examples(tmp_path / "a.jsonl", "sft", count=2)) == 2


def test_datasets_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def give(name: str, configuration: str | None, split: str) -> Any:
        asked.append((name, configuration, split))
        if "gone" in name:
            raise ConnectionError("the hub cannot be reached\nand more")
        return datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", give)
    (example,) = load_examples("someone/chats:small", "sft", split="test").usable
    assert asked == [("someone/chats", "small", "test")] and example.location == "someone/chats:small, row 0"
    with pytest.raises(ValueError, match=r"someone/gone is not a local file.*cannot be reached"):
        load_examples("someone/gone", "sft")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", "", "a.jsonl is empty; sft needs rows with"),
        ("a.json", "[]", "a.json is empty"),
        ("a.json", "[1]", "a.json, row 0 must be an object"),
        ("a.json", "3", "a list of objects"),
        ("a.json", "[{]", "is not valid JSON"),
        ("a.csv", "prompt,completion\na,b,c\n", "a.csv, line 2 must have 2 cells"),
        ("a.parquet", "no", "Parquet file"),
        ("a.jsonl", "{", "a.jsonl, line 1 is not valid JSON"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=expected):
        load_examples(tmp_path / name, "sft")


def test_folders_and_names_that_are_none(tmp_path: Path) -> None:
    nothing = "is not a dataset: it has neither dataset_info.json nor train.jsonl"
    said = {nothing: tmp_path, "data file not found": tmp_path / "x.parquet"}
    for text, source in (said | {"not a int": 3}).items():
        with pytest.raises(ValueError, match=text):
            load_examples(source, "sft")


def test_a_folder_with_a_file_for_each_split(tmp_path: Path) -> None:
    for split, count in {"train": 2, "test": 1}.items():
        (tmp_path / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "Two. #### 2"}\n' * count)
    assert [len(load_tasks(tmp_path, split)) for split in ("train", "test")] == [2, 1]
