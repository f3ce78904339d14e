"""What docs/FACTORIES.md prints runs as printed."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.docs import Page
from TrainingFactory.resolve.factories import read_entries

PAGE = Page("docs/FACTORIES.md")


def test_the_file_and_the_commands(tfactory: Run) -> None:
    Path("factories.yaml").write_text(PAGE.block("models:"), encoding="utf-8")
    assert read_entries()["environments"]["env_search_v1"].sampling.max_tokens == 128
    Path("factories.yaml").unlink()
    *adds, shown = PAGE.commands()
    for words in adds:
        assert tfactory(*words[1:])[0] == 0
    assert "8 GPUs of local" in tfactory(*shown[1:])[1]


def test_the_parts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(PAGE.block("batch_execute"), "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    space: dict[str, Any] = {}
    asyncio.run(FunctionType(code, space)())
    assert (space["results"][0].content, space["result"].content) == ("42", "42")
    assert len(space["trajectories"]) == 2 and space["reward"].outcome == 0.0
    assert [reward.outcome for reward in space["rewards"]] == [0.0, 0.0]
