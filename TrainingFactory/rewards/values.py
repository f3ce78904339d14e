"""What a reward gave, as a checked `Reward`. Nothing that went wrong ever counts as zero."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

from TrainingFactory.texts import describe
from TrainingFactory.types import Reward

ANY_REWARD = "a number, a Reward, or None for 'cannot score'"


class Unscored(ValueError):
    """Raised where nobody knows what an episode is worth; the text says why."""


class BrokeOff(Unscored):
    """Raised where a reward did not come to its end: it cancelled itself, or tried to end the program."""


def checked(value: Any, turns: int, name: str) -> Reward:
    """Return the value as a `Reward`; raise Unscored if it is None, no finite number, or has the wrong length."""
    who = f"the reward {name}"
    if value is None:
        raise Unscored(f"{who} could not score it (it gave None)")
    if not isinstance(value, Reward):
        return Reward(as_float(value, who))
    if value.steps and len(value.steps) != turns:
        raise Unscored(f"{who} gave {len(value.steps)} step rewards for {turns} turns")
    return Reward(
        as_float(value.outcome, who, "as its outcome"),
        [as_float(step, who, f"for turn {turn}") for turn, step in enumerate(value.steps)],
        {part: as_float(number, who, f"as its part {part}") for part, number in value.parts.items()},
    )


def as_float(value: Any, who: str, what: str = "") -> float:
    """Return a finite number of any library as a float. A text is none, even if it looks like one. `what` describes a
    number that is not the whole reward."""
    if type(value) is float and math.isfinite(value):
        return value
    given = f"{shown(value)} {what}".rstrip()
    if isinstance(value, str | bytes | list | tuple | dict) or not isinstance(value, SupportsFloat):
        raise Unscored(f"{who} gave {given}; it must give {'a number' if what else ANY_REWARD}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # an array of several numbers
        raise Unscored(f"{who} gave {given}, which is not one number: {describe(error)}") from error
    if not math.isfinite(number):
        raise Unscored(f"{who} gave {given}; a reward must be finite")
    return number


def shown(value: Any) -> str:
    """Return the start of a value's repr with its type, for messages."""
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
