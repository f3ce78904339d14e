"""What users wrote into a config, checked when a reward is made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """ValueError with the nearest choice if the value is none of them."""
    known = list(choices)
    if value not in known:
        near = difflib.get_close_matches(str(value).lower(), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}{hint}")


def check_number(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> None:
    """ValueError unless the value is a number from low to high. A truth value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        wanted = f"{low:g} or more" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} is {value!r}; it must be a number, {wanted}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be finite")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r}; it must be a text")
