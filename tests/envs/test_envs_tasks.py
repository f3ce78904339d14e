from __future__ import annotations

from pathlib import Path

import pytest

from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.types import Message, Task


def written(folder: Path, text: str) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_tasks_from_a_file(tmp_path: Path):
    path = written(
        tmp_path,
        '{"prompt": "2 + 2?", "answer": 4, "level": "easy", "metadata": {"source": "book"}}\n'
        "\n"
        '{"id": 7, "prompt": [{"role": "user", "content": "Größe\u2028?"}]}\n',
    )
    assert load_tasks(path) == [
        Task("tasks-1", "2 + 2?", 4, {"level": "easy", "source": "book"}),
        Task("7", [Message("user", "Größe\u2028?")]),
    ]
    bom = tmp_path / "bom.jsonl"
    bom.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}')
    assert load_tasks(bom) == [Task("bom-1", "a")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('{"prompt": "a"}\n{"prompt": "b"\n', r"line 2 is not valid JSON"),
        ('{"question": "a", "answer": 1}', r'line 1 has no "prompt"; its keys are: question, answer'),
        ("[1]", r"line 1 must be an object"),
        ('{"prompt": ""}', r"line 1.*not empty"),
        ('{"prompt": 3}', r"line 1.*must be a text or a list of messages"),
        ('{"prompt": [{"content": "a"}]}', r"line 1.*role"),
        ('{"prompt": [{"role": "bot", "content": "a"}]}', r"line 1.*'bot'"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', r"line 1.*end before the model's turn"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', r"line 2.*already that of line 1"),
        ('{"prompt": "a", "metadata": 3}', r"line 1.*metadata"),
    ],
)
def test_bad_files_are_told_by_line(tmp_path: Path, text: str, says: str):
    with pytest.raises(ValueError, match=says):
        load_tasks(written(tmp_path, text))


def test_all_bad_lines_are_told_at_once(tmp_path: Path):
    with pytest.raises(ValueError) as caught:
        load_tasks(written(tmp_path, "nonsense\n" * 30))
    text = str(caught.value)
    assert "line 1 " in text and "line 5 " in text and "and 20 more" in text


def test_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match="no file of tasks"):
        load_tasks(tmp_path / "none.jsonl")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match=r"tasks\.jsonl is not a UTF-8 text"):
        load_tasks(path)
