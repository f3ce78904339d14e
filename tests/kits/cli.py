"""Commands in tests: here by the fixture `tfactory`, which gives (status, stdout, stderr), or in their own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = """
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.types import Task

class Mine(ToolEnvironment):
    @classmethod
    def tasks(cls, split, seed, count):
        return [Task(str(n), "[bold]hello[/bold] \\x1b[31m", "x") for n in range(count)]
"""


def python(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start Python in that folder, with this package to be imported and more variables."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
