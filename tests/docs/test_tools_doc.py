"""What docs/TOOLS.md prints runs as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from TrainingFactory.cli import main
from TrainingFactory.cli.app import app
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.data.trajectories import load_trajectories

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "TOOLS.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def block(containing: str) -> str:
    [found] = [text for _, text in BLOCKS if containing in text]
    return found


def test_from_a_function_to_a_training_run(tmp_path: Path) -> None:
    code = block("def temperature")
    assert len(code.splitlines()) < 20
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    saved = next(load_trajectories(tmp_path / done.stdout.split()[-1] / "trajectories.jsonl"))
    assert [spec.name for spec in saved.tools] == ["temperature"] and saved.reward is not None


def test_from_an_mcp_file_to_a_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "mcp.json": block('"mcpServers": {"shop"'),
        "tasks.jsonl": block("the lamp cost"),
        "shop.yaml": block("Look the price up"),
    }
    commands = block("tfactory train shop.yaml --name shop").splitlines()
    assert sum(text.count("\n") for text in files.values()) + len(commands) < 20
    for name, text in (files | {"shop_server.py": block("async def price")}).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )  # for `python`
    for line in commands:
        program, *arguments = shlex.split(line)
        assert program == "tfactory"
        if "--replay" in arguments:
            (tmp_path / "shop_server.py").unlink()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert not ended.value.code, line
    for name in ("shop", "again"):
        saved = next(load_trajectories(tmp_path / "runs" / name / "trajectories.jsonl"))
        assert [spec.name for spec in saved.tools] == ["price"] and saved.prompt[0].role == "system"


def test_every_printed_command_exists_and_every_config_is_one(tmp_path: Path) -> None:
    for kind, text in BLOCKS:
        for line in text.splitlines() if kind == "bash" else []:
            words = shlex.split(line, comments=True)
            if words and words[0] == "tfactory":
                app.parse_args(words[1:], exit_on_error=False, print_error=False)
        if kind == "yaml":
            (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
            load_config(tmp_path / "a.yaml")
    for name in ToolEntry.model_fields:
        assert f"`{name}`" in TEXT
    assert TrainingConfig().logging.record_tools  # as it says
