"""Comparison of SQL queries by their result rows, for rewards and environments."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from TrainingFactory.common.sql.database import TRUNCATED_VALUE
from TrainingFactory.types import ToolResult

UNREADABLE_ROWS = (
    'the tool did not return the rows of the reference query as complete JSON, {"rows": [[1, "a"], ...]}: use SqlTool, '
    "return this format from your tool, or set `database` in the task's metadata to the SQLite file"
)
# Runs one query and returns its rows as `SqlDatabase` does in JSON.
RunQuery = Callable[[str], Awaitable[ToolResult]]


@dataclass(slots=True)
class ResultRows:
    """Rows of a result. `is_truncated`: rows or parts of values were left out. `num_columns` is 0 if unknown."""

    rows: list[tuple[Any, ...]]
    is_truncated: bool = False
    num_columns: int = 0


async def rows_match(run_query: RunQuery, query: str, reference_query: str) -> bool:
    """Return whether `query` returns the same rows as `reference_query`; in the same order if that has an
    ORDER BY. Column names are ignored, and 2 equals 2.0. Return False for a query that fails, times out, or returns
    more than the tool shows. Raise ValueError if the reference query itself fails or its rows cannot be read
    completely."""
    reference_result = await run_query(reference_query)  # first, because the other query may change the data
    if not reference_result.ok:
        raise ValueError(f"the reference query failed: {reference_result.content[:200]}")
    expected = parse_result_rows(reference_result.content)
    if expected is None:
        raise ValueError(UNREADABLE_ROWS)
    if expected.is_truncated:
        raise ValueError("the reference query returns more than the tool shows; raise max_rows or narrow it")
    query_result = await run_query(query)
    actual = parse_result_rows(query_result.content) if query_result.ok else None
    if actual is None or actual.is_truncated:
        return False
    if actual.num_columns and expected.num_columns and actual.num_columns != expected.num_columns:
        return False
    if has_order_by(reference_query):
        return actual.rows == expected.rows
    return Counter(actual.rows) == Counter(expected.rows)


def parse_result_rows(content: str) -> ResultRows | None:
    """Parse `{"rows": [[1, "a"], ...]}`, the JSON format of `SqlDatabase`. Return None for other or truncated texts."""
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        return None
    rows = table.get("rows") if isinstance(table, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None
    columns = table.get("columns")
    is_truncated = bool(table.get("more")) or table.get("count", len(rows)) != len(rows)
    is_truncated = is_truncated or any(
        isinstance(value, str) and TRUNCATED_VALUE.search(value) for row in rows for value in row
    )
    comparable_rows = [tuple(_make_comparable(value) for value in row) for row in rows]
    return ResultRows(comparable_rows, is_truncated, len(columns) if isinstance(columns, list) else 0)


def has_order_by(query: str) -> bool:
    """Return whether the query has an ORDER BY at its top level, not in a subquery, a window or a string."""
    depth = 0
    for match in _SQL_TOKEN_PATTERN.finditer(query):
        token = match.group().lower()
        depth += (token == "(") - (token == ")")
        if depth == 0 and token.startswith("order"):
            return True
    return False


_SQL_TOKEN_PATTERN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|[()]|\border\s+by\b""",
    re.I | re.S,
)


def _make_comparable(value: Any) -> Any:
    """Return the value with floats rounded, because sums in another order differ in their last digits."""
    if isinstance(value, float):
        if math.isfinite(value) and abs(value) < 2**53:
            rounded_value = round(value)
            if math.isclose(value, rounded_value, rel_tol=1e-12, abs_tol=1e-15):
                return rounded_value
        return ("float", f"{value:.12g}")
    return value if value is None or type(value) is int else (type(value).__name__, json.dumps(value))
