"""`SqlTool`: questions to a SQLite file. Read-only unless asked for; then every episode has a copy of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.protocols import Tool
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec

MAX_CELL_CHARS = 500
MAX_VALUE_BYTES = 10_000_000  # no value that SQLite makes may be larger
MAX_SQL_CHARS = 50_000
GROWTH_PAGES = 25_000  # what a writable copy may grow by: 100 MB at the usual page size
CUT_VALUE = re.compile(r"\A<\d+ bytes>\Z|\[\.\.\. \d+ characters cut\]\Z")  # as `_shown` writes it
STEPS = 1000  # of SQLite's machine between two looks at the clock

READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
NEVER = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}  # other files; VACUUM INTO counts as ATTACH
PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"}
FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}  # refused


class SqlTool:
    """Runs one SQL statement on the SQLite file `path` and shows the rows.

    Read-only, which nothing in the statement can change, and then `pure`. With `write` every episode works on
    a private copy made at its first call, and the file itself stays as it is. Statements are stopped after
    `timeout` seconds; at most `max_rows` rows are shown. The description lists tables and columns.
    `format`: a table, JSON, or "exact", which is JSON for comparing: long texts and blobs are shown by their digest.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        write: bool = False,
        name: str = "sql",
        description: str | None = None,
        timeout: float = 5.0,
        max_rows: int = 50,
        format: Literal["table", "json", "exact"] = "table",
        schema_chars: int = 2000,
    ) -> None:
        if timeout <= 0 or max_rows < 1:
            raise ValueError(f"tool {name}: timeout ({timeout}) and max_rows ({max_rows}) must be over 0")
        if format not in ("table", "json", "exact"):
            raise ValueError(f"tool {name}: format is table, json or exact, not {format!r}")
        self.path = Path(path).resolve()
        self.write, self.timeout, self.max_rows, self.format = write, timeout, max_rows, format
        tables = described(self.path, name, schema_chars)
        can = (
            "Run one SQLite statement; reading and writing." if write else "Run one SQLite query (read-only)."
        )
        self.spec = ToolSpec(name, description or f"{can} {tables}", _PARAMETERS)
        self.options = ToolOptions(
            timeout=timeout + 30.0,  # the statement is stopped before; this is for opening and copying
            ordered=write,
            pure=not write,
            stateful=write,
            version=_fingerprint(self.path, write, max_rows, format),
        )

    def session(self) -> SqlSession:
        return SqlSession(self)

    async def open(self) -> None:
        """Sessions open what there is to open ..."""

    async def close(self) -> None:
        """... and hold what there is to close."""


class SqlSession:
    """The tool in one episode: a connection of its own, opened at the first call."""

    def __init__(self, source: SqlTool) -> None:
        self.source = source
        self.spec, self.options = source.spec, source.options
        self._connection: sqlite3.Connection | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()  # a connection serves one statement at a time
        self._closed = False

    @property
    def tools(self) -> Sequence[Tool]:
        return [self]

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await in_thread(self._run, arguments["query"])

    def _run(self, query: str) -> ToolResult:
        if not query.strip():
            return ToolResult("the query is empty", ok=False, error="exception")
        with self._lock:
            deadline = time.monotonic() + self.source.timeout
            try:
                connection = self._connection or self._open()
                deadline = time.monotonic() + self.source.timeout
                connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
                cursor = connection.execute(query)
                shown = _digested if self.source.format == "exact" else _shown
                rows = [[shown(value) for value in row] for row in islice(cursor, self.source.max_rows + 1)]
                names = [column[0] for column in cursor.description or ()]
                changed = cursor.rowcount
                cursor.close()
            except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
                return self._failed(error, time.monotonic() > deadline)
        if not names:
            text = f"done, {changed} row{'' if changed == 1 else 's'} changed" if changed >= 0 else "done"
            return ToolResult(text)
        more = len(rows) > self.source.max_rows
        show = as_table if self.source.format == "table" else as_json
        return ToolResult(show(names, rows[: self.source.max_rows], more))

    def _failed(self, error: BaseException, late: bool) -> ToolResult:
        if late and "interrupted" in str(error):
            text = f"stopped after {self.source.timeout:g} s; ask for less, for instance with LIMIT"
            # Not a time-out in the executor's sense: the file is well, and the same statement would stop again.
            return ToolResult(text, ok=False, error="exception")
        said = "out of memory" if isinstance(error, MemoryError) else str(error)
        if "authoriz" in said or "readonly" in said or "prohibited" in said:
            said += " (only reading is allowed)" if not self.source.write else " (this is not allowed here)"
        return ToolResult(f"SQL error: {said}", ok=False, error="exception")

    def _open(self) -> sqlite3.Connection:
        if self._closed:
            raise ValueError("the episode is over")
        source = self.source
        connection = _read_only(source.path)
        if source.write:
            self._folder = tempfile.TemporaryDirectory(prefix="tf-sql-", ignore_cleanup_errors=True)
            copy = sqlite3.connect(
                f"{self._folder.name}/copy.db", check_same_thread=False, isolation_level=None
            )
            with contextlib.closing(connection):
                connection.backup(copy)  # also what is still in the write-ahead log
            connection = copy
            connection.execute("PRAGMA journal_mode = MEMORY")
            connection.execute("PRAGMA synchronous = OFF")  # thrown away anyway
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {pages + GROWTH_PAGES}")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_SQL_CHARS)
        connection.text_factory = lambda data: data.decode("utf-8", errors="replace")
        connection.set_authorizer(_may_write if source.write else _may_read)
        self._connection = connection
        return connection

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
            folder, self._folder = self._folder, None
        if connection is not None:
            connection.close()
        if folder is not None:
            folder.cleanup()

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.interrupt()  # a statement that still runs for a cancelled call
        await in_thread(self._close)


_PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "one SQL statement"}},
    "required": ["query"],
}


def _read_only(path: Path) -> sqlite3.Connection:
    uri = f"{path.as_uri()}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _may_read(action: int, first: str | None, second: str | None, *_: Any) -> int:
    if action == sqlite3.SQLITE_PRAGMA:
        return sqlite3.SQLITE_OK if (first or "").lower() in PRAGMAS else sqlite3.SQLITE_DENY
    return _may_write(action, first, second) if action in READING else sqlite3.SQLITE_DENY


def _may_write(action: int, first: str | None, second: str | None, *_: Any) -> int:
    refused = action in NEVER or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS)
    if action == sqlite3.SQLITE_PRAGMA:
        refused = (first or "").lower() not in PRAGMAS
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


def described(path: Path, name: str, limit: int) -> str:
    """`Tables: a(x INTEGER, y TEXT); ...`, cut to `limit` characters; ValueError for a file that is none."""
    if not path.is_file():
        raise ValueError(f"tool {name}: there is no SQLite file {path}; set path to an existing one")
    try:
        with contextlib.closing(_read_only(path)) as connection:
            query = (
                "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
            )
            names = [row[0] for row in connection.execute(query + " ORDER BY name")]
            tables = []
            for table in names:
                columns = connection.execute("SELECT name, type FROM pragma_table_info(?)", (table,))
                listed = ", ".join(f"{column} {kind}".strip() for column, kind in columns)
                tables.append(f"{table}({listed})")
    except sqlite3.Error as error:
        raise ValueError(f"tool {name}: {path} cannot be read as a SQLite file: {error}") from error
    text = "; ".join(tables)
    if len(text) > limit:
        text = text[:limit] + f" ... ({len(tables)} tables in all; SELECT sql FROM sqlite_master shows them)"
    return f"Tables: {text or 'none'}."


def _fingerprint(path: Path, *settings: Any) -> str:
    """Another file, other content or another way to show it: nothing cached fits any more."""
    stats = [file.stat() for file in (path, Path(f"{path}-wal")) if file.exists()]
    seen = [str(path), *((stat.st_mtime_ns, stat.st_size) for stat in stats), *settings]
    return hashlib.blake2b(json.dumps(seen).encode(), digest_size=10).hexdigest()


def as_table(names: list[str], rows: list[list[Any]], more: bool) -> str:
    lines = [" | ".join(map(_cell, row)) for row in [names, *rows]]
    return "\n".join([*lines, _count(len(rows), more)])


def as_json(names: list[str], rows: list[list[Any]], more: bool) -> str:
    return json.dumps({"columns": names, "rows": rows, "count": len(rows), "more": more}, ensure_ascii=False)


def _count(rows: int, more: bool) -> str:
    return f"(the first {rows} rows; there are more)" if more else f"({rows} row{'' if rows == 1 else 's'})"


def _shown(value: Any) -> Any:
    """A value in the size it is shown in, so that a large one is not kept."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if not isinstance(value, str) or len(value) <= MAX_CELL_CHARS:
        return value
    return f"{value[:MAX_CELL_CHARS]}[... {len(value) - MAX_CELL_CHARS} characters cut]"


def _digested(value: Any) -> Any:
    """A large value in a form that no other one has."""
    if isinstance(value, str) and len(value) <= MAX_CELL_CHARS and not CUT_VALUE.search(value):
        return value
    if not isinstance(value, str | bytes):
        return value
    data = value.encode() if isinstance(value, str) else value
    return [type(value).__name__, hashlib.sha256(data).hexdigest()]


def _cell(value: Any) -> str:
    text = "NULL" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
