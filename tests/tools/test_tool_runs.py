"""Runs and their tools: recorded, replayed, resumed, and with servers that are down."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.kits.rollout import Echo
from tests.kits.run import EXACT, Quiet, assert_same_run, rows, small
from tests.kits.tools import Down, no_turn_is_cut
from TrainingFactory.protocols import Episode
from TrainingFactory.runs.folder import RunFolder, TrainingReport
from TrainingFactory.tools import tool
from TrainingFactory.tools.recording import CALLS_FILE
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.training.interrupts import Interrupts
from TrainingFactory.types import Message, Step, Task, ToolCall, ToolResult


@pytest.fixture(scope="module", autouse=True)
def turns_end() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        no_turn_is_cut(monkeypatch)
        yield


def config(folder: Path, **sections: Any) -> Any:
    training = {"max_steps": 2, "batch_size": 2, "group_size": 2} | sections.pop("training", {})
    return small(folder, training=training, data={"heldout_count": 1}, sampling=EXACT, **sections)


class Remote:
    """A source whose tool answers after a random while with a random number. Dead, it must not be touched."""

    def __init__(self, dead: bool = False) -> None:
        self.dead = dead
        self.opened = self.closed = 0

    async def open(self) -> None:
        assert not self.dead, "a replay opens no source"

    def session(self) -> Remote.Session:
        assert not self.dead, "a replay opens no session"
        self.opened += 1
        return Remote.Session(self)

    async def close(self) -> None:
        self.closed += 1

    class Session:
        def __init__(self, remote: Remote) -> None:
            @tool
            async def draw(number: int) -> str:
                """A number."""
                await asyncio.sleep(random.random() * 0.01)
                return str(random.randrange(1000))

            self.tools = [draw]
            self._remote = remote

        async def close(self) -> None:
            self._remote.opened -= 1


class Lottery(Echo):
    """Whatever the model says, it draws twice, and the model reads the number."""

    def __init__(self, task: Task, tools: Any = ()) -> None:
        super().__init__(task, tools)
        self.drawn = 0

    async def step(self, message: Message) -> Step:
        self.drawn += 1
        if self.drawn > 2:
            return Step(done=True)
        calls = [ToolCall("draw", {"number": self.drawn}, "call")] * 2
        return await super().step(Message("assistant", tool_calls=calls))

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> list[Task]:
        return [Task(f"{split}-{n}", f"Draw {n}.") for n in range(min(count, 3))]

    async def reward(self, episode: Episode) -> float:  # type: ignore[override]
        drawn = await episode.call("draw", number=0)
        return float(int(drawn.content) + sum(episode.trajectory.turns[-1].completion.token_ids)) % 7


def lottery(
    folder: Path, name: str, remote: Remote, replay: str | Path | None = None, **sections: Any
) -> TrainingReport:
    sections["training"] = {"eval_every": 1} | sections.get("training", {})
    objects = UserObjects(environment=Lottery, tools=[remote])
    chosen = config(folder, **sections)
    return Training(chosen, name=name, objects=objects, watcher=Quiet(), replay=replay).train()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is called a."""
    folder = tmp_path_factory.mktemp("recorded")
    lottery(folder, "a", Remote())
    return folder


def places(run: Path) -> list[tuple[Any, ...]]:
    """The calls that a run has recorded."""
    names = ("step", "task", "member", "batch", "call")
    return [tuple(call[name] for name in names) for call in rows(run / CALLS_FILE)]


def test_a_replayed_run_has_the_same_weights(recorded: Path) -> None:
    assert {place[0] for place in places(recorded / "a")} == {0, 1, "eval-0", "eval-1", "eval-2"}
    lottery(recorded, "again", Remote(dead=True), replay="a")
    assert_same_run(recorded / "a", recorded / "again")
    assert (recorded / "a" / CALLS_FILE).read_bytes() == (recorded / "again" / CALLS_FILE).read_bytes()
    assert RunFolder(recorded / "again").run_info["replay"] == str(recorded / "a")


def test_a_replay_that_leaves_its_recording_says_where(recorded: Path) -> None:
    says = r"replay of .*a: step 2, task .*, member \d, turn 0, call \d: .* draw"
    with pytest.raises(ValueError, match=says):
        lottery(recorded, "longer", Remote(dead=True), "a", training={"max_steps": 3})
    run = RunFolder(recorded / "longer")
    assert run.state == "failed" and "no such call was recorded" in str(run.status.reason)
    steps = [row["step"] for row in run.metrics()]
    assert 2 in steps and 3 not in steps  # up to there it was the same run


def test_a_run_that_was_stopped_records_every_call_once(recorded: Path) -> None:
    chosen = config(recorded, training={"max_steps": 3})
    objects = UserObjects(environment=Lottery, tools=[Remote()])
    with pytest.raises(RuntimeError, match="broken off"):
        Training(chosen, name="stopped", objects=objects, watcher=Quiet(fail_at=3)).train()
    run = RunFolder(recorded / "stopped")
    before = (run.path / CALLS_FILE).read_bytes()
    Training(run.config, run=run, objects=objects, watcher=Quiet()).train()
    after = (run.path / CALLS_FILE).read_bytes()
    made = places(run.path)
    assert len(set(made)) == len(made) and {place[0] for place in made} == {0, 1, 2}
    # two steps were in the checkpoint; the third was made again, with other numbers
    assert before[:100] == after[:100] and before != after[: len(before)]
    other = Training(
        chosen, name="b", objects=UserObjects(environment=Lottery), watcher=Quiet(), replay=run.path
    )
    other.train()
    assert_same_run(run.path, recorded / "b")


def test_recording_can_be_left_out(tmp_path: Path) -> None:
    remote = Remote()
    lottery(tmp_path, "a", remote, logging={"record_tools": False}, training={"eval_every": None})
    assert not (tmp_path / "a" / CALLS_FILE).exists()
    assert remote.opened == 0 and remote.closed == 1  # every session was closed, and the source
    for replay, says in (
        ("a", r"run a has no recording of its tool calls .*record_tools=false"),
        ("nothing", r"there is no recording 'nothing' to replay; .*: none"),
    ):
        with pytest.raises(ValueError, match=says):
            lottery(tmp_path, "b", Remote(), replay)
    assert not (tmp_path / "b").exists()


class Alone(Down):
    """Whatever the model says, it calls the tool that is down."""

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> list[Task]:
        return [Task(str(number), "?", "!") for number in range(2)]

    async def step(self, message: Message) -> Step:
        return await super().step(Message("assistant", tool_calls=[ToolCall("gone")]))


def test_a_run_waits_for_its_tools_and_then_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def paused(interrupts: Interrupts, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(Interrupts, "pause", paused)
    watcher, objects = Quiet(), UserObjects(environment=Alone)
    run = Training(config(tmp_path, training={"max_steps": 20}), name="a", objects=objects, watcher=watcher)
    with pytest.raises(ValueError, match=r"after 8 consecutive .*it is down.*tfactory runs resume"):
        run.train()
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert [row["episodes/tool_failure"] for row in RunFolder(tmp_path / "a").metrics()] == [4.0] * 7
    assert sum("WARNING" in text for text in watcher.said) == 8


class Flip(Alone):
    """Two calls an episode, and the server is down at times."""

    down: ClassVar[bool] = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.steps = 0

    @tool
    async def gone(self) -> ToolResult:
        return ToolResult("it is down", ok=False, error="unavailable") if Flip.down else ToolResult("up")

    async def step(self, message: Message) -> Step:
        self.steps += 1
        return Step(done=True) if self.steps > 2 else await super().step(message)

    def reward(self, episode: Episode) -> float:
        return float(sum(episode.trajectory.turns[-1].completion.token_ids) % 5)


def test_calls_of_a_step_that_is_not_done_are_in_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Until(Quiet):
        def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
            Flip.down = True

    async def killed(interrupts: Interrupts, seconds: float) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(Flip, "down", False)
    monkeypatch.setattr(Interrupts, "pause", killed)
    objects = UserObjects(environment=Flip)
    with pytest.raises(RuntimeError, match="killed"):
        Training(config(tmp_path), name="a", objects=objects, watcher=Until()).train()
    run = RunFolder(tmp_path / "a")
    assert len(run.checkpoints()) == 1
    Flip.down = False
    Training(run.config, run=run, objects=objects, watcher=Quiet()).train()
    made = places(run.path)
    assert {place[0] for place in made} == {0, 1} and len(set(made)) == len(made)
