"""What tests of printed pages share."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kits.notebooks import Kernel, notebook_kernel


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


@pytest.fixture(scope="session")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for all tests, because importing torch takes longer than the tests."""
    with notebook_kernel(tmp_path_factory.mktemp("notebook")) as started:
        yield started
