"""The second try of `make test` for tests that failed beside others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LATE = """
import pytest, pathlib

@pytest.mark.parametrize("value", ["a@b"])
@pytest.mark.xdist_group("late")
def test_late(value):
    tried = pathlib.Path({tried!r})
    first = not tried.exists()
    tried.touch()
    assert not first
"""
WRONG = "\ndef test_wrong():\n    assert 1 == 2\n"
ONLY_XDIST = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "xdist.plugin",
}  # other plugins take seconds
MANY = "\n@pytest.mark.parametrize('which', range(6))\ndef test_many(which):\n    assert False\n"


def suite(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a module of tests in two processes, as `make test` does."""
    (folder / "test_it.py").write_text(
        text.replace("{tried!r}", repr(str(folder / "tried"))), encoding="utf-8"
    )
    options = ["-p", "tests.kits.second_try", "-p", "no:cacheprovider", "--dist", "loadgroup", "-n", "2"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), *options, str(folder)],
        capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, **ONLY_XDIST},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        (LATE, 0, "Failed beside others and passed alone"),
        (LATE + WRONG, 1, "Again, alone"),
        (LATE + MANY, 1, "7 failed"),
    ],
    ids=["passes", "fails-again", "too-many"],
)
def test_second_try(tmp_path: Path, text: str, status: int, says: str) -> None:
    result = suite(tmp_path, text)
    assert result.returncode == status, result.stdout
    assert says in result.stdout
    assert ("Again, alone" in result.stdout) == (says != "7 failed")
