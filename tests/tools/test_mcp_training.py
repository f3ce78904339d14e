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
from typing import Any

import psutil
import pytest

from tests.kits.mcp import ROOT, SERVERS
from tests.kits.run import Quiet
from tests.kits.tools import no_turn_is_cut
from tests.kits.waiting import wait_until
from tests.kits.warm import Homes
from tests.servers.homes_server import HOMES
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Episode
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.tools.mcp import servers
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Message, Step, Task, ToolCall, Trajectory


class ServedHomes(Homes):
    """The places are those that the server knows, and the tool is the server's."""

    lookup = None  # type: ignore[assignment]

    @classmethod
    def home(cls, name: str, rng: random.Random) -> str:
        return HOMES[name]


def served(folder: Path) -> Path:
    """The kind of file that other programs have."""
    environment = {"PYTHONPATH": str(ROOT), "HOMES_FOLDER": str(folder)}
    server = {"command": sys.executable, "args": [str(SERVERS / "homes_server.py")], "env": environment}
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"homes": server}}))
    return path


def training_with(folder: Path, environment: Any, watcher: Quiet, **sections: Any) -> Training:
    tools = [{"name": "homes", "config": str(served(folder))}]
    config = TrainingConfig(tools=tools, logging={"output_dir": str(folder / "runs")}, **sections)
    return Training(config, name="a", objects=UserObjects(environment=environment), watcher=watcher)


def episodes(folder: Path) -> list[Trajectory]:
    return list(load_trajectories(folder / "runs" / "a" / "trajectories.jsonl"))


@pytest.mark.slow
def test_it_learns_with_a_tool_over_stdio(tmp_path: Path, warm: Path) -> None:
    training = {"max_steps": 12, "batch_size": 8, "group_size": 8, "learning_rate": 6e-4, "warmup_steps": 2}
    report = training_with(
        tmp_path, ServedHomes, Quiet(), model=str(warm), training=training | {"eval_every": 12},
        grpo={"scale_rewards": False}, data={"count": 400, "heldout_count": 128},
        sampling={"max_tokens": 24, "deterministic": True},
    ).train()  # fmt: skip
    curve = [row["accuracy"] for row in report.rows if "accuracy" in row]
    before, after = (row["eval/success"] for row in report.rows if "eval/success" in row)
    # At least 128 episodes each: a share has a deviation of 0.045 at most. What is usual is over 0.3.
    assert fmean(curve[-3:]) > fmean(curve[:2]) + 0.1, curve
    assert after > before + 0.1
    played = episodes(tmp_path)
    asked = [sum(len(turn.message.tool_calls) for turn in t.turns) for t in played]
    assert fmean(asked[-128:]) > fmean(asked[:128])  # it learned to ask
    last = report.rows[-1]
    assert last["tools/lookup/calls"] > 32 and 0 < last["tools/lookup/p50"] <= last["tools/lookup/p95"]


class Asking(ToolEnvironment):
    """Whatever the model says, it asks once."""

    def __init__(self, task: Task, tools: Any = ()) -> None:
        super().__init__(task, tools)
        self.asked = False

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> list[Task]:
        return [Task(name, "Where?") for name in list(HOMES)[:2]]

    async def step(self, message: Message) -> Step:
        if self.asked:
            return Step(done=True)
        self.asked = True
        call = ToolCall("lookup", {"name": self.task.id})
        return await super().step(Message("assistant", tool_calls=[call]))

    def reward(self, episode: Episode) -> float:
        return float(sum(episode.trajectory.turns[-1].completion.token_ids) % 5)


def test_it_survives_the_death_of_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_turn_is_cut(monkeypatch)
    monkeypatch.setattr(servers, "RECONNECT_SECONDS", 300.0)  # a busy machine starts a server slowly
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
    training = {"max_steps": 5, "batch_size": 2, "group_size": 2}
    sections: dict[str, Any] = {"training": training, "sampling": {"max_tokens": 4}}
    report = training_with(tmp_path, Asking, Holding(), **sections).train()
    killed_by.join()
    assert report.state == "finished" and report.steps == 5
    down = [int(row["episodes/tool_failure"]) for row in report.rows]
    # Calls wait for it to be back, and the run where a step had none to learn from.
    assert down[:2] == [0, 0] and down[2] > 0 and down[-1] == 0
    played = episodes(tmp_path)
    assert {spec.name for spec in played[0].tools} == {"lookup"}
    lost = [trajectory for trajectory in played if trajectory.status == "tool_failure"]
    assert len(lost) == sum(down)
    assert all(trajectory.reward is None for trajectory in lost)  # nothing is learned from them
    assert {trajectory.turns[-1].tool_results[-1].error for trajectory in lost} == {"unavailable"}
    assert report.rows[-1]["tools/lookup/success"] == 1  # it is back
    assert RunFolder(tmp_path / "runs" / "a").state == "finished"
    assert not psutil.pid_exists(int(pid_file.read_text()))  # the server went with the run
