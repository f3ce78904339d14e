"""Queries compared by their rows, which is how rewards and environments about SQL judge them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from TrainingFactory.common.sql.database import CUT_VALUE
from TrainingFactory.types import ToolResult

NO_ROWS = (
    'the tool does not show the rows of the right query as whole JSON, {"rows": [[1, "a"], ...]}: use SqlTool, let '
    "your tool answer in this form, or name the SQLite file in the task's metadata database"
)
Ask = Callable[[str], Awaitable[ToolResult]]  # runs one query and shows its rows, as `Database` does in JSON


@dataclass(slots=True)
class Rows:
    """`more`: there is more than was shown, further rows or the rest of a value. `columns` is 0 if not known."""

    rows: list[tuple[Any, ...]]
    more: bool = False
    columns: int = 0


async def same_result(ask: Ask, query: str, right: str) -> bool:
    """Compare the rows of a query with those of the right one, in order if that one orders them. Names of columns do
    not count, and 2 is 2.0. A query that fails, is stopped, or shows more than the right one is wrong; ValueError if
    the right one itself fails, gives more than can be shown, or nothing that can be read: then nothing is known."""
    wanted = await ask(right)  # first: the other may change the data
    if not wanted.ok:
        raise ValueError(f"the right query fails: {wanted.content[:200]}")
    known = read_rows(wanted.content)
    if known is None:
        raise ValueError(NO_ROWS)
    if known.more:
        raise ValueError(
            "the right query gives more than the tool shows; raise its max_rows, or ask for less"
        )
    given = await ask(query)
    found = read_rows(given.content) if given.ok else None
    if found is None or found.more or (found.columns and known.columns and found.columns != known.columns):
        return False
    if orders_rows(right):
        return found.rows == known.rows
    return Counter(found.rows) == Counter(known.rows)


def read_rows(content: str) -> Rows | None:
    """Read the rows in `{"rows": [[1, "a"], ...]}`, as a database shows them in JSON; None for other and cut texts."""
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        return None
    rows = table.get("rows") if isinstance(table, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None
    columns = table.get("columns")
    more = bool(table.get("more")) or table.get("count", len(rows)) != len(rows)
    more = more or any(isinstance(value, str) and CUT_VALUE.search(value) for row in rows for value in row)
    made = [tuple(_comparable(value) for value in row) for row in rows]
    return Rows(made, more, len(columns) if isinstance(columns, list) else 0)


def orders_rows(query: str) -> bool:
    """Tell whether the query itself has an ORDER BY: one in a subquery, a window or a text orders nothing."""
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
    """Round floats: sums of the same numbers in another order differ in their last digits; whole numbers are exact."""
    if isinstance(value, float):
        if math.isfinite(value) and abs(value) < 2**53:
            whole = round(value)
            if math.isclose(value, whole, rel_tol=1e-12, abs_tol=1e-15):
                return whole
        return ("float", f"{value:.12g}")
    return value if value is None or type(value) is int else (type(value).__name__, json.dumps(value))
