"""Runs on tasks with images: GRPO and SFT by config, resumed in a process that numbers images differently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.run import Parity, Quiet, assert_same_run, brief, go_on, rows
from tests.kits.vision_models import picture, save_vision_model, vision_model
from TrainingFactory.assembly.sampler import load, make_engine
from TrainingFactory.assembly.vision import check_vision, with_vision
from TrainingFactory.common import image_tokens
from TrainingFactory.config import ConfigError, TrainingConfig
from TrainingFactory.models.chat import chat_format
from TrainingFactory.models.vision import find_tower_parameters
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Message, PlacedImage, SamplingParams, Step, Task

NEWER = ("qwen3_vl", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_moe")
MODEL = {"name": "builtin:tiny-vl", "max_length": 128}


def image_of(task: Task) -> PlacedImage:
    return PlacedImage(0, picture(sum(task.id.encode()), 32, 32))


class Shown(Parity):
    """Shows a picture with the task, and another one after the first turn."""

    shows_images = True

    async def reset(self) -> list[Message]:
        return [Message("user", "odd?", images=[image_of(self.task)])]

    async def step(self, message: Message) -> Step:
        if getattr(self, "_stepped", False):
            return Step(done=True)
        self._stepped = True
        return Step([Message("user", "", images=[PlacedImage(0, picture(len(message.content), 32, 16))])])

    def expert(self) -> Iterator[Message]:
        yield Message("assistant", "yes")
        yield Message("assistant", "no")


class Huge(Shown):
    async def reset(self) -> list[Message]:
        return [Message("user", "odd?", images=[PlacedImage(0, picture(0, 512, 512))])]


def training(folder: Path, name: str, watcher: Quiet | None = None, **sections: dict[str, Any]) -> Training:
    config = brief(folder, model=MODEL, **sections)
    objects = UserObjects(environment=Shown)
    return Training(config, name=name, objects=objects, watcher=watcher or Quiet())


def test_a_resumed_run_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resumed process has seen other images, and in another order."""
    assert training(tmp_path, "whole").train().state == "finished"
    with pytest.raises(RuntimeError, match="broken off"):
        training(tmp_path, "broken", Quiet(fail_at=3)).train()
    monkeypatch.setattr(image_tokens, "_image_ids", image_tokens._ImageIds())
    for seed in reversed(range(40)):
        image_tokens.number_image(picture(seed, 32, 32), 4)
    assert go_on(tmp_path / "broken", Shown).state == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    checkpoint = RunFolder(tmp_path / "broken").checkpoints()[-1]
    assert (checkpoint / "preprocessor_config.json").is_file()
    loaded = load(TrainingConfig(model=str(checkpoint)))
    assert loaded.vision is not None  # a checkpoint that was trained with images sees them


def model_name(family: str, folder: Path) -> str:
    return "builtin:tiny-vl" if family == "qwen3_vl" else save_vision_model(family, folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize("family", NEWER)
def test_sft_learns_with_images(family: str, tmp_path: Path) -> None:
    name = model_name(family, tmp_path)
    sections = {"algorithm": "sft", "max_steps": 4, "learning_rate": 3e-3}
    config = brief(
        tmp_path,
        model={"name": name, "max_length": 512},
        training=sections,
        lora={"enabled": True, "r": 4},
        sampling={"deterministic": "moe" not in family},
    )
    run = Training(config, name="sft", objects=UserObjects(environment=Shown), watcher=Quiet())
    assert run.train().state == "finished"
    losses = [row["loss"] for row in rows(tmp_path / "sft" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.5
    checkpoint = RunFolder(tmp_path / "sft").checkpoints()[-1]
    assert load(TrainingConfig(model={"name": name, "adapter": str(checkpoint)})).vision is not None


@pytest.mark.slow
@pytest.mark.parametrize("family", NEWER)
def test_the_tower_can_be_trained(family: str, tmp_path: Path) -> None:
    name = model_name(family, tmp_path)
    model = {"name": name, "max_length": 512, "train_tower": True, "vision": True}
    config = brief(
        tmp_path, model=model, training={"max_steps": 1}, sampling={"deterministic": "moe" not in family}
    )
    run = Training(config, name="tower", objects=UserObjects(environment=Shown), watcher=Quiet())
    assert run.train().state == "finished"
    checkpoint = str(RunFolder(tmp_path / "tower").checkpoints()[-1])
    before, after = (
        dict(find_tower_parameters(load(TrainingConfig(model={"name": model, "vision": True})).model))
        for model in (name, checkpoint)
    )
    changed = [not before[key].equal(after[key]) for key in before]
    assert sum(changed) > 0.9 * len(changed)


def test_an_image_over_the_limit_ends_the_episode_as_truncated() -> None:
    loaded = vision_model("qwen3_vl")
    engine = NativeEngine(loaded.model, slots=1, max_length=128, vision=loaded.vision)
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids, vision=loaded.vision)
    rollouts = RolloutEngine(Huge, chat, SamplingParams(max_tokens=4))
    (episode,) = rollouts.rollout(list(Huge.tasks("train", 0, 1)), engine)[0]
    assert (episode.status, episode.turns) == ("truncated", [])
    assert episode.error == "the prompt of turn 0 has 1037 tokens, the limit is 128"


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ("sampling", {"engine": "vllm"}), ("compute", {"backend": "ray"}), ("compute", {"learners": 2}),
        ("model", {"quantization": "4bit", "train_tower": True}),
    ],
)  # fmt: skip
def test_unsupported_options_are_named(section: str, options: dict[str, Any]) -> None:
    sections: dict[str, dict[str, Any]] = {"model": {"name": "builtin:tiny-vl", "vision": True}}
    sections[section] = sections.get(section, {}) | options
    with pytest.raises(ConfigError, match=rf"{section}\.\w+"):
        check_vision(TrainingConfig(**sections))


def test_vision_is_loaded_if_the_data_show_images() -> None:
    config = TrainingConfig()
    shown = Task("t", [Message("user", "odd?", images=[PlacedImage(0, picture(0))])])
    assert with_vision(config, Parity, [Task("t", "odd?")]).model.vision is None
    assert with_vision(config, Shown).model.vision
    assert with_vision(config, Parity, [shown]).model.vision
    off = TrainingConfig(model={"vision": False})
    assert with_vision(off, Shown).model.vision is False
    loaded = load(TrainingConfig())
    assert loaded.vision is None
    assert make_engine(config, loaded, 1).stats.sampled_tokens == 0
