"""Runs that the page starts, stops and resumes: processes that need no page."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kits.cli import ROOT, Run
from tests.kits.page import Served, command, serving
from tests.kits.registry import made_run
from tests.kits.waiting import wait_until
from TrainingFactory.runs import stopping
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.web import processes

YAML = "model: builtin:tiny\nenvironment: search\ntraining: {max_steps: 400}\n"
PRETENDED = [sys.executable, str(ROOT / "tests/kits/pretended_run.py")]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(processes, "CLI_COMMAND", PRETENDED)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with serving(tmp_path / "runs") as served:
        yield served


def row(page: Served, name: str) -> dict[str, object]:
    return next(row for row in page.get("/api/runs")["runs"] if row["name"] == name)


def test_a_run_is_started_stopped_and_resumed(page: Served, tmp_path: Path) -> None:
    started = page.post("/api/train", yaml=YAML, name="mine")
    assert started["name"] == "mine" and "tfactory train" in started["command"]
    run = RunFolder(tmp_path / "runs" / "mine")
    assert run.config.training.max_steps == 400 and run.config.logging.output_dir == str(tmp_path / "runs")
    wait_until(lambda: row(page, "mine")["step"])
    assert page.send("/api/runs/mine/resume").status_code == 409
    assert page.send("/api/train", yaml=YAML, name="mine").status_code == 409
    stopped = page.post("/api/runs/mine/stop")
    assert stopped["command"].startswith("tfactory runs stop ")
    wait_until(lambda: row(page, "mine")["state"] == "interrupted")
    assert page.send("/api/runs/mine/stop").status_code == 409
    assert (
        "step 1/400 \x1b[31m<b>" in page.get("/api/runs/mine/log")["text"]
    )  # text, for the page to show as text
    before = run.status.step
    assert page.post("/api/runs/mine/resume")["state"] == "running"
    wait_until(lambda: run.status.step > before)
    page.post("/api/runs/mine/stop")
    wait_until(lambda: run.state == "interrupted")
    assert not list((tmp_path / "runs").glob(".*.part"))


def test_two_pages_that_do_the_same(page: Served, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        started = [threads.submit(page.send, "/api/train", yaml=YAML, name="mine") for _ in range(3)]
        assert sorted(each.result().status_code for each in started) == [200, 409, 409]
        stopped = [threads.submit(page.send, "/api/runs/mine/stop") for _ in range(3)]
        assert {each.result().status_code for each in stopped} <= {200, 409}
    run = RunFolder(tmp_path / "runs" / "mine")
    wait_until(lambda: run.state == "interrupted")
    # Asked for the second time, a run would end at once, without a checkpoint.
    assert page.get("/api/runs/mine/log")["text"].count("asked to stop") == 1


def test_what_cannot_start_says_why(page: Served, tmp_path: Path) -> None:
    answer = page.send("/api/train", yaml=YAML.replace("builtin:tiny", "broken"), name="mine")
    assert answer.json()["error"]["message"] == "model.name: there is no such model"
    answer = page.send("/api/train", yaml="modle: x")
    assert answer.json()["error"]["param"] == "modle" and "/tmp" not in answer.text
    answer = page.send("/api/train", yaml="reward: {options: {api_key: sk-abcdefghijklmnop}}", name="mine")
    assert "secret" in answer.json()["error"]["message"] and "sk-abc" not in answer.text
    assert not list((tmp_path / "runs").glob("*")) and not list((tmp_path / "runs").glob(".*"))


def test_killing_a_run_never_breaks_the_page(page: Served, tmp_path: Path) -> None:
    page.post("/api/train", yaml=YAML, name="mine")
    os.kill(stopping.stop_run(RunFolder(tmp_path / "runs" / "mine")), signal.SIGKILL)
    wait_until(lambda: row(page, "mine")["state"] in ("killed", "interrupted"))
    assert page.get("/api/runs/mine")["row"]["name"] == "mine"
    assert page.send("/api/runs/mine/stop").status_code == 409


def test_a_container_that_ends_lets_its_runs_save(
    page: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_processes", [])  # other tests start runs that are no processes
    runs = [RunFolder(tmp_path / "runs" / name) for name in ("a", "b")]
    for run in runs:
        page.post("/api/train", yaml=YAML, name=run.name)
    assert processes.stop_runs({stopping.stop_run(runs[0])}) == 2
    for run in runs:
        assert run.state == "interrupted"
        # A second signal would end a run without its checkpoint.
        assert (run.path / "run.log").read_text().count("asked to stop") == 1


def test_a_run_survives_the_page(tmp_path: Path, tfactory: Run) -> None:
    runs = tmp_path / "runs"
    script = f"""
import sys
from TrainingFactory.web import processes
processes.CLI_COMMAND = {PRETENDED!r}
from TrainingFactory.cli import main
main(sys.argv[1:])
"""
    with command(tmp_path, script=script) as (page, process):
        name = page.post("/api/train", yaml=YAML)["name"]
        assert name.startswith("grpo-search-")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    run = RunFolder(runs / name)
    before = run.status.step
    wait_until(lambda: run.status.step > before + 1)
    assert run.state == "running"
    assert tfactory("runs", "stop", name, "--runs", str(runs))[0] == 0
    wait_until(lambda: run.state == "interrupted")


def test_what_nobody_runs_is_not_stopped(page: Served, tmp_path: Path) -> None:
    made_run(tmp_path / "runs", "done")
    refused = page.send("/api/runs/done/stop")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        409,
        "run done is finished, not running",
    )
    assert "finished" in page.send("/api/runs/done/resume").json()["error"]["message"]


@pytest.mark.slow
def test_a_real_run_is_started_stopped_with_a_checkpoint_and_finished(tmp_path: Path) -> None:
    config = (
        "model: builtin:tiny\nenvironment: search\nlogging: {checkpoint_every: 1000}\n"
        "training: {algorithm: sft, max_steps: 12, batch_size: 2, learning_rate: 0.001}\n"
    )
    with command(tmp_path) as (page, _):
        page.post("/api/train", yaml=config, name="mine")
        run = RunFolder(tmp_path / "runs" / "mine")
        wait_until(lambda: row(page, "mine")["step"])
        page.post("/api/runs/mine/stop")
        wait_until(lambda: row(page, "mine")["state"] == "interrupted")
        assert [path.name for path in run.checkpoints()] == [f"step-{run.status.step:06d}"]
        assert "resume with: tfactory runs resume mine" in page.get("/api/runs/mine/log")["text"]
        page.post("/api/runs/mine/resume")
        wait_until(lambda: row(page, "mine")["state"] == "finished")
        assert page.get("/api/runs/mine/metrics")["steps"] == [*range(1, 13)]
