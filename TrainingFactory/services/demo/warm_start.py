"""The warm start of a model that was made from random numbers: from generated demonstrations of mixed quality it
learns to write tool calls at all. Reinforcement learning can only choose among things that a model does at
least now and then.

First come drills, rows of words that are written twice: copying is the hard part for two small layers, and
drills teach it in seconds. Then demonstrations, of which a good part show the usual mistakes; these are the
habits that reinforcement learning will have to break.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models.words import NAMES, PLACES, THINGS
from TrainingFactory.protocols import ChatFormat, Environment
from TrainingFactory.rollout import play
from TrainingFactory.types import Completion, Message, Sample, Task, Trajectory, Turn

DRILL_WORDS = 12
DRILL_SUMS = 4


class Teachable(Environment, Protocol):
    """An environment that can show how it is done, and how not."""

    def expert(self) -> Iterator[Message]: ...
    def novice(self, rng: random.Random) -> Iterator[Message]: ...


@dataclass(slots=True, frozen=True)
class WarmStartPlan:
    demonstrations: int = 1500
    mistakes: float = 0.55  # share of the demonstrations that go wrong
    drill_steps: int = 100
    drill_rows: int = 24
    steps: int = 400
    rows: int = 16  # demonstrations a step
    # The first steps see demonstrations without their system part: what matters stands closer together.
    without_system: float = 0.3
    learning_rate: float = 0.006
    matrix_learning_rate: float = 0.03  # Muon's

    @property
    def optimizer(self) -> OptimizerOptions:
        return OptimizerOptions(
            "muon",
            learning_rate=self.learning_rate,
            matrix_learning_rate=self.matrix_learning_rate,
            schedule="linear",
            total_steps=self.drill_steps + self.steps,
        )


def demonstrate(
    environment: Callable[[Task], Teachable],
    chat: ChatFormat,
    tasks: Sequence[Task],
    mistakes: float,
    rng: random.Random,
) -> list[Trajectory]:
    """One scripted episode per task, in a share of them by a novice."""

    async def all_episodes() -> list[Trajectory]:
        episodes = []
        for task in tasks:
            made = environment(task)
            script = made.novice(rng) if rng.random() < mistakes else made.expert()
            episodes.append(await play(made, chat, script))
        return episodes

    return asyncio.run(all_episodes())


def word_drill(tokenizer: Any, rng: random.Random) -> Trajectory:
    """Names, places and things, with and without a leading space, to be written as search calls and answers
    have them: things after a space, the others without. To the tokenizer these are different tokens."""
    words = rng.sample(NAMES + PLACES + THINGS, DRILL_WORDS)
    shown = [rng.choice(("", " ")) + word for word in words]
    wanted = [" " + word if word in THINGS else word for word in words]
    return _drill(tokenizer, shown, wanted)


def sum_drill(tokenizer: Any, rng: random.Random) -> Trajectory:
    sums = [f"{rng.randint(10, 99)}{rng.choice('+-*')}{rng.randint(10, 99)} " for _ in range(DRILL_SUMS)]
    return _drill(tokenizer, sums, sums)


DRILLS: dict[str, Callable[[Any, random.Random], Trajectory]] = {
    "search": word_drill,
    "calculator": sum_drill,
}


def _drill(tokenizer: Any, shown: list[str], wanted: list[str]) -> Trajectory:
    """Words to copy, as the one turn of an episode."""
    before, after = (
        [token for word in words for token in _ids(tokenizer, word)] for words in (shown, wanted)
    )
    prompt = [tokenizer.eos_token_id, *before, tokenizer.pad_token_id]
    turn = Turn(prompt, Completion(after, [0.0] * len(after), "length"), Message("assistant"))
    return Trajectory(Task("drill", "copy"), group="drill", turns=[turn])


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def without_first(trajectory: Trajectory, count: int) -> Trajectory:
    """The episode as if it began so many tokens later."""
    turns = [dataclasses.replace(turn, prompt_ids=turn.prompt_ids[count:]) for turn in trajectory.turns]
    return dataclasses.replace(trajectory, turns=turns)


def common_start(trajectories: Sequence[Trajectory]) -> int:
    """How many tokens the prompts have in common: the system part, and the head of the user's message."""
    prompts = [trajectory.turns[0].prompt_ids for trajectory in trajectories]
    first, last = min(prompts), max(prompts)
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


class Lessons:
    """Endless batches of training rows."""

    def __init__(
        self,
        tokenizer: Any,
        demonstrations: Sequence[Trajectory],
        drill: Callable[[Any, random.Random], Trajectory],
        rng: random.Random,
    ) -> None:
        self._tokenizer, self._drill, self._rng = tokenizer, drill, rng
        # The common part ends with the header of the user's message, which stays.
        header = len(_ids(tokenizer, "<|im_start|>user\n"))
        start = max(0, common_start(demonstrations) - header)
        self._whole = [row for episode in demonstrations for row in to_samples(episode)]
        self._short = [row for episode in demonstrations for row in to_samples(without_first(episode, start))]

    def drills(self, count: int) -> list[Sample]:
        episodes = (self._drill(self._tokenizer, self._rng) for _ in range(count))
        return [row for episode in episodes for row in to_samples(episode)]

    def demonstrations(self, count: int, with_system: bool) -> list[Sample]:
        rows = self._whole if with_system else self._short
        return self._rng.sample(rows, min(count, len(rows)))


def teach(
    learner: Learner,
    lessons: Lessons,
    plan: WarmStartPlan,
    on_step: Callable[[int, int, float], None] = lambda *_: None,
) -> None:
    """`on_step` is told how many steps are done, out of how many, and the loss."""
    sft, total = SFT(), plan.drill_steps + plan.steps
    for step in range(total):
        number = step - plan.drill_steps
        if number < 0:
            rows = lessons.drills(plan.drill_rows)
        else:
            rows = lessons.demonstrations(plan.rows, with_system=number >= plan.without_system * plan.steps)
        on_step(step + 1, total, learner.update(make_batch(rows), sft.loss)["loss"])
