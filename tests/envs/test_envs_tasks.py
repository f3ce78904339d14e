from __future__ import annotations

from pathlib import Path

import pytest

from TrainingFactory.data.tasks import load_tasks
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
        ("nonsense\n" * 30, r"(?s)line 1 .*line 5 .*and 20 more"),
        (b'{"prompt": "\xff\xfe"}\n', r"tasks\.jsonl is not a UTF-8 text"),
        (None, "no file of tasks"),
    ],
)
def test_bad_files_are_told_by_line(tmp_path: Path, text: str | bytes | None, says: str):
    path = tmp_path / "tasks.jsonl"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=says):
        load_tasks(path)
