"""What the rules have in common: the answer of an episode, compared with the right ones of its task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.options import STRICT
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import Adapted
from TrainingFactory.rewards.rules.answers import Extraction, references
from TrainingFactory.types import Reward


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ReferenceRule(Extraction):
    """A rule that needs the task's right answers: one without any cannot be scored."""

    # Where nothing is marked, the answer may be the last line or all of the text: right is whichever is.
    whole_too: ClassVar[bool] = True

    def right_answers(self, episode: Episode) -> list[Any]:
        """Return the right answers as `read_reference` gives them; ValueError that names the task if there is none."""
        right = references(episode.task, self.rule)
        try:
            return [self.read_reference(reference) for reference in right]
        except (ValueError, TypeError) as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error

    def read_reference(self, reference: Any) -> Any:
        """Return a right answer in the form that is compared; ValueError if this rule cannot compare with it."""
        return str(reference)

    def answers_of(self, episode: Episode) -> Sequence[str]:
        """Return the texts that may be the answer: none for an episode that did not come to its own end."""
        text = self.text_of(episode.trajectory)
        if text is None:
            return []
        answers = [self.answer_in(text)]
        if self.extract == "auto" and self.whole_too and not self.marked(text):
            answers.append(text)
        return [answer for answer in answers if answer]


class AnswerRule(ReferenceRule):
    """A rule that compares one answer with one right answer; the best pair counts, and no answer is worth 0."""

    def __call__(self, episode: Episode) -> Reward:
        right = self.right_answers(episode)
        scores = [self.score(answer, one) for answer in self.answers_of(episode) for one in right]
        return self.rewarded(max(scores, default=0.0))

    def score(self, answer: str, reference: Any) -> float:
        raise NotImplementedError


@plain_dataclass(slots=True, frozen=True)
class OnlyIf:
    """Gives what `rule` gives if `condition` gives all there is, else 0: no bonus for short wrong answers."""

    rule: Adapted
    condition: Adapted

    async def __call__(self, episode: Episode) -> Reward:
        condition, reward = await self.condition(episode), await self.rule(episode)
        outcome = reward.outcome if condition.outcome >= 1 else 0.0
        return Reward(outcome, reward.steps, reward.parts | condition.parts)
