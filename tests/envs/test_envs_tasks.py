from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.training.dataset import make_tasks
from TrainingFactory.types import Message, Task


def test_tasks_from_a_file(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"prompt": "2 + 2?", "answer": 4, "level": "easy", "metadata": {"source": "book"}}\n\n'
        '{"id": 7, "prompt": [{"role": "user", "content": "Größe\u2028?"}]}\n',
        encoding="utf-8",
    )
    assert load_tasks(path) == [
        Task("tasks-1", "2 + 2?", 4, {"level": "easy", "source": "book"}),
        Task("7", [Message("user", "Größe\u2028?")]),
    ]
    bom = tmp_path / "bom.jsonl"
    bom.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}')
    assert load_tasks(bom) == [Task("bom-1", "a")]


def double(number: int) -> str:
    """Twice a number."""
    return str(2 * number)


ROWS = [
    {"id": None, "prompt": "2 + 2?", "answer": "4", "level": "easy"},
    {"id": "b", "prompt": "3 + 3?", "answer": "6"},
]


def test_tasks_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rows = datasets.Dataset.from_list(ROWS)
    Path("tasks.json").write_text(json.dumps({"data": ROWS}))
    Path("tasks.csv").write_text("id,prompt,answer,level\n,2 + 2?,4,easy\nb,3 + 3?,6,\n")
    rows.to_parquet("tasks.parquet")
    datasets.DatasetDict({"train": rows}).save_to_disk("tasks")
    both = [Task("tasks-1", "2 + 2?", "4", {"level": "easy"}), Task("b", "3 + 3?", "6")]
    for source in ("tasks.json", "tasks.csv", "tasks.parquet", "tasks"):
        assert load_tasks(source) == both, source
    named = [replace(both[0], id="task-1"), both[1]]
    for source in (ROWS, rows, datasets.DatasetDict({"train": rows}), iter(ROWS)):
        assert load_tasks(source) == named, source
    assert load_tasks(both, count=1) == load_tasks("tasks.csv", count=1) == both[:1]
    config = TrainingConfig(data={"tasks": "tasks.csv", "count": 1})
    assert make_tasks(config, ToolEnvironment) == both[:1]
    trainer = GRPOTrainer(tools=[double], tasks=rows)
    assert trainer.objects.tasks == named
    Path("cell.csv").write_text('prompt\n"[{""role"": ""user"", ""content"": ""a""}]"\n')
    assert load_tasks("cell.csv") == [Task("cell-1", [Message("user", "a")])]


def test_tasks_from_the_hub(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[Any, ...]] = []

    def load(name: str, configuration: str | None, split: str) -> Any:
        asked.append((name, configuration, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    config = TrainingConfig(data={"tasks": "openai/gsm8k:main", "dataset_split": "test", "count": 1})
    assert [task.id for task in make_tasks(config, ToolEnvironment)] == ["gsm8k:main-1"]
    assert asked == [("openai/gsm8k", "main", "test")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('{"prompt": "a"}\n{"prompt": "b"\n', r"line 2 is not valid JSON"),
        (
            '{"text": "a", "answer": 1}',
            r'line 1 has no "prompt"; its columns are: text, answer; .*data.columns',
        ),
        ("[1]", r"line 1 must be an object"),
        ('{"prompt": ""}', r"line 1.*non-empty"),
        ('{"prompt": 3}', r'line 1.*invalid "prompt"'),
        ('{"prompt": [{"content": "a"}]}', r"line 1.*role"),
        ('{"prompt": [{"role": "bot", "content": "a"}]}', r"line 1.*'bot'"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', r"line 1.*end before the model's turn"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', r"line 2.*same id .*line 1"),
        ('{"prompt": "a", "metadata": 3}', r"line 1.*metadata"),
        (
            "nonsense\n" * 30,
            r"^\S+, line 1 is not valid JSON: [^\n]*no line .* JSONL, JSON, Parquet or CSV [^\n]*$",
        ),
        ('{"prompt": "a"}\n' + "nonsense\n" * 30, r"(?s)line 2 .*line 5 .*and 20 more"),
        (b'{"prompt": "\xff\xfe"}\n', r"tasks\.jsonl is not UTF-8 text.*JSONL, JSON, Parquet or CSV"),
        (None, "data file not found: .*JSONL, JSON, Parquet or CSV"),
    ],
)
def test_bad_files_are_told_by_line(tmp_path: Path, text: str | bytes | None, says: str):
    path = tmp_path / "tasks.jsonl"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=says):
        load_tasks(path)
