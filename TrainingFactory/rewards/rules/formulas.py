"""Compares formulas by math-verify. Runs in a worker process, because a few characters can stand for a number or a
polynomial without end."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from contextlib import suppress

from math_verify import LatexExtractionConfig, parse, verify

MAX_BYTES = 4 * 2**30  # of memory; a formula that needs more has no value


def comparing(seconds: int) -> Callable[[tuple[str, str]], bool | None]:
    """Return the function that answers in this process; each of its steps may take so many seconds."""
    logging.disable()  # math-verify tells each formula that takes too long
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))

    def same(formulas: tuple[str, str]) -> bool | None:
        """Compare the right formula with the given one; None if the right one cannot be read."""
        # Only LaTeX: the reader of plain expressions hands its text to Python.
        right, given = (
            parse(f"${text.strip().strip('$')}$", [LatexExtractionConfig()], parsing_timeout=seconds)
            for text in formulas
        )
        return bool(given) and verify(right, given, timeout_seconds=seconds) if right else None

    return same
