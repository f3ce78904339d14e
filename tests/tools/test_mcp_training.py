"""Training with a tool that comes from an MCP server over stdio: it learns, and it survives the server."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from statistics import fmean

from tests.kits.mcp import wait_until
from tests.kits.run import Quiet
from tests.kits.warm import Homes
from tests.servers.homes_server import HOMES
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.services.build.training import Training
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.services.training.dataset import Objects
from TrainingFactory.types import Trajectory

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "tests" / "servers" / "homes_server.py"


class ServedHomes(Homes):
    """The places are those that the server knows, and the tool is the server's."""

    lookup = None  # type: ignore[assignment]

    @classmethod
    def home(cls, name: str, rng: random.Random) -> str:
        return HOMES[name]


def served(folder: Path) -> Path:
    """The kind of file that other programs have."""
    environment = {"PYTHONPATH": str(ROOT), "HOMES_FOLDER": str(folder)}
    server = {"command": sys.executable, "args": [str(SERVER)], "env": environment}
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"homes": server}}))
    return path


def training_with(folder: Path, warm: Path, steps: int, watcher: Quiet, evaluate: bool = False) -> Training:
    config = TrainingConfig(
        model=str(warm),
        tools=[{"name": "homes", "config": str(served(folder))}],
        training={
            "max_steps": steps, "batch_size": 8, "group_size": 8, "learning_rate": 6e-4, "warmup_steps": 2,
            "eval_every": steps if evaluate else None,
        },
        grpo={"scale_rewards": False},
        data={"count": 400, "heldout_count": 128},
        sampling={"max_tokens": 24, "deterministic": True},
        logging={"output_dir": str(folder / "runs")},
    )  # fmt: skip
    return Training(config, name="a", objects=Objects(environment=ServedHomes), watcher=watcher)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def episodes(folder: Path) -> list[Trajectory]:
    return list(load_trajectories(folder / "runs" / "a" / "trajectories.jsonl"))


def test_it_learns_with_a_tool_over_stdio(tmp_path: Path, warm: Path) -> None:
    report = training_with(tmp_path, warm, 12, Quiet(), evaluate=True).train()
    curve = [row["accuracy"] for row in report.rows if "accuracy" in row]
    before, after = (row["eval/success"] for row in report.rows if "eval/success" in row)
    # At least 128 episodes each: a share has a deviation of 0.045 at most. What is usual is over 0.3.
    assert fmean(curve[-3:]) > fmean(curve[:2]) + 0.1, curve
    assert after > before + 0.1
    played = episodes(tmp_path)
    assert {spec.name for spec in played[0].tools} == {"lookup"}
    asked = [sum(len(turn.message.tool_calls) for turn in t.turns) for t in played]
    assert fmean(asked[-128:]) > fmean(asked[:128])  # it learned to ask
    last = report.rows[-1]
    assert last["tools/lookup/calls"] > 32 and 0 < last["tools/lookup/p50"] <= last["tools/lookup/p95"]
    assert not alive(int((tmp_path / "pid").read_text()))  # the server went with the run


def test_it_survives_the_death_of_its_server(tmp_path: Path, warm: Path) -> None:
    pid_file, hold, held = (tmp_path / name for name in ("pid", "hold", "held"))

    class Holding(Quiet):
        def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
            if step == 2:
                hold.touch()

    def kill_when_held() -> None:
        wait_until(held.exists, 300)
        hold.unlink()
        os.kill(int(pid_file.read_text()), signal.SIGKILL)

    killed_by = threading.Thread(target=kill_when_held)
    killed_by.start()
    report = training_with(tmp_path, warm, 7, Holding()).train()
    killed_by.join()
    assert report.state == "finished" and report.steps == 7
    down = [int(row["episodes/tool_failure"]) for row in report.rows]
    # Calls wait for it to be back, and the run where a step had none to learn from.
    assert down[:2] == [0, 0] and down[2] > 0 and down[6] == 0
    lost = [trajectory for trajectory in episodes(tmp_path) if trajectory.status == "tool_failure"]
    assert len(lost) == sum(down)
    assert all(trajectory.reward is None for trajectory in lost)  # nothing is learned from them
    assert {trajectory.turns[-1].tool_results[-1].error for trajectory in lost} == {"unavailable"}
    assert report.rows[6]["tools/lookup/success"] > 0.5  # it is back
    assert RunFolder(tmp_path / "runs" / "a").state == "finished"
    assert not alive(int(pid_file.read_text()))
