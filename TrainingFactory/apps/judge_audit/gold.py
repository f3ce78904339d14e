"""Gold files: items with the verdicts that a judge should give, one JSON object per line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.common.openai_format import message_from_dict
from TrainingFactory.common.options import STRICT, make_from
from TrainingFactory.data.datasets import DatasetRow, parse_rows
from TrainingFactory.rewards.judge.judges import ModelJudge
from TrainingFactory.rewards.judge.verdicts import JsonVerdict, ScoreVerdict
from TrainingFactory.types import Completion, Message, Task, Trajectory, Turn

EXAMPLE_LINE = 'like {"prompt": "...", "response": "...", "label": true}'
PREFERENCE_SCORES = {"first": 1.0, "second": 0.0, "tie": 0.5}
SUSPICIOUS_SHARE = 0.1  # if all gold scores lie within this share of the range, they are on another scale


@dataclass(slots=True, frozen=True)
class GoldItem:
    """One item of a gold file: an episode with its gold `value` from 0 to 1. `preference` is 1 if it beats the
    response `opponent`, 0 if it loses."""

    trajectory: Trajectory
    value: float | None = None
    opponent: Trajectory | None = None
    preference: float | None = None


@checked_dataclass(config=STRICT | ConfigDict(extra="ignore"), kw_only=True)
class GoldRow:
    id: Any = None
    prompt: str | None = None
    response: str | None = None
    conversation: list[dict[str, Any]] | None = None
    label: bool | None = None
    score: float | None = None
    pair: str | None = None
    better: Literal["first", "second", "tie"] | None = None
    reference: Any = None

    def __post_init__(self) -> None:
        if not self.conversation and (self.prompt is None or self.response is None):
            raise ValueError('"prompt" and "response", or "conversation", is required')
        if (self.pair is None) != (self.better is None):
            raise ValueError('"pair" (the other response) and "better" (first, second or tie) go together')
        if self.label is None and self.score is None and self.pair is None:
            raise ValueError('"label", "score" or "pair" is required')
        if self.messages[-1].role != "assistant":
            raise ValueError('"conversation" must end with an assistant message')

    @property
    def messages(self) -> list[Message]:
        if self.conversation:
            return [message_from_dict(message) for message in self.conversation]
        return [Message("user", self.prompt or ""), Message("assistant", self.response or "")]

    def scale_score(self, low: float, high: float) -> float | None:
        """Return the label or the score scaled to 0..1; None if the line has neither."""
        if self.label is not None:
            return float(self.label)
        if self.score is None:
            return None
        if not low <= self.score <= high:
            raise ValueError(f'has a "score" of {self.score:g}; the judge\'s range is {low:g} to {high:g}')
        return (self.score - low) / (high - low)

    def make_trajectory(self, task_id: str, messages: Sequence[Message]) -> Trajectory:
        reply_index = next(index for index, message in enumerate(messages) if message.role == "assistant")
        prompt, turns = list(messages[:reply_index]), list[Turn]()
        for message in messages[reply_index:]:
            if message.role == "assistant":
                turns.append(Turn([], Completion([], [], "stop"), message))
            else:
                turns[-1].replies.append(message)
        task_prompt = prompt if self.conversation else self.prompt or ""
        return Trajectory(Task(task_id, task_prompt, self.reference), task_id, prompt=prompt, turns=turns)


def load_gold(path: str | Path, judge: ModelJudge) -> list[GoldItem]:
    """Read a gold file, whose scores are in the judge's own range. Raise ValueError for an invalid line."""
    scale = judge.verdict.scale if isinstance(judge.verdict, JsonVerdict) else judge.verdict
    low, high = (scale.low, scale.high) if isinstance(scale, ScoreVerdict) else (0.0, 1.0)

    def parse_item(dataset_row: DatasetRow, line_number: int) -> GoldItem:
        try:
            row: GoldRow = make_from(GoldRow, dataset_row.columns, "a gold item")
        except ValueError as error:
            raise ValueError(f"is not a valid gold item: {error}") from None
        if "reference" in judge.prompt.fields and row.reference is None:
            raise ValueError('has no "reference", which the judge\'s template uses')
        row_id, messages = str(line_number if row.id is None else row.id), row.messages
        trajectory, value = row.make_trajectory(row_id, messages), row.scale_score(low, high)
        if row.pair is None or row.better is None:
            return GoldItem(trajectory, value)
        opponent = row.make_trajectory(row_id, [*messages[:-1], Message("assistant", row.pair)])
        return GoldItem(trajectory, value, opponent, PREFERENCE_SCORES[row.better])

    items = parse_rows(path, f"gold items {EXAMPLE_LINE}", parse_item)
    scores = [item.value for item in items if item.value is not None]
    if len(scores) > 1 and 0 < max(scores) <= SUSPICIOUS_SHARE:
        best = low + max(scores) * (high - low)
        raise ValueError(
            f'{path}: no "score" is above {best:g}, but the judge\'s range is {low:g} to {high:g}; rescale the scores, '
            "change the range with verdict_options, or add items with higher scores"
        )
    return items
