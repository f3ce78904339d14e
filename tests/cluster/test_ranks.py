"""A learner in several processes: who starts them, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from tests.kits.cli import ROOT, Run
from tests.kits.forks import FORKED, fork
from tests.kits.run import Quiet, brief, go_on, rows, train
from tests.kits.scale import SCALE
from tests.kits.warm import lift
from TrainingFactory.assembly import learner_processes as ranks
from TrainingFactory.cluster.launcher import LAUNCHER_VARIABLES
from TrainingFactory.cluster.ranks import ShardedPolicy
from TrainingFactory.runs.folder import RunFolder

CONFIG = """
model: {name: builtin:tiny}
training: {algorithm: grpo, max_steps: 2, batch_size: 2, group_size: 2}
environment: {environment_id: calculator, max_turns: 2}
sampling: {max_tokens: 4, deterministic: true}
"""
CHILD = "common/workers/child.py"


def learners() -> list[psutil.Process]:
    children = [each for each in psutil.Process().children() if CHILD in " ".join(each.cmdline())]
    return children + [psutil.Process(pid) for pid in Forked.pids if psutil.pid_exists(pid)]


class Pair:
    """A group of two processes whose other one answers what the test puts into `answers`."""

    def __init__(self) -> None:
        self.num_ranks, self.has_ended = 2, False
        self.calls: list[str] = []
        self.answers: queue.Queue[str] = queue.Queue()

    def broadcast(self, method: str, *args: Any) -> None:
        self.calls.append(method)

    def receive_from(self, rank: int) -> str:
        return self.answers.get(timeout=30)


async def test_a_cancelled_call_ends_before_the_next_one_begins() -> None:
    pair, evaluated, seen = Pair(), asyncio.Event(), []
    made = ShardedPolicy(pair, lambda error: None, "")  # pyright: ignore[reportArgumentType]

    async def saved() -> None: ...

    evaluation = asyncio.create_task(made.call("evaluate", (), evaluated.wait))
    while not pair.calls:
        await asyncio.sleep(0.01)
    evaluation.cancel()
    saving = asyncio.create_task(made.call("save", (), saved))
    await asyncio.sleep(0.05)
    seen.append(list(pair.calls))
    evaluated.set()
    pair.answers.put("")  # of the evaluation
    while len(pair.calls) < 2:
        await asyncio.sleep(0.01)
    pair.answers.put("")  # of the checkpoint
    await saving
    pair.has_ended = True
    pair.answers.put("")
    assert [*seen, pair.calls] == [["evaluate"], ["evaluate", "save"]]


class Strikes(Quiet):
    """Kills a learner when a step is done, or after Ctrl-C, at the checkpoint that it asks for."""

    def __init__(self, at: int, interrupts: bool = False) -> None:
        super().__init__()
        self.at, self.interrupts, self.asked = at, interrupts, False

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        if step == self.at and self.interrupts:
            self.asked = True
            signal.raise_signal(signal.SIGINT)
        elif step == self.at:
            self.kill()

    def phase(self, name: str) -> None:
        if name == "checkpoint" and self.asked:
            self.kill()

    def kill(self) -> None:
        for each in learners():
            each.kill()


def lost(run: RunFolder, interrupts: bool) -> None:
    """Let a learner be killed in the run, which tells how to go on."""
    with pytest.raises(
        OSError, match=r"learner 1 \(process \d+ on .*is gone; steps since .*: 1\. .*runs resume"
    ):
        if run.path.exists():
            go_on(run.path, watcher=Strikes(3, interrupts))
        else:
            train(brief(run.path.parent, compute={"learners": 2}), run.name, Strikes(3, interrupts))
    assert run.state == "failed" and not learners()


def assert_goes_on(run: RunFolder, whole: Path) -> None:
    """To the metrics of one process that was left alone; to the bit those of several: `benchmarks.rank_kills`."""
    assert go_on(run.path).state == "finished" and not learners()
    found, wanted = (rows(folder / "metrics.jsonl") for folder in (run.path, whole))
    for key in ("step", "loss", "grad_norm", "entropy", "reward", "trained_tokens"):
        assert [row[key] for row in found] == pytest.approx(
            [row[key] for row in wanted], rel=1e-3, abs=1e-5
        ), key


class Forked:
    """What `Worker` is to `assembly/learner_processes.py`, forked from a process that has torch already."""

    pids: ClassVar[list[int]] = []

    def __init__(self, target: str, **_: Any) -> None:
        assert target == ranks.SERVE_FUNCTION

    async def ask(self, place: list[Any], _: None) -> None:
        self._process = fork(ranks.serve_started_rank, place)
        assert self._process.pid is not None
        self.pids.append(self._process.pid)
        await asyncio.to_thread(self._process.join)

    async def close(self) -> None:
        self._process.kill()
        self._process.join()


@FORKED
def test_a_learner_is_killed_and_the_run_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With learners that are forked; `make test-slow` kills one that is started as always, after Ctrl-C."""
    monkeypatch.setattr(ranks, "Worker", Forked)
    lost(run := RunFolder(tmp_path / "broken"), interrupts=False)
    assert_goes_on(run, whole)


@pytest.mark.slow
def test_a_learner_is_killed_after_ctrl_c(whole: Path, tmp_path: Path) -> None:
    lost(run := RunFolder(tmp_path / "broken"), interrupts=True)
    lost(run, interrupts=True)
    assert_goes_on(run, whole)


def launched(folder: Path, *arguments: str, count: int = 2) -> subprocess.Popen[str]:
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *arguments]
    given = {"PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | given, **pipes)


CLI = ("-m", "TrainingFactory.cli")


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    out, err = (run := launched(tmp_path, *CLI, "train", "run.yaml", "--name", "a")).communicate(timeout=300)
    assert run.returncode == 0, out + err
    assert err.count("step 2/2") == 1 and [each.name for each in (tmp_path / "runs").iterdir()] == ["a"]
    made = RunFolder(tmp_path / "runs" / "a")
    assert made.config.compute.learners == 2 and made.state == "finished" and len(made.metrics()) == 2


MISTAKES = [
    (
        {"WORLD_SIZE": "2", "RANK": "0"},
        ["compute.learners=3"],
        "is 3, but the launcher started 2 processes: set it to 2, or leave it out",
    ),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, [], "DeepSpeed is not supported .*ACCELERATE_USE_DEEPSPEED"),
    ({}, ["compute.learners=2", "model.device=cuda:1"], "is cuda:1, but each of 2 learners"),
    ({}, ["compute.learners=2", "training.optimizer=adamw_8bit"], "adamw_8bit"),
]


@pytest.mark.parametrize(("given", "overrides", "text"), MISTAKES)
def test_mistakes(
    tfactory: Run, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], overrides: list[str], text: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    Path("run.yaml").write_text(CONFIG, encoding="utf-8")
    status, _, err = tfactory("train", "run.yaml", *overrides)
    assert status == 2 and re.search(text, " ".join(err.split())), err
    assert not Path("runs").exists()


def test_other_commands_run_once(tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert tfactory("runs", "list") == (0, "", "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    status, _, err = tfactory("runs", "list")
    assert status == 0 and "of 2 processes" in " ".join(err.split())
    assert not any(name in os.environ for name in LAUNCHER_VARIABLES)


SCRIPT = """
from TrainingFactory.services.sft_trainer import SFTTrainer
rows = [{"prompt": f"{n}?", "completion": str(n)} for n in range(8)]
report = SFTTrainer("builtin:tiny", dataset=rows, name="script", batch_size=4, max_steps=2).train()
print(report.state, report.steps, report.run)
"""


@pytest.mark.slow
def test_a_script_with_a_trainer(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    out, err = (run := launched(tmp_path, "script.py")).communicate(timeout=300)
    assert run.returncode == 0, err
    assert [line for line in out.splitlines() if "finished" in line] == ["finished 2 runs/script"] * 2, (
        out + err
    )


@pytest.mark.slow
def test_ctrl_c_under_torchrun(tmp_path: Path) -> None:
    given = ("train", "run.yaml", "--name", "a", "training.max_steps=500", "logging.checkpoint_every=1000")
    run, metrics = launched(tmp_path, *CLI, *given), tmp_path / "runs" / "a" / "metrics.jsonl"
    while run.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 1):
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=300)
    made = RunFolder(tmp_path / "runs" / "a")
    assert made.state == "interrupted" and len(made.checkpoints()) == 1, err
    assert len(made.metrics()) == int(made.checkpoints()[0].name.removeprefix("step-"))


@pytest.mark.slow
def test_processes_with_other_configs(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    runs = []
    for rank, rate in enumerate(("1e-5", "2e-5")):
        given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        given |= {"LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *CLI, "train", "run.yaml", f"training.learning_rate={rate}"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs.append(subprocess.Popen(command, cwd=tmp_path, env=os.environ | given, **pipes))
    (_, told), (_, quiet) = (run.communicate(timeout=300) for run in runs)
    assert [run.returncode for run in runs] == [2, 1] and not quiet
    assert "learner 1 on" in told and "training.learning_rate 2e-05 (here 1e-05)" in " ".join(told.split())


@SCALE
@pytest.mark.slow
def test_actors_of_ray_are_learners(tmp_path: Path, ray_head: str) -> None:
    sections: dict[str, Any] = {"sampling": {"deterministic": False}, "training": {"max_steps": 3}}
    compute = {"backend": "ray", "address": ray_head, "learners": 2}
    config = brief(tmp_path, **sections, compute=compute)
    train(config, "whole")

    class Kills(Quiet):
        def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
            if step == 2:
                import ray  # pyright: ignore[reportMissingImports]

                [name] = [each for each in ray.util.list_named_actors() if ":learner 1:" in each]
                ray.kill(ray.get_actor(name))

    with pytest.raises(OSError, match=r"learner 1 .*is gone; steps since .*: 2\. .*runs resume"):
        train(config, "broken", Kills())
    assert go_on(tmp_path / "broken").state == "finished"
    found, wanted = (rows(tmp_path / name / "metrics.jsonl") for name in ("broken", "whole"))
    for key in ("step", "loss", "grad_norm", "reward", "trained_tokens"):
        assert [row[key] for row in found] == pytest.approx(
            [row[key] for row in wanted], rel=1e-3, abs=1e-5
        ), key


@SCALE
@pytest.mark.slow
def test_everything_at_once_learns(warm: Path, tmp_path: Path, ray_head: str) -> None:
    """Two samplers with vLLM on Ray, two learners, groups sampled ahead: GRPO learns what it learns on a laptop."""
    compute = {"backend": "ray", "address": ray_head, "samplers": 2, "learners": 2, "cpus_per_sampler": 0.5}
    options = {"kv_cache_memory_bytes": 2**28}
    before, after, report = lift(
        warm, tmp_path, compute=compute,
        sampling={"max_tokens": 24, "deterministic": False, "engine": "vllm", "engine_options": options},
        optimization={"async_rollout": True, "max_staleness": 1}, model={"name": str(warm), "dtype": "float32"},
    )  # fmt: skip
    assert report.state == "finished" and after > before + 0.2, (before, after)
    assert max(row.get("staleness/max", 0) for row in report.rows) == 1
