"""What users wrote into a config, checked when a reward is made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

from TrainingFactory.tools.builtin.making import OptionError, Wrong


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """OptionError with the nearest choice if the value is none of them."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        near = (
            difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.5) if isinstance(value, str) else []
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _wrong(name, value, f"must be one of {', '.join(known)}{hint}")


def check_number(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> None:
    """OptionError unless the value is a finite number from low to high. A truth value is none."""
    wanted = "a number"
    if low > -math.inf:
        wanted += f", {low:g} or more" if high == math.inf else f", between {low:g} and {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _wrong(name, value, f"must be {wanted}")
    if not math.isfinite(value):
        raise _wrong(name, value, "must be finite")


def check_seconds(name: str, value: Any) -> None:
    """Of a time-out; infinite ones are said by None where that is possible."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _wrong(name, value, "must be a number of seconds, over 0")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _wrong(name, value, "must be true or false")


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(name, value, "must be a text")


def _wrong(name: str, value: Any, text: str) -> OptionError:
    return OptionError(Wrong(name, text, value))
