"""What the README prints runs as printed; its programs run in test_notebook.py."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from TrainingFactory.cli.app import app
from TrainingFactory.config import load_config
from TrainingFactory.data.trajectories import load_trajectories

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def block(containing: str) -> str:
    [found] = [text for _, text in BLOCKS if containing in text]
    return found


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_environment_runs_as_printed(tmp_path: Path) -> None:
    code = block("class Weather")
    assert len(code.splitlines()) <= 25
    (tmp_path / "weather.py").write_text(code, encoding="utf-8")
    program, *arguments = shlex.split(block("tfactory rollout weather.py\n").strip())
    assert program == "tfactory"
    done = run([sys.executable, "-m", "TrainingFactory.cli", *arguments], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "How warm is it in Oslo?" in done.stdout
    assert "temperature(city)" in done.stdout
    saved = re.search(r"saved 3 episodes to (\S+)", done.stderr)
    assert saved, done.stderr
    trajectories = list(load_trajectories(tmp_path / saved[1]))
    assert [trajectory.task.id for trajectory in trajectories] == ["Oslo", "Cairo", "Lima"]
    assert all(trajectory.reward is not None for trajectory in trajectories)


def test_every_printed_command_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "tfactory":
            app.parse_args(words[1:], exit_on_error=False, print_error=False)
        for word in words:
            if word.startswith("configs/"):
                load_config(ROOT / word, [word for word in words if "=" in word])


def test_the_map_is_right() -> None:
    table = README[README.index("## Map") :]
    for path in (ROOT / "TrainingFactory").iterdir():
        if path.name[0] != "_" and (path.is_dir() or path.suffix == ".py"):
            assert path.name in table, path.name
