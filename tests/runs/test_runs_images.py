"""Runs with images: their folder, and the same bits after a resume and in a replay."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.pictures import BLUE, GREEN, RED, picture
from tests.kits.run import EXACT, Quiet, assert_same_run, brief, go_on, train
from tests.kits.tools import no_turn_is_cut
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder
from TrainingFactory.tools import tool
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Image, Message, PlacedImage, Step, Task, ToolCall

COLORS = (RED, GREEN, BLUE)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def turns_end() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        no_turn_is_cut(monkeypatch)
        yield


def scene(number: int, size: int) -> Image:
    return picture(COLORS[number % 3], (size, size))


class Scenes(ToolEnvironment):
    """Shows an image in the task, and after the first turn one that its tool takes."""

    def __init__(self, task: Task, *given: Any, **options: Any) -> None:
        super().__init__(task, *given, **options)
        self.tools, self.turns = [], 0

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        for number in range(min(count, 4)):
            yield Task(
                f"{split}-{number}", [Message("user", "m", images=[PlacedImage(0, scene(number, 56))])]
            )

    @tool(pure=True)
    def look(self, number: int) -> list[Any]:
        "Take a picture."
        return ["seen", scene(number, 84)]

    async def step(self, message: Message) -> Step:
        self.turns += 1
        if self.turns > 1:
            return Step(done=True)
        [result] = await self.executor.batch_execute([ToolCall("look", {"number": len(message.content)})])
        result.seconds = 0.0
        return Step([Message("user", result.content, images=result.images)], tool_results=[result])

    def reward(self, episode: Any) -> float:
        return float(sum(episode.trajectory.turns[0].completion.token_ids) % 3)


def seeing(folder: Path) -> TrainingConfig:
    return brief(
        folder, model={"name": "builtin:tiny-vl", "vision": True},
        training={"max_steps": 3, "batch_size": 2, "group_size": 2, "learning_rate": 1e-3},
        logging={"output_dir": str(folder), "checkpoint_every": 2}, sampling=EXACT | {"max_tokens": 4, "slots": 4},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return train(seeing(folder), "whole", environment=Scenes).run


def stored(run: Path) -> set[str]:
    return {path.stem for path in run.glob("images/??/*.png")}


def test_the_folder_has_every_image_once(whole: Path) -> None:
    episodes = list(load_trajectories(whole / TRAJECTORIES))
    shown = {image for e in episodes for message in e.prompt for _, image in message.images}
    seen = {image for e in episodes for turn in e.turns for r in turn.tool_results for _, image in r.images}
    assert {image.digest for image in shown | seen} == stored(whole) and len(shown) >= 2 and seen
    assert all(image.width == 56 for image in shown) and all(image.width == 84 for image in seen)
    assert any(turn.replies and turn.replies[0].images for e in episodes for turn in e.turns)


def test_resumed_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    with pytest.raises(RuntimeError, match="broken off"):
        train(seeing(tmp_path), "part", Quiet(fail_at=3), environment=Scenes)
    lost = scene(0, 20)
    RunFolder(part).images.add(lost)  # of an episode after the checkpoint
    go_on(part, Scenes)
    assert_same_run(whole, part)
    assert stored(part) == stored(whole) and lost.digest not in stored(part)


def test_replayed_to_the_same_bits(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.runs.test_runs_images.scene", lambda number, size: pytest.fail("a tool was called")
    )
    tasks = {episode.task.id: episode.task for episode in load_trajectories(whole / TRAJECTORIES)}
    data = [tasks[name] for name in sorted(tasks)]
    objects = UserObjects(environment=Scenes, tasks=data)
    again = (
        Training(seeing(tmp_path), name="again", objects=objects, watcher=Quiet(), replay=whole).train().run
    )
    assert_same_run(whole, again)
    assert stored(again) == stored(whole)


def test_a_missing_image_is_named(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "images")
    episode = next(load_trajectories(copy / TRAJECTORIES))
    with pytest.raises(ValueError, match=f"image {episode.prompt[0].images[0].image.digest} cannot be read"):
        _ = episode.prompt[0].images[0].image.data
