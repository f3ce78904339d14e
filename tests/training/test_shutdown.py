"""A run that gets a signal to stop loses nothing, warns early where it cannot stop in time, and fits on its disk."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kits.run import Parity, Quiet, assert_same_run, brief, go_on, small, train
from TrainingFactory.assembly.export import export
from TrainingFactory.common.event_loop import treat_sigterm_as_ctrl_c
from TrainingFactory.config.schema import LoggingSection
from TrainingFactory.data import disk
from TrainingFactory.data.disk import TRAINING_STATE_FILES, find_modified_files
from TrainingFactory.promotion.model_registry import ModelRegistry
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.trainers import loop_setup as build
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.training.forecasts import CheckpointSpace, StopForecast
from TrainingFactory.training.interrupts import Interrupts


@pytest.fixture(autouse=True)
def own_sigterm() -> Iterator[list[int]]:
    """A handler of the program's own, which is back after a run."""
    received: list[int] = []

    def handler(number: int, _: Any) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    yield received
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, before)


class Terminating(Quiet):
    """A watcher in whose phase of that name SIGTERM comes to the process, the `nth` time that it begins."""

    def __init__(self, name: str, nth: int) -> None:
        super().__init__()
        self.name, self.left = name, nth

    def phase(self, name: str) -> None:
        self.left -= name == self.name
        if name == self.name and self.left == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


@pytest.mark.parametrize("phase", ["generate", "update"])
def test_sigterm_stops_with_a_checkpoint(
    whole: Path, tmp_path: Path, phase: str, own_sigterm: list[int]
) -> None:
    report = train(brief(tmp_path), "a", Terminating(phase, 2))
    run = RunFolder(tmp_path / "a")
    assert report.state == run.state == "interrupted" and not own_sigterm
    assert run.checkpoints()[-1].name == f"step-{report.steps:06d}"
    assert go_on(run.path).state == "finished"
    assert_same_run(whole, run.path)


def test_sigterm_stops_an_evaluation_which_a_resumed_run_repeats(tmp_path: Path) -> None:
    every = {"training": {"eval_every": 2}, "data": {"heldout_count": 3}}
    train(brief(tmp_path, **every), "whole")
    assert train(brief(tmp_path, **every), "a", Terminating("evaluate", 2)).state == "interrupted"
    run = RunFolder(tmp_path / "a")
    assert [row["step"] for row in run.metrics()] == [0, 1]
    assert json.loads((run.checkpoints()[-1] / "state.json").read_text())["step"] == 2
    go_on(run.path)
    assert_same_run(tmp_path / "whole", run.path)


def test_two_signals_of_one_request_are_one_and_a_later_one_ends_the_run() -> None:
    said: list[str] = []
    cancelled: list[str] = []

    class Task:
        def cancel(self) -> None:
            cancelled.append("run")

    interrupts = Interrupts(said.append)
    interrupts._run_task = Task()  # type: ignore[assignment]
    interrupts.request_stop()
    interrupts.request_stop()
    assert len(said) == 1 and "SIGTERM" in said[0] and not cancelled
    interrupts._request_time -= 10
    interrupts.request_stop()
    assert cancelled == ["run"]


def test_sigterm_reaches_a_program_that_ignores_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells start background jobs of scripts
    try:
        with treat_sigterm_as_ctrl_c(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_that_stops_slowly_says_what_to_set() -> None:
    forecast = StopForecast(save_seconds=20)
    assert forecast.make_warning() is None
    forecast.update_seconds = 25
    assert "terminationGracePeriodSeconds: 75" in (forecast.make_warning() or "")
    assert forecast.make_warning() is None  # once


class Usage(NamedTuple):
    free: int


def test_a_run_warns_of_a_full_disk_and_a_short_grace_period(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = RunFolder(whole).checkpoints()[-1]
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(int(2.5 * size)))
    monkeypatch.setattr(build, "DISK_BYTES_PER_SECOND", 1000)
    config = small(tmp_path, training={"max_steps": 3}, logging={"checkpoint_every": 1})
    with pytest.raises(RuntimeError, match="broken off"):
        train(config, "b", watcher := Quiet(fail_at=1))
    disk, grace = watcher.said[:2]
    assert "3 checkpoints" in disk and "logging.keep_checkpoints=1 or logging.optimizer_state=newest" in disk
    assert "terminationGracePeriodSeconds" in grace


@pytest.mark.parametrize(
    ("options", "steps", "needed"),
    [
        ({}, 1000, 3 * 14),  # two, and the one that is being written
        ({}, 30, 2 * 14),  # a run that makes only two
        ({"keep_every": 100}, 1000, 13 * 14),
        ({"keep_every": 40}, 1000, 8 * 14),  # every 200th is a checkpoint
        ({"keep_best": True, "keep_checkpoints": 3}, 1000, 5 * 14),
        ({"optimizer_state": "newest", "keep_every": 100}, 1000, 13 * 2 + 2 * 12),
    ],
)
def test_space_of_checkpoints(options: dict[str, Any], steps: int, needed: int) -> None:
    logging = LoggingSection(**options)
    space = CheckpointSpace(logging, steps, 2 * 10**9, 12 * 10**9)
    assert space.compute_bytes(logging) == needed * 10**9
    assert space.make_warning(needed * 10**9, "runs/a") is None
    assert "runs/a has 1.0 GB" in (space.make_warning(10**9, "runs/a") or "")


def test_largest_settings_that_fit() -> None:
    space = CheckpointSpace(LoggingSection(keep_checkpoints=5, keep_every=100), 1000, 2 * 10**9, 12 * 10**9)
    assert "=newest with logging.keep_checkpoints=2," in (space.make_warning(50 * 10**9, "runs/a") or "")
    assert "logging.keep_every=null" in (space.make_warning(45 * 10**9, "runs/a") or "")


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps whose checkpoints but the newest have no optimizer state."""
    folder = tmp_path_factory.mktemp("light")
    kept = {"checkpoint_every": 1, "keep_checkpoints": 3, "optimizer_state": "newest"}
    train(brief(folder, logging=kept), "a")
    return folder / "a"


def test_older_checkpoints_are_models_without_optimizer_state(
    light: Path, whole: Path, tmp_path: Path
) -> None:
    *older, newest = RunFolder(light).checkpoints()
    assert [path.name for path in older] == ["step-000002", "step-000003"]
    assert not [path for path in older for name in TRAINING_STATE_FILES if (path / name).exists()]
    assert (newest / TRAINING_STATE_FILES[0]).is_file() and not any(
        map(find_modified_files, (*older, newest))
    )
    assert find_model(f"{light}@step-2").folder == older[0]
    export(str(older[0]), tmp_path / "model")
    registry = ModelRegistry(tmp_path / "registry.sqlite", light.parent)
    registry.register("agent", f"{light}@step-2")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert_same_run(whole, light)


def test_a_run_resumes_from_the_newest_checkpoint_alone(light: Path, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(light, tmp_path / "a"))
    shutil.rmtree(RunFolder(folder).checkpoints()[-1])
    watcher = Quiet()
    with pytest.raises(ValueError, match="checkpoints of run a are damaged"):
        go_on(folder, watcher=watcher)
    assert f"model.name={folder / 'checkpoints' / 'step-000003'}" in watcher.said[0]
    stopped = brief(tmp_path, logging={"checkpoint_every": 1, "optimizer_state": "newest"})
    with pytest.raises(RuntimeError, match="broken off"):
        train(stopped, "b", Quiet(fail_at=3), environment=Parity)
    go_on(tmp_path / "b")
    assert_same_run(whole, tmp_path / "b")


def test_a_kill_while_optimizer_state_is_removed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(Path(shutil.copytree(whole, tmp_path / "a")))
    old, newest = run.checkpoints()

    def killed(path: Path) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Path, "unlink", killed)
        disk.delete_training_state(old)
    assert (old / TRAINING_STATE_FILES[0]).is_file() and not find_modified_files(old)
    shutil.rmtree(newest)
    assert (
        Training(run.config, run=run, objects=UserObjects(environment=Parity), watcher=Quiet()).train().steps
        == 4
    )
    assert_same_run(whole, run.path)
    run.prune(2, None, optimizer_states="newest")
    assert not (old / TRAINING_STATE_FILES[0]).exists() and not find_modified_files(old)
