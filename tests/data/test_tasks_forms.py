"""Tasks by whatever names their columns have: in Python, in files, in a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.kits.cli import Run
from tests.kits.rules import GSM8K
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.services import GRPOTrainer, SFTTrainer
from TrainingFactory.training.dataset import make_tasks
from TrainingFactory.types import Message, Task

WORKED = "3 + 4 = <<3+4=7>>7\n#### 7"
ROW = {"question": "3 + 4?", "answer": WORKED}  # as GSM8K has them


def pair(task: Task) -> tuple[Any, Any]:
    return task.prompt, task.answer


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (ROW, ("3 + 4?", WORKED)),
        ({"problem": "a", "solution": "b", "level": 1}, ("a", "b")),
        ({"problem": "a", "solution": "b", "answer": "c"}, ("a", "c")),
        ({"prompt": "a", "ground_truth": "b", "question": "x"}, ("a", "b")),
        ({"query": "a"}, ("a", None)),
        ({"messages": [{"role": "user", "content": "a"}], "solution": "b"}, ([Message("user", "a")], "b")),
        ({"system": "s", "question": "a"}, ([Message("system", "s"), Message("user", "a")], None)),
        ({"prompt": [{"role": "user", "content": "a"}], "reward_model": {"style": "rule", "ground_truth": "b"},
          "data_source": "nq"}, ([Message("user", "a")], "b")),  # as verl and RL-Factory have them
    ],
)  # fmt: skip
def test_common_names_are_known(row: dict[str, Any], wanted: tuple[Any, Any]) -> None:
    [task] = load_tasks([row])
    assert pair(task) == wanted
    # what was called otherwise stays, for rewards that ask for it by that name
    assert task.metadata.items() >= {key: row[key] for key in row if key not in ("prompt", "answer")}.items()


def test_columns_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"frage": "3 + 4?", "extra": {"loesung": "7"}}]
    names, wanted = {"prompt": "frage", "answer": "extra.loesung"}, ("3 + 4?", "7")
    Path("tasks.jsonl").write_text(json.dumps(rows[0]))
    Path("tasks.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet("tasks.parquet")
    sources = ["tasks.jsonl", "tasks.json", "tasks.parquet", rows, datasets.Dataset.from_list(rows)]
    assert [pair(load_tasks(each, columns=names)[0]) for each in sources] == [wanted] * len(sources)
    Path("tasks.csv").write_text("frage,loesung\n3 + 4?,7\n")
    Path("a.yaml").write_text("data: {tasks: tasks.csv, columns: {prompt: frage, answer: loesung}}\n")
    by_file = load_config("a.yaml")
    by_words = load_config(None, ["data.tasks=tasks.csv", "data.columns={prompt: frage, answer: loesung}"])
    for config in (by_file, by_words):
        assert [pair(task) for task in make_tasks(config, ToolEnvironment)] == [wanted]
    trainer = GRPOTrainer(tasks=rows, columns=names)
    assert trainer.objects.tasks and pair(trainer.objects.tasks[0]) == wanted
    # the same for rows to learn from
    examples = SFTTrainer(
        dataset=[ROW], columns={"prompt": "question", "completion": "answer"}
    ).objects.examples
    assert examples and examples.usable[0].conversations[0].messages[1] == Message("assistant", WORKED)


@pytest.mark.parametrize(
    ("row", "columns", "says"),
    [
        (ROW, {"prompt": "frage"}, r"row 0 .*data.columns: 'frage' for prompt; its columns are: question, answer"),
        (ROW, {"answer": "answer.text"}, "'answer.text' for answer"),
        ({"instruction": "a", "input": "b"}, {}, "it could be instruction or input; .*data.columns"),
        ({"text": "a"}, {}, "has no \"prompt\"; its columns are: text; name the column"),
    ],
)  # fmt: skip
def test_mistakes(row: dict[str, Any], columns: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_tasks([row], columns=columns)


def test_a_config_with_tasks_alone_is_a_conversation(tfactory: Run) -> None:
    Path("math.jsonl").write_text("".join(json.dumps(ROW | {"id": n}) + "\n" for n in range(2)))
    Path("math.yaml").write_text(
        "data: {tasks: math.jsonl}\nreward: {type: rule_based, options: {rule: numeric}}\n"
        "training: {batch_size: 1, group_size: 2, max_steps: 1}\nsampling: {max_tokens: 8}\n"
    )
    status, out, err = tfactory("train", "math.yaml", "--name", "math")
    assert status == 0, out + err
    saved = [json.loads(line) for line in Path("runs/math/trajectories.jsonl").read_text().splitlines()]
    assert len(saved) == 2 and saved[0]["task"]["answer"] == WORKED and saved[0]["reward"] is not None


def test_gsm8k_itself() -> None:
    if GSM8K is None:
        pytest.skip("GSM8K is not beside the checkout")
    tasks = make_tasks(
        TrainingConfig(data={"tasks": str(GSM8K / "train.jsonl"), "count": 50}), ToolEnvironment
    )
    assert len(tasks) == 50 and all("####" in str(task.answer) for task in tasks)
    assert str(tasks[0].prompt).startswith("Natalia")
