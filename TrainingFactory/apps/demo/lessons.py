"""Ordered SFT rows that teach a randomly initialised model enough to learn from rewards.

Reinforcement learning can only reinforce behaviour that a model already shows now and then. First come drills, which
teach in seconds what is hard for two small layers: to copy words, or to find a colour in a picture. Then come
demonstrations, many of which show typical mistakes: the habits that reinforcement learning has to break.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from TrainingFactory.common.event_loop import run
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.envs.builtin.screen import ScreenAdapter
from TrainingFactory.models.names import TINY_ID, TINY_VL_ID
from TrainingFactory.models.words import NAMES, PLACES, THINGS
from TrainingFactory.protocols import ChatFormat, Environment
from TrainingFactory.rollout import play
from TrainingFactory.types import Message, PlacedImage, Task, Trajectory

NUM_DRILL_WORDS = 12
NUM_DRILL_SUMS = 4
Drill = tuple[str, str] | tuple[Message, Message]  # prompt and completion


class TeachableEnvironment(Environment, Protocol):
    """An environment with scripted expert and novice policies."""

    def expert(self) -> Iterator[Message]: ...
    def novice(self, rng: random.Random) -> Iterator[Message]: ...


def make_word_drill(rng: random.Random) -> tuple[str, str]:
    """Return words on one line as a prompt, and one per line as its completion, because the tokenizer encodes a word
    after a space differently."""
    words = rng.sample(NAMES + PLACES + THINGS, NUM_DRILL_WORDS)
    return " ".join(words), "\n".join(words)


def make_picture_drill(rng: random.Random) -> tuple[Message, Message]:
    """Return a picture with its task, and the correct tap. A third of the pictures have a single button, from which a
    model learns positions before it connects them with colors."""
    environment = ScreenAdapter.from_options({"widgets": rng.choice((1, 2, 2))}).as_environment()
    [task] = environment.tasks("train", rng.getrandbits(32), 1)
    screen = environment(task)
    prompt = Message("user", str(task.prompt), images=[PlacedImage(0, screen.screenshot())])
    return prompt, next(screen.expert())


def make_sum_drill(rng: random.Random) -> tuple[str, str]:
    sums = [f"{rng.randint(10, 99)}{rng.choice('+-*')}{rng.randint(10, 99)}" for _ in range(NUM_DRILL_SUMS)]
    return " ".join(sums), "\n".join(sums)


@dataclass(slots=True, frozen=True)
class Lessons:
    """Contents of the demo's dataset: the number of rows of each kind, in training order."""

    make_drill: Callable[[random.Random], Drill] = make_word_drill
    skill: str = "copy words or sums"  # what the drills teach
    num_drills: int = 1600
    # Demonstrations without the system message come first: the relevant tokens are closer together.
    num_short_rows: int = 1920
    num_dialogues: int = 4480
    num_demonstrations: int = 1500  # different demonstrations
    novice_share: float = 0.55  # share of novice demonstrations
    model: str = TINY_ID
    configs: tuple[str, str] = ("warm_start.yaml", "grpo.yaml")

    def describe_stages(self, batch_size: int) -> dict[int, str]:
        """Return the first step of each stage with a description of its rows."""
        first_short_row, first_whole_row = self.num_drills, self.num_drills + self.num_short_rows
        return {
            1: f"drills that {self.skill}",
            first_short_row // batch_size + 1: "demonstrations without their system prompt",
            first_whole_row // batch_size + 1: "whole demonstrations, with system prompt and tools",
        }

    def write(
        self,
        path: Path,
        make_environment: Callable[[Task], TeachableEnvironment],
        chat: ChatFormat,
        tasks: Sequence[Task],
        rng: random.Random,
    ) -> None:
        """Write the dataset in training order, with demonstrations of `tasks`."""
        drills = [self.make_drill(rng) for _ in range(self.num_drills)]
        episodes = demonstrate(make_environment, chat, tasks, self.novice_share, rng)
        rows = [_make_drill_row(drill) for drill in drills]
        rows += [_make_row(episode, system=False) for episode in rng.choices(episodes, k=self.num_short_rows)]
        rows += [_make_row(episode, system=True) for episode in rng.choices(episodes, k=self.num_dialogues)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


LESSONS = {
    "search": Lessons(num_drills=2400),
    "calculator": Lessons(
        make_sum_drill, num_drills=2400, num_short_rows=4320, num_dialogues=5040, novice_share=0.45
    ),
    "screen": Lessons(
        make_picture_drill,
        "tap in pictures with few buttons, without mistakes",
        num_drills=4800,
        num_short_rows=320,
        num_dialogues=2880,
        num_demonstrations=2000,
        novice_share=0.55,
        model=TINY_VL_ID,
        configs=("screen_warm_start.yaml", "screen_grpo.yaml"),
    ),
}


def demonstrate(
    make_environment: Callable[[Task], TeachableEnvironment],
    chat: ChatFormat,
    tasks: Sequence[Task],
    novice_share: float,
    rng: random.Random,
) -> list[Trajectory]:
    """Play one scripted episode per task, a share `novice_share` of them with the novice policy."""

    async def play_all() -> list[Trajectory]:
        episodes = []
        for task in tasks:
            environment = make_environment(task)
            script = environment.novice(rng) if rng.random() < novice_share else environment.expert()
            episodes.append(await play(environment, chat, script))
        return episodes

    return run(play_all)


def _make_drill_row(drill: Drill) -> dict[str, Any]:
    prompt, completion = drill
    if isinstance(prompt, Message) and isinstance(completion, Message):
        return {"messages": [message_to_dict(prompt), message_to_dict(completion)]}
    return {"prompt": prompt, "completion": completion}


def _make_row(episode: Trajectory, system: bool) -> dict[str, Any]:
    """Return the episode as an SFT row; without `system`, drop the system message and the tools."""
    messages = [message for message in episode.prompt if system or message.role != "system"]
    for turn in episode.turns:
        messages += [turn.message, *turn.replies]
    row: dict[str, Any] = {"messages": [message_to_dict(message) for message in messages]}
    return row | {"tools": [spec_to_dict(spec) for spec in episode.tools]} if system else row
