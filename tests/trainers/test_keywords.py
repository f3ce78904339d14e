"""The trainers' keywords: the config's own names and types, and what a type checker makes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.keyword_types import PATH, stub


def test_the_generated_types_are_those_of_the_schema():
    assert PATH.read_text(encoding="utf-8") == stub(), "run `make stubs`"
    assert "    max_steps: int | None\n" in stub() and "    output_dir: str | Path\n" in stub()


SNIPPET = """\
from TrainingFactory import GRPOTrainer, Task, TrainingConfig, tool

right = GRPOTrainer("builtin:tiny", environment="search", learning_rate=1e-5, kl=0.1, config=TrainingConfig())
GRPOTrainer(lerning_rate=1e-5)
GRPOTrainer(margin=0.1)
GRPOTrainer(schedule="cosin")
reveal_type(right.train().steps)
"""


@pytest.mark.slow
def test_a_type_checker_finds_slips(tmp_path: Path):
    pytest.importorskip("pyright", reason="pyright is not installed")
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    (tmp_path / "pyrightconfig.json").write_text("{}")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    lines = [line.strip() for line in done.stdout.splitlines() if "snippet.py:" in line]
    told = [(int(line.split(":")[1]), line.partition(" - ")[2]) for line in lines]
    assert [(line, text.split(":")[0]) for line, text in told] == [
        (4, "error"),
        (5, "error"),
        (6, "error"),
        (7, "information"),
    ], done.stdout + done.stderr
    assert 'No parameter named "lerning_rate"' in told[0][1] and told[3][1].endswith('is "int"')
