from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.tools import play
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.builtin.sql import SqlTool
from TrainingFactory.types import ToolCall, ToolResult


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    path = tmp_path / "shop.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE items(id INTEGER PRIMARY KEY, name TEXT, price REAL, photo BLOB);"
        "INSERT INTO items(name, price, photo) VALUES ('pen', 1.5, NULL), ('two\nlines', NULL, x'0102');"
        "CREATE VIEW cheap AS SELECT name FROM items WHERE price < 2;"
        "CREATE TABLE many(n INTEGER); WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 200)"
        " INSERT INTO many SELECT n FROM r;"
    )
    connection.close()
    yield path
    assert list(scratch.iterdir()) == []  # every episode has taken its copy away


def run(tool: SqlTool, *queries: str) -> list[ToolResult]:
    """One episode."""
    return play([tool], *(ToolCall("sql", {"query": query}) for query in queries))


def content(path: Path) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute("SELECT * FROM items").fetchall()
    finally:
        connection.close()


def test_rows_as_text_and_as_json(shop: Path):
    table, none, many = run(
        SqlTool(shop),
        "SELECT * FROM items",
        "SELECT name FROM items WHERE 0",
        "SELECT n FROM many ORDER BY n",
    )
    assert table.content == (
        "id | name | price | photo\n1 | pen | 1.5 | NULL\n2 | two\\nlines | NULL | <2 bytes>\n(2 rows)"
    )
    assert none.content == "name\n(0 rows)"
    lines = many.content.splitlines()
    assert lines[1] == "1" and lines[50] == "50" and lines[-1] == "(the first 50 rows; there are more)"
    (answer,) = run(SqlTool(shop, format="json", max_rows=1), "SELECT name, price FROM items")
    assert json.loads(answer.content) == {
        "columns": ["name", "price"],
        "rows": [["pen", 1.5]],
        "count": 1,
        "more": True,
    }


def test_the_model_is_told_the_tables(shop: Path):
    text = SqlTool(shop).spec.description
    assert "read-only" in text and "cheap(name TEXT)" in text and "many(n INTEGER)" in text
    assert "items(id INTEGER, name TEXT, price REAL, photo BLOB)" in text
    assert "3 tables in all" in SqlTool(shop, schema_chars=20).spec.description


ATTACKS = [
    "INSERT INTO items(name) VALUES ('x')",
    "UPDATE items SET price = 0",
    "DELETE FROM items",
    "DROP TABLE items",
    "CREATE TABLE t(a)",
    "CREATE TEMP TABLE t(a)",
    "PRAGMA query_only = OFF",
    "PRAGMA journal_mode = WAL",
    "PRAGMA writable_schema = 1",
    "BEGIN IMMEDIATE",
    "WITH a AS (SELECT 1) DELETE FROM items",
]
ESCAPES = [
    "ATTACH '{folder}/other.db' AS other",
    "VACUUM INTO '{folder}/other.db'",
    "SELECT load_extension('{folder}/other.so')",
    "SELECT writefile('{folder}/other.db', 'x')",
    "SELECT readfile('/etc/passwd')",
    "PRAGMA temp_store_directory = '{folder}'",
    "SELECT 1; DELETE FROM items",
]


@pytest.mark.parametrize("query", ATTACKS + ESCAPES)
def test_a_read_only_file_stays_as_it_is(shop: Path, query: str):
    before = shop.read_bytes()
    refused, still = run(SqlTool(shop), query.format(folder=shop.parent), "SELECT count(*) FROM items")
    assert not refused.ok and refused.error == "exception" and refused.content.startswith("SQL error: ")
    assert still.content == "count(*)\n2\n(1 row)" and shop.read_bytes() == before
    assert not (shop.parent / "other.db").exists()


@pytest.mark.parametrize(
    "query", ["PRAGMA table_list", "PRAGMA table_info(items)", "PRAGMA table_xinfo(items)"]
)
def test_the_schema_of_a_read_only_file_can_be_explored(shop: Path, query: str):
    (listed,) = run(SqlTool(shop), query)
    assert listed.ok and ("items" in listed.content or "price" in listed.content)


@pytest.mark.parametrize("query", ESCAPES)
def test_writing_does_not_reach_other_files(shop: Path, query: str):
    (refused,) = run(SqlTool(shop, write=True), query.format(folder=shop.parent))
    assert not refused.ok and not (shop.parent / "other.db").exists()


def test_every_writing_episode_has_a_copy(shop: Path):
    tool = SqlTool(shop, write=True)
    before = content(shop)
    inserted, counted = run(tool, "INSERT INTO items(name) VALUES ('x'), ('y')", "SELECT count(*) FROM items")
    assert inserted.content == "done, 2 rows changed" and counted.content == "count(*)\n4\n(1 row)"
    assert run(tool, "SELECT count(*) FROM items")[0].content == "count(*)\n2\n(1 row)"
    assert content(shop) == before
    undone = run(tool, "BEGIN", "DELETE FROM items", "ROLLBACK", "SELECT count(*) FROM items")
    assert undone[-1].content == "count(*)\n2\n(1 row)"
    assert tool.options.stateful and tool.options.ordered and not tool.options.pure
    reading = SqlTool(shop)
    assert reading.options.pure and not reading.options.ordered


async def test_episodes_at_once_do_not_meet(shop: Path):
    tool = SqlTool(shop, write=True)

    async def episode(number: int) -> str:
        executor = AsyncToolExecutor([tool])
        queries = (f"DELETE FROM many WHERE n > {number}", "SELECT count(*) FROM many")
        results = await executor.batch_execute([ToolCall("sql", {"query": query}) for query in queries])
        await executor.close()
        return results[-1].content.splitlines()[1]

    assert await asyncio.gather(*map(episode, range(8))) == [str(number) for number in range(8)]


def test_statements_without_end_and_values_without_measure(shop: Path):
    tool = SqlTool(shop, timeout=0.2)
    endless = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
    results = run(tool, endless, "SELECT zeroblob(900000000)", "SELECT hex(zeroblob(4000000))", "SELECT 1")
    assert results[0].content.startswith("stopped after 0.2 s") and not results[0].ok
    assert "too big" in results[1].content
    assert len(results[2].content) < 1000 and "characters cut" in results[2].content
    assert results[3].content == "1\n1\n(1 row)"


def test_a_copy_cannot_grow_without_end(shop: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("TrainingFactory.common.sql.database.MAX_GROWTH_PAGES", 10)
    (result,) = run(SqlTool(shop, write=True), "INSERT INTO items(photo) SELECT zeroblob(1000) FROM many")
    assert not result.ok and "full" in result.content


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM missing", "no such table: missing"),
        ("SELECT missing FROM items", "no such column: missing"),
        ("  ", "empty"),
        ("SELECT '\0'", "SQL error"),
    ],
)
def test_errors_in_words(shop: Path, query: str, says: str):
    (result,) = run(SqlTool(shop), query)
    assert not result.ok and says in result.content and len(result.content) < 200


def test_what_is_cached_knows_the_file(shop: Path):
    first = SqlTool(shop).options.version
    assert SqlTool(shop).options.version == first != SqlTool(shop, max_rows=3).options.version
    connection = sqlite3.connect(shop)
    connection.execute("INSERT INTO many SELECT n FROM many")
    connection.commit()
    connection.close()
    assert SqlTool(shop).options.version != first
