"""Programs and files that the documents name beside the package."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_complete_program_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rl_training_example.py"])
    shim = "TrainingFactory.integrations.hello_agents.shim"
    with monkeypatch.context() as patched:
        for name in [name for name in sys.modules if name == shim or name.startswith("hello_agents")]:
            patched.delitem(sys.modules, name)
        runpy.run_path(str(ROOT / "examples" / "rl_training_example.py"), run_name="__main__")
        for name in [name for name in sys.modules if name == shim or name.startswith("hello_agents")]:
            del sys.modules[name]
    for name in ("sft", "grpo"):
        made = json.loads((tmp_path / "output" / name / "training_result.json").read_text())
        assert (made["status"], made["steps"]) == ("success", 2)
    assert str(tmp_path / "output" / "grpo") in capsys.readouterr().out


def test_the_small_dataset_is_what_its_script_makes(tmp_path: Path) -> None:
    made = runpy.run_path(str(ROOT / "examples" / "make_tool_calling_data.py"))
    made["main"](str(tmp_path / "rows.jsonl"))
    shipped = ROOT / "TrainingFactory" / "data" / "builtin" / "ds_tool_calling_v1.jsonl"
    assert (tmp_path / "rows.jsonl").read_text() == shipped.read_text()


def test_the_files_of_an_install_lead_to_pyproject() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert lines[-2:] == ["-c constraints.txt", "-e .[rl]"] and (ROOT / "constraints.txt").is_file()
    assert "setup(" in (ROOT / "setup.py").read_text()
