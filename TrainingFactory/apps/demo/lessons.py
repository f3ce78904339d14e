"""What a model of random weights is taught before it can learn from rewards: rows for an SFT run, in their order.

Reinforcement learning can only choose among things that a model does at least now and then. First come drills, rows of
words that are written twice: copying is the hard part for two small layers, and drills teach it in seconds. Then come
demonstrations, of which a good part show the usual mistakes: the habits that reinforcement learning has to break.
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
from TrainingFactory.models.words import NAMES, PLACES, THINGS
from TrainingFactory.protocols import ChatFormat, Environment
from TrainingFactory.rollout import play
from TrainingFactory.types import Message, Task, Trajectory

DRILL_WORDS = 12
DRILL_SUMS = 4


class Teachable(Environment, Protocol):
    """An environment that can show how it is done, and how not."""

    def expert(self) -> Iterator[Message]: ...
    def novice(self, rng: random.Random) -> Iterator[Message]: ...


def word_drill(rng: random.Random) -> tuple[str, str]:
    """Return words in a line and the same words each in its own. To the tokenizer a word after a space is another one:
    a search must write the buyer so, whom the reply before it names after a space."""
    words = rng.sample(NAMES + PLACES + THINGS, DRILL_WORDS)
    return " ".join(words), "\n".join(words)


def sum_drill(rng: random.Random) -> tuple[str, str]:
    sums = [f"{rng.randint(10, 99)}{rng.choice('+-*')}{rng.randint(10, 99)}" for _ in range(DRILL_SUMS)]
    return " ".join(sums), "\n".join(sums)


@dataclass(slots=True, frozen=True)
class Lessons:
    """How many rows of each kind are taught, in this order."""

    drill: Callable[[random.Random], tuple[str, str]] = word_drill  # what is shown, what is to be written
    drills: int = 1600
    # Demonstrations without their system part come first: what matters stands closer together.
    short: int = 1920
    whole: int = 4480
    played: int = 1500  # different demonstrations
    mistakes: float = 0.55  # share of them that go wrong

    def stages(self, batch_size: int) -> dict[int, str]:
        """Return the first step of each kind of rows, and what they are."""
        before_short, before_whole = self.drills, self.drills + self.short
        return {
            1: "drills, which copy words or sums",
            before_short // batch_size + 1: "demonstrations without their system prompt",
            before_whole // batch_size + 1: "whole demonstrations, with system prompt and tools",
        }

    def write(
        self,
        path: Path,
        environment: Callable[[Task], Teachable],
        chat: ChatFormat,
        tasks: Sequence[Task],
        rng: random.Random,
    ) -> None:
        """Write a dataset that is read from top to bottom; the tasks are those that are demonstrated."""
        drills = [self.drill(rng) for _ in range(self.drills)]
        episodes = demonstrate(environment, chat, tasks, self.mistakes, rng)
        rows: list[dict[str, Any]] = [{"prompt": shown, "completion": wanted} for shown, wanted in drills]
        rows += [_row(episode, system=False) for episode in rng.choices(episodes, k=self.short)]
        rows += [_row(episode, system=True) for episode in rng.choices(episodes, k=self.whole)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


LESSONS = {
    "search": Lessons(drills=2400),
    "calculator": Lessons(sum_drill, drills=2400, short=4320, whole=5040, mistakes=0.45),
}


def demonstrate(
    environment: Callable[[Task], Teachable],
    chat: ChatFormat,
    tasks: Sequence[Task],
    mistakes: float,
    rng: random.Random,
) -> list[Trajectory]:
    """Play one scripted episode per task, a share of them by a novice."""

    async def all_episodes() -> list[Trajectory]:
        episodes = []
        for task in tasks:
            made = environment(task)
            script = made.novice(rng) if rng.random() < mistakes else made.expert()
            episodes.append(await play(made, chat, script))
        return episodes

    return run(all_episodes)


def _row(episode: Trajectory, system: bool) -> dict[str, Any]:
    """Return the episode as a conversation; the system part holds the tools too."""
    messages = [message for message in episode.prompt if system or message.role != "system"]
    for turn in episode.turns:
        messages += [turn.message, *turn.replies]
    row: dict[str, Any] = {"messages": [message_to_dict(message) for message in messages]}
    return row | {"tools": [spec_to_dict(spec) for spec in episode.tools]} if system else row
