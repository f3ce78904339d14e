"""Files of a user: loaded once, each with what lies beside it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import episode
from TrainingFactory.assembly.environment import load_environment_file
from TrainingFactory.rewards.loading import load_reward

BOTH = """
from TrainingFactory.envs import ToolEnvironment

seen = []

class Mine(ToolEnvironment):
    pass

def score(episode):
    seen.append(1)
    return float(len(seen))

def kind(episode):
    return float(issubclass(episode, Mine))
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test loads is gone after it: other tests have files of the same names."""
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.modules.clear()
    sys.modules.update(modules)
    sys.path[:] = path


def paid(target: Any) -> float:
    return asyncio.run(load_reward(str(target))(episode())).outcome


def folder(tmp_path: Path, name: str, worth: int, text: str) -> Path:
    (tmp_path / name).mkdir()
    (tmp_path / name / "beside_it.py").write_text(f"WORTH = {worth}\nseen = []\n")
    (tmp_path / name / "rewards.py").write_text(text)
    return tmp_path / name / "rewards.py"


EARLY = "import beside_it\n\ndef score(episode):\n    return beside_it.WORTH\n"
LATE = "def score(episode):\n    import late_one\n    return late_one.WORTH\n"


def test_environment_and_reward_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "both.py"
    file.write_text(BOTH)
    mine: Any = load_environment_file(f"{file}:Mine")
    assert load_reward(f"{file}:kind").function(mine) == 1.0
    monkeypatch.chdir(tmp_path)
    assert [paid(f"{file}:score"), paid("both.py:score")] == [1.0, 2.0]  # the same list, by either name
    file.write_text(BOTH + "\n# changed\n")
    assert paid(f"{file}:score") == 1.0


def test_files_of_one_name_have_their_own_siblings(tmp_path: Path):
    one, two = folder(tmp_path, "one", 1, EARLY), folder(tmp_path, "two", 2, EARLY)
    (two.parent / "more.py").write_text(
        "import beside_it\n\ndef score(episode):\n    return beside_it.seen\n"
    )
    assert [paid(f"{one}:score"), paid(f"{two}:score"), paid(f"{one}:score")] == [1.0, 2.0, 1.0]
    assert sys.modules["beside_it"].__file__ == str(one.parent / "beside_it.py")
    # What lies beside two files of a folder is one module for both.
    first: Any = load_reward(f"{two}:score").function.__globals__["beside_it"]
    assert load_reward(f"{two.parent}/more.py:score").function.__globals__["beside_it"] is first
    (one.parent / "late_one.py").write_text("WORTH = 7\n")
    one.write_text(LATE)
    assert paid(f"{one}:score") == 7.0  # an import inside a function
    (two.parent / "json.py").write_text("raise RuntimeError('not this one')\n")
    two.write_text("import json\n" + EARLY)
    assert paid(f"{two}:score") == 2.0


def test_a_file_that_fails_is_read_again(tmp_path: Path):
    file = tmp_path / "rewards.py"
    for text, says in (
        ("def score(:\n", "rewards.py:1: "),
        ("x = 1 / 0\n", "rewards.py:1: ZeroDivisionError"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            load_reward(f"{file}:score")
    file.write_text("def score(episode):\n    return 1\n")
    os.utime(file, ns=(1, 1))
    assert paid(f"{file}:score") == 1.0
