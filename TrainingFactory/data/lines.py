"""Read files with one JSON object a line, so that everything wrong with them is told at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")
MAX_PROBLEMS = 10  # told at once


def read_lines(
    path: str | Path, what: str, form: str, read: Callable[[dict[str, Any], int], Row]
) -> list[Row]:
    """Return what `read` makes of each line's object and number; its ValueError goes on after "FILE, line N"."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file of {what} at {path}")
    rows: list[Row] = []
    problems: list[str] = []
    for number, line in text_lines(path):
        try:
            rows.append(read(as_object(line, form), number))
        except ValueError as error:
            problems.append(f"{path}, line {number} {error}")
    if problems:
        raise ValueError(in_one(problems))
    if not rows:
        raise ValueError(f"{path} is empty: one JSON object a line is needed")
    return rows


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    # utf-8-sig: some programs put a mark at the beginning. surrogatepass: what a model wrote may hold half a character.
    with path.open(encoding="utf-8-sig", errors="surrogatepass") as file:
        try:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a UTF-8 text: {error.reason}") from error


def as_object(line: str, form: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"must be an object {form}, not {line.strip()[:40]}")
    return row


def in_one(problems: Sequence[str]) -> str:
    """Return the first of them, and how many more there are."""
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return "\n".join([*problems[:MAX_PROBLEMS], *more])
