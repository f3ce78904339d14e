"""Queries by their rows: what tools show, and what must not pass for the same."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.kits.rules import scored
from TrainingFactory.common.sql.compare import ResultRows, parse_result_rows
from TrainingFactory.rewards.rules.tool_verified import make_verifier
from TrainingFactory.tools import tool
from TrainingFactory.tools.custom_tools import SqlTool
from TrainingFactory.types import ToolCall

LONG = "y" * 600


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "x.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        f"CREATE TABLE t (a, b, c); INSERT INTO t VALUES (1, x'0102', '{LONG}1'), (2, x'0304', '{LONG}2');"
    )
    connection.close()
    return path


REWARD = make_verifier("sql_execution")


@pytest.mark.parametrize("how", ["table", "json"])
@pytest.mark.parametrize(
    ("said", "right", "expected"),
    [
        ("SELECT 2.0", "SELECT 2", 1),
        ("SELECT 0.1 + 0.2 + 0.3", "SELECT 0.3 + 0.2 + 0.1", 1),
        ("SELECT " + " + ".join(["0.1"] * 10), "SELECT 1", 1),
        ("SELECT 0.1 + 0.2 - 0.3", "SELECT 0", 1),
        ("SELECT 123456789.12", "SELECT 123456789.14", 0),
        ("SELECT 123456789.1 + 0.2", "SELECT 123456789.2 + 0.1", 1),
        ("SELECT 1e-9", "SELECT 0", 0),
        ("SELECT 1234567890.4", "SELECT 1234567890", 0),
        ("SELECT 9e999", "SELECT 9e999", 1),
        ("SELECT 'NULL'", "SELECT NULL", 0),
        ("SELECT '1'", "SELECT 1", 0),
        ("SELECT '1 | 2'", "SELECT 1, 2", 0),
        ("SELECT b FROM t", "SELECT b FROM t", 1),
        ("SELECT x'FFFF' UNION ALL SELECT x'0304'", "SELECT b FROM t", 0),
        ("SELECT '<2 bytes>' UNION ALL SELECT '<2 bytes>'", "SELECT b FROM t", 0),
        ("SELECT '<2 bytes>'", "SELECT '<2 bytes>'", 1),
        ("SELECT c FROM t", "SELECT c FROM t", 1),
        ("SELECT substr(c, 1, 600) || 'q' FROM t", "SELECT c FROM t", 0),
        ("SELECT a FROM t WHERE a > 5", "SELECT a FROM t WHERE a > 9", 1),
        ("SELECT a, b FROM t WHERE a > 5", "SELECT a FROM t WHERE a > 9", 0),  # nothing, of other columns
    ],
)
def test_values_are_compared_as_they_are(database: Path, how: Any, said: str, right: str, expected: float):
    assert scored(REWARD, said, right, (SqlTool(database, format=how),)) == expected


def test_large_results_are_compared_whole(database: Path):
    many = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 9000) SELECT 'xxxxxxxx{}' || n FROM r"
    shown = SqlTool(database, max_rows=3)
    assert scored(REWARD, many.format("a"), many.format("a"), (shown,)) == 1
    assert scored("sql_result", many.format("b"), many.format("a"), (shown,)) == 0  # the same among the rules


def test_what_the_model_has_written_counts_for_nothing(database: Path):
    writable = SqlTool(database, write=True)
    emptied = [ToolCall("sql", {"query": "DELETE FROM t"})]
    assert scored(REWARD, "SELECT a FROM t WHERE a = 99", "SELECT a FROM t", (writable,), calls=emptied) == 0
    assert scored(REWARD, "DELETE FROM t", "SELECT a FROM t", (writable,)) == 0
    assert scored(REWARD, "SELECT a FROM t", "SELECT a FROM t", (writable,), calls=emptied) == 1


def rows_of(path: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_a_tool_of_ones_own_shows_rows_as_json_or_nothing_is_known(database: Path):
    shape: Any = None

    @tool
    def sql(query: str) -> str:
        """Run a query."""
        return shape(rows_of(database, query))

    shape = lambda rows: json.dumps({"rows": rows})  # noqa: E731
    assert scored(REWARD, "SELECT a * 1.0 FROM t", "SELECT a FROM t", (sql,)) == 1
    assert scored(REWARD, "SELECT 999", "SELECT a FROM t", (sql,)) == 0
    assert scored(REWARD, "no query", "SELECT a FROM t", (sql,)) == 0
    many = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 60000) SELECT n FROM r"
    assert scored(REWARD, many, "SELECT a FROM t", (sql,)) == 0  # cut, but surely not the same
    with pytest.raises(ValueError, match=r"task t1: the tool did not return .* JSON"):
        scored(REWARD, many.replace("n FROM", "-n FROM"), many, (sql,))
    shapes: list[Any] = [
        json.dumps,
        str,
        lambda rows: "ok",
        lambda rows: "",
        lambda rows: json.dumps({"rows": [{"a": value} for (value,) in rows]}),
        lambda rows: "a\n" + "\n".join(str(value) for (value,) in rows) + f"\n({len(rows)} rows)",
    ]
    for shape in shapes:  # noqa: B007 (the tool uses it)
        for said in ("SELECT 999", "SELECT a FROM t"):
            with pytest.raises(ValueError, match="use SqlTool"):
                scored(REWARD, said, "SELECT a FROM t", (sql,))


def test_rows_that_were_not_all_shown():
    assert parse_result_rows('{"rows": [[1, null, "a"]], "columns": ["x", "y", "z"]}') == ResultRows(
        [(1, None, ("str", '"a"'))], False, 3
    )
    for more in (
        '{"rows": [[1]], "more": true}',
        '{"rows": [[1]], "count": 2}',
        '{"rows": [["<2 bytes>"]]}',
        '{"rows": [["yyy[... 5 characters cut]"]]}',
    ):
        found = parse_result_rows(more)
        assert found is not None and found.is_truncated
    for junk in ("", "[]", "[[1]]", "{}", '{"rows": 3}', '{"rows": [1]}', "[" * 100_000, '{"rows": [[1]]'):
        assert parse_result_rows(junk) is None
    assert parse_result_rows('{"rows": [[true]]}') != parse_result_rows('{"rows": [[1]]}')


@pytest.mark.parametrize("files", [[], "", {}, 5, [5], [None]])
def test_no_database_is_said(files: Any, database: Path):
    with pytest.raises(ValueError, match="task t1: "):
        scored(REWARD, "SELECT 1", "SELECT 1", (SqlTool(database),), database=files)
    both = [database, str(database)]
    assert scored(REWARD, "SELECT 1", "SELECT 1", database=both) == 1
