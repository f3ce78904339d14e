"""What a run or an episode has opened for its tools is closed with it, however it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.kits.rollout import FakeChat, rollout
from tests.kits.run import Quiet, small
from TrainingFactory.common import catalog
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.evaluation.rollouts import Rollouts, check_tools
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import Task


class Process:
    """A source with something to end."""

    started: ClassVar[list[Process]] = []
    ended: ClassVar[list[Process]] = []
    closed: ClassVar[list[str]] = []  # sessions

    async def open(self) -> None:
        self.started.append(self)

    def session(self) -> Any:
        return Process.Session()

    async def close(self) -> None:
        self.ended.append(self)

    class Session:
        tools: ClassVar[list[Any]] = []

        async def close(self) -> None:
            Process.closed.append("session")


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_an_environment_that_does_not_close_gives_its_sessions_back(how: str) -> None:
    closed = Process.closed
    closed.clear()

    class Broken(ToolEnvironment):
        def __init__(self, task: Task) -> None:
            super().__init__(task, [Process()])

        async def close(self) -> None:
            if how == "raises":
                raise RuntimeError("no")
            await asyncio.sleep(600)

    [[played]] = rollout(Broken, lambda *_: "ok", episode_timeout=60 if how == "raises" else 0.5)
    assert played.status == "done" and closed == ["session"]
    if how == "raises":
        with pytest.raises(ValueError, match="no"):
            asyncio.run(check_tools(Broken, Task("a", "?"), FakeChat()))
        assert closed == ["session"] * 2


def test_what_a_run_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"id": "a", "prompt": "2*3?", "answer": "6"}\n')
    monkeypatch.setitem(catalog._CATALOG["tool"], "process", f"{__name__}:Process")
    Process.started.clear()
    Process.ended.clear()
    config = small(tmp_path, training={"max_steps": 2, "batch_size": 1, "group_size": 2})
    config = TrainingConfig(**config.model_dump() | {"tools": ["process"], "data": {"tasks": "tasks.jsonl"}})
    Training(config, name="fine", watcher=Quiet()).train()
    with pytest.raises(RuntimeError, match="broken off"):
        Training(config, name="broken", watcher=Quiet(fail_at=1)).train()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "config.json").write_text("{}")  # what is wrong with it shows when it is loaded
    with pytest.raises(ValueError, match=r"\./hollow"):
        hollow = TrainingConfig(**config.model_dump() | {"model": "./hollow"})
        Training(hollow, name="c", watcher=Quiet()).train()
    with pytest.raises(ValueError, match="already exists"):
        Training(config, name="fine", watcher=Quiet())
    with pytest.raises(ValueError, match="did you mean calculator"):
        wrong = TrainingConfig(**config.model_dump() | {"tools": ["process", "calculato"]})
        Training(wrong, name="d", watcher=Quiet()).train()
    Rollouts(config).run()
    assert len(Process.started) == 4 and Process.ended == Process.started
    assert not (tmp_path / "c").exists() and not (tmp_path / "d").exists()
