"""What the rules have in common: the answer of an episode, compared with the right ones of its task."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from TrainingFactory.protocols import Episode, RewardFunction
from TrainingFactory.rewards.rules.answers import Extraction, references
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward


@dataclass(frozen=True, kw_only=True)
class AnswerRule(Extraction):
    """An episode that did not come to its own end, or gives no answer, has failed: 0. A task without a right answer
    cannot be scored: ValueError."""

    rule: ClassVar[str]
    reads_numbers: ClassVar[bool] = False
    # Where nothing is marked, the answer may be the last line or all of the text: right is whichever is.
    whole_too: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extract == "last_number" and not self.reads_numbers:
            raise ValueError(
                f"extract is last_number, which goes with numeric, auto and math, not with {self.rule}"
            )

    def __call__(self, episode: Episode) -> Reward:
        task = episode.task
        try:
            right = [self.read_reference(reference) for reference in references(task, self.rule)]
        except (ValueError, TypeError) as error:
            raise ValueError(f"task {task.id}: {error}") from error
        text = self.text_of(episode.trajectory)
        answers = self.answers_in(text) if text is not None else []
        return paid(
            self.rule, max((self.score(answer, one) for answer in answers for one in right), default=0.0)
        )

    def answers_in(self, text: str) -> Sequence[str]:
        if self.extract == "auto" and self.whole_too and not self.marked(text):
            return [answer for answer in (self.answer_in(text), text) if answer]
        answer = self.answer_in(text)
        return [answer] if answer else []

    def read_reference(self, reference: Any) -> Any:
        """The right answer in the form that `score` takes; ValueError if this rule cannot compare with it."""
        return str(reference)

    def score(self, answer: str, reference: Any) -> float:
        raise NotImplementedError


def paid(rule: str, outcome: float) -> Reward:
    return Reward(float(outcome), parts={rule: float(outcome)})


@dataclass(slots=True, frozen=True)
class OnlyIf:
    """Pays what `rule` gives if `condition` gives all there is, else nothing: a bonus for short answers must not be
    earned with wrong ones."""

    rule: RewardFunction
    condition: RewardFunction

    async def __call__(self, episode: Episode) -> Reward:
        condition, reward = await _reward(self.condition, episode), await _reward(self.rule, episode)
        outcome = reward.outcome if condition.outcome >= 1 else 0.0
        return Reward(outcome, reward.steps, reward.parts | condition.parts)


async def _reward(function: RewardFunction, episode: Episode) -> Reward:
    value = await in_thread(function, episode)
    value = await value if inspect.isawaitable(value) else value
    return value if isinstance(value, Reward) else Reward(float(value))
