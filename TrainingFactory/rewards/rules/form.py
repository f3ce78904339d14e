"""Rules about the format of an answer: patterns, required parts, length."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import regex
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, NotNegative
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.rules.answers import (
    ExtractionRule,
    ExtractMode,
    FinalTextRule,
    find_marked_answer,
    get_references,
)
from TrainingFactory.rewards.rules.json_answers import NO_JSON, read_json
from TrainingFactory.types import Reward, Trajectory


def compile_pattern(pattern: str) -> Any:
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ValueError(f"{pattern[:80]!r} is not a valid regular expression: {error}") from error


def _check_pattern(pattern: str) -> str:
    compile_pattern(pattern)
    return pattern


PatternText = Annotated[str, AfterValidator(_check_pattern)]
Seconds = Annotated[float, Field(ge=0.001)]


def matches(pattern: Any, text: str, is_full_match: bool, timeout: float) -> bool:
    """Return whether the pattern matches, without holding the GIL; raise ValueError after `timeout` seconds."""
    search = pattern.fullmatch if is_full_match else pattern.search
    try:
        return search(text, timeout=timeout, concurrent=True) is not None
    except TimeoutError:
        raise ValueError(f"pattern {pattern.pattern[:80]!r} took longer than {timeout:g} s") from None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PatternRule(ExtractionRule):
    """Reward an answer that matches `pattern`, by default the task's answer; `full`: the whole answer must match. A
    search that takes longer than `timeout` seconds leaves the episode unscored."""

    rule: ClassVar[str] = "regex"
    extract: ExtractMode = "whole"
    pattern: PatternText | None = None
    full: bool = False
    timeout: Seconds = 1.0

    def __call__(self, episode: Episode) -> Reward:
        patterns = [self.pattern] if self.pattern is not None else get_references(episode.task, self.rule)
        answer = self.extract_final_answer(episode.trajectory)
        try:
            regexes = [compile_pattern(str(pattern)) for pattern in patterns]
            is_match = answer is not None and any(
                matches(pattern, answer, self.full, self.timeout) for pattern in regexes
            )
        except ValueError as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error
        return self.make_reward(is_match)


AnswerPart = Literal["tool_call", "marked_answer", "reasoning", "readable_calls", "json"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FormatRule(FinalTextRule):
    """Reward a final text that matches `pattern` as a whole and has all parts in `require`. `partial`: reward the share
    of these conditions that hold."""

    rule: ClassVar[str] = "format"
    pattern: PatternText | None = None
    require: list[AnswerPart] | tuple[AnswerPart, ...] = ()
    partial: bool = False
    timeout: Seconds = 1.0

    def __post_init__(self) -> None:
        if self.pattern is None and not self.require:
            raise ValueError("the rule format needs a pattern or required parts; set pattern or require")

    def __call__(self, episode: Episode) -> Reward:
        final_text = self.get_final_text(episode.trajectory)
        if final_text is None:
            return self.make_reward(0.0)
        conditions = [self._has_part(part, episode.trajectory, final_text) for part in self.require]
        if self.pattern is not None:
            conditions.append(matches(compile_pattern(self.pattern), final_text, True, self.timeout))
        return self.make_reward(sum(conditions) / len(conditions) if self.partial else all(conditions))

    def _has_part(self, part: AnswerPart, trajectory: Trajectory, text: str) -> bool:
        *earlier_turns, last_turn = trajectory.turns
        match part:
            case "tool_call":  # in an earlier turn, because a call in the last one cannot inform the answer
                return any(call.error is None for turn in earlier_turns for call in turn.message.tool_calls)
            case "readable_calls":
                return not any(call.error for turn in trajectory.turns for call in turn.message.tool_calls)
            case "marked_answer":
                return find_marked_answer(text) is not None
            case "reasoning":
                return bool((last_turn.message.reasoning or "").strip())
            case "json":
                return read_json(text) is not NO_JSON


@dataclass(config=STRICT, frozen=True, kw_only=True)
class LengthRule(FinalTextRule):
    """Reward short answers: 1 up to the length `soft`, then linearly down to 0 at `hard`; 0 without an answer."""

    rule: ClassVar[str] = "length"
    soft: NotNegative
    hard: NotNegative
    # tokens and turns count the whole episode, words and characters the final text
    unit: Literal["tokens", "turns", "words", "characters"] = "tokens"

    def __post_init__(self) -> None:
        if self.soft > self.hard:
            raise ValueError(f"soft is {self.soft:g} and hard is {self.hard:g}; hard must be at least soft")

    def __call__(self, episode: Episode) -> Reward:
        final_text = self.get_final_text(episode.trajectory)
        if final_text is None:
            return self.make_reward(0.0)
        turns = episode.trajectory.turns
        length = {
            "tokens": sum(len(turn.completion.token_ids) for turn in turns),
            "turns": sum(not turn.summary for turn in turns),
            "words": len(final_text.split()),
            "characters": len(final_text),
        }[self.unit]
        if length <= self.soft:
            return self.make_reward(1.0)
        return self.make_reward((self.hard - length) / (self.hard - self.soft) if length < self.hard else 0.0)
