"""What tests of printed pages share."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Runs a printed program as a script in an empty folder, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(code: str) -> str:
        Path("program.py").write_text(code, encoding="utf-8")
        runpy.run_path("program.py", run_name="__main__")
        return capsys.readouterr().out

    return run
