"""Whether two queries give the same rows: what rewards and environments about SQL are paid by."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from TrainingFactory.types import ToolResult

Ask = Callable[[str], Awaitable[ToolResult]]  # runs one query, and shows its rows as `SqlTool` does


@dataclass(slots=True)
class Rows:
    """`more`: there are further ones, which were not shown."""

    rows: list[tuple[Any, ...]]
    more: bool = False


async def same_result(ask: Ask, query: str, right: str) -> bool:
    """Whether the query gives the rows of the right one, in the same order if that one orders them. Names of columns
    do not count, and 2 is 2.0. A query that fails, is stopped, or shows more rows than the right one is wrong;
    ValueError if the right one itself fails or gives more than can be shown, because then nothing is known."""
    wanted = await ask(right)  # first: the other may change the data
    if not wanted.ok:
        raise ValueError(f"the right query fails: {wanted.content[:200]}")
    wanted_rows = read_rows(wanted.content)
    if wanted_rows.more:
        raise ValueError("the right query gives more rows than the tool shows; raise its max_rows")
    given = await ask(query)
    if not given.ok:
        return False
    given_rows = read_rows(given.content)
    if given_rows.more:
        return False
    if orders_rows(right):
        return given_rows.rows == wanted_rows.rows
    return Counter(given_rows.rows) == Counter(wanted_rows.rows)


def read_rows(content: str) -> Rows:
    """What `SqlTool` shows. As JSON values keep their types; of a table each line is one value."""
    try:
        table = json.loads(content)
    except ValueError:
        table = None
    if isinstance(table, dict):
        rows = table.get("rows", [])
        return Rows([tuple(_comparable(value) for value in row) for row in rows], bool(table.get("more")))
    lines = content.splitlines()
    return Rows([(line,) for line in lines[1:-1]], bool(lines) and lines[-1].endswith("there are more)"))


def orders_rows(query: str) -> bool:
    """Whether the query itself has an ORDER BY. One in a subquery, a window, a text or a comment orders nothing."""
    depth = 0
    for match in _PIECES.finditer(query):
        piece = match.group().lower()
        depth += (piece == "(") - (piece == ")")
        if depth == 0 and piece.startswith("order"):
            return True
    return False


_PIECES = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|[()]|\border\s+by\b""",
    re.I | re.S,
)


def _comparable(value: Any) -> Any:
    """Sums of the same numbers in another order differ in their last digits; whole numbers are exact."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else f"float {value:.9g}"
    return ("text", value) if isinstance(value, str) else value
