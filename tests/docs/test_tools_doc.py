"""What docs/TOOLS.md prints runs as printed."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kits.cli import Run
from tests.kits.docs import Page
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.data.trajectories import load_trajectories

PAGE = Page("docs/TOOLS.md")


def test_from_a_function_to_a_training_run(program: Callable[[str], str]) -> None:
    code = PAGE.block("def temperature")
    assert len(code.splitlines()) < 20
    saved = next(load_trajectories(Path(program(code).split()[-1], "trajectories.jsonl")))
    assert [spec.name for spec in saved.tools] == ["temperature"] and saved.reward is not None


def test_from_an_mcp_file_to_a_training_run(tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "mcp.json": PAGE.block('"mcpServers": {"shop"'),
        "tasks.jsonl": PAGE.block("the lamp cost"),
        "shop.yaml": PAGE.block("Look the price up"),
    }
    commands = PAGE.block("tfactory train shop.yaml --name shop").splitlines()
    assert sum(text.count("\n") for text in files.values()) + len(commands) < 20
    for name, text in (files | {"shop_server.py": PAGE.block("async def price")}).items():
        Path(name).write_text(text, encoding="utf-8")
    here = Path(sys.executable).parent  # for `python`
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}{os.environ['PATH']}")
    for line in commands:
        program, *arguments = shlex.split(line)
        assert program == "tfactory"
        if "--replay" in arguments:
            Path("shop_server.py").unlink()
        assert tfactory(*arguments)[0] == 0, line
    for name in ("shop", "again"):
        saved = next(load_trajectories(f"runs/{name}/trajectories.jsonl"))
        assert [spec.name for spec in saved.tools] == ["price"] and saved.prompt[0].role == "system"


def test_every_printed_command_exists_and_every_config_is_one(tmp_path: Path) -> None:
    assert PAGE.commands()
    for text in PAGE.of("yaml"):
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
        load_config(tmp_path / "a.yaml")
    for name in ToolEntry.model_fields:
        assert f"`{name}`" in PAGE.text
    assert TrainingConfig().logging.record_tools  # as it says
