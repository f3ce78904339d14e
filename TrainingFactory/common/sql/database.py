"""`SqlDatabase`: untrusted queries on a SQLite file, with a time limit and no access to other files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import sqlite3
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.types import ToolResult

Format = Literal["table", "json", "exact"]
MAX_CELL_CHARS = 500
MAX_VALUE_BYTES = 10_000_000  # limit of any value that SQLite computes
MAX_SQL_CHARS = 50_000
MAX_GROWTH_PAGES = 25_000  # maximum growth of a writable copy: 100 MB at the usual page size
TRUNCATED_VALUE = re.compile(r"\A<\d+ bytes>\Z|\[\.\.\. \d+ characters cut\]\Z")  # as `_truncate` writes it
STEPS_PER_TIME_CHECK = 1000  # SQLite virtual machine instructions between two checks of the time limit

READ_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
DENIED_ACTIONS = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}  # other files; VACUUM INTO counts as ATTACH
ALLOWED_PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"}
DENIED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}


class SqlDatabase:
    """One connection to the SQLite file `path`, opened at the first query. Methods block and are thread-safe. Queries
    are read-only; with `can_write` they run on a private copy. `timeout` is in seconds per query. `format` "exact" is
    JSON for comparison: long strings and blobs are replaced by their digest."""

    def __init__(
        self,
        path: Path,
        *,
        can_write: bool = False,
        timeout: float = 5.0,
        max_rows: int = 50,
        format: Format = "table",
    ) -> None:
        if not path.is_file():
            raise ValueError(f"SQLite file not found: {path}")
        self.path, self.can_write = path, can_write
        self.timeout, self.max_rows, self.format = timeout, max_rows, format
        self._connection: sqlite3.Connection | None = None
        self._copy_folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()  # a connection runs one statement at a time
        self._is_closed = False

    def run(self, query: str) -> ToolResult:
        """Run one statement. Return its rows as text, or the SQL error."""
        if not query.strip():
            return ToolResult("the query is empty", ok=False, error="exception")
        with self._lock:
            deadline = math.inf
            try:
                connection = self._connection or self._open_connection()
                deadline = time.monotonic() + self.timeout
                connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_PER_TIME_CHECK)
                cursor = connection.execute(query)
                shorten = _digest_long if self.format == "exact" else _truncate
                rows = [[shorten(value) for value in row] for row in islice(cursor, self.max_rows + 1)]
                column_names = [column[0] for column in cursor.description or ()]
                num_changed = cursor.rowcount
                cursor.close()
            except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
                return self._make_failure_result(error, time.monotonic() > deadline)
        if not column_names:
            change_text = (
                f"done, {num_changed} row{'' if num_changed == 1 else 's'} changed"
                if num_changed >= 0
                else "done"
            )
            return ToolResult(change_text)
        is_truncated = len(rows) > self.max_rows
        render = as_table if self.format == "table" else as_json
        return ToolResult(render(column_names, rows[: self.max_rows], is_truncated))

    def list_tables(self, max_chars: int) -> str:
        """List tables and columns in at most `max_chars` characters. Raise ValueError if the file is not a database."""
        query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
        try:
            with contextlib.closing(_open_read_only(self.path)) as connection:
                tables = []
                for (table,) in connection.execute(query + " ORDER BY name").fetchall():
                    columns = connection.execute("SELECT name, type FROM pragma_table_info(?)", (table,))
                    column_list = ", ".join(f"{column} {type_name}".strip() for column, type_name in columns)
                    tables.append(f"{table}({column_list})")
        except sqlite3.Error as error:
            raise ValueError(f"{self.path} is not a readable SQLite file: {error}") from error
        table_list, num_tables = "; ".join(tables), len(tables)
        if len(table_list) > max_chars:
            table_list = table_list[:max_chars]
            table_list += f" ... ({num_tables} tables in all; SELECT sql FROM sqlite_master shows them)"
        return f"Tables: {table_list or 'none'}."

    def close(self) -> None:
        """Interrupt a running statement and delete the private copy."""
        if self._connection is not None:
            self._connection.interrupt()
        with self._lock:
            self._is_closed = True
            connection, self._connection = self._connection, None
            folder, self._copy_folder = self._copy_folder, None
        if connection is not None:
            connection.close()
        if folder is not None:
            folder.cleanup()

    def _make_failure_result(self, error: BaseException, is_timeout: bool) -> ToolResult:
        if is_timeout and "interrupted" in str(error):
            text = f"stopped after {self.timeout:g} s; ask for less, for instance with LIMIT"
            # Not error="timeout": the database works, and a retry of the same statement would time out again.
            return ToolResult(text, ok=False, error="exception")
        message = "out of memory" if isinstance(error, MemoryError) else str(error)
        if "authoriz" in message or "readonly" in message or "prohibited" in message:
            message += " (this is not allowed here)" if self.can_write else " (only reading is allowed)"
        return ToolResult(f"SQL error: {message}", ok=False, error="exception")

    def _open_connection(self) -> sqlite3.Connection:
        if self._is_closed:
            raise ValueError("the episode is over")
        connection = _open_read_only(self.path)
        if self.can_write:
            self._copy_folder = tempfile.TemporaryDirectory(prefix="tf-sql-", ignore_cleanup_errors=True)
            connection = _copy_to(connection, f"{self._copy_folder.name}/copy.db")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_SQL_CHARS)
        connection.text_factory = lambda raw_text: raw_text.decode("utf-8", errors="replace")
        connection.set_authorizer(_authorize_write if self.can_write else _authorize_read)
        self._connection = connection
        return connection


def _open_read_only(path: Path) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _copy_to(connection: sqlite3.Connection, copy_path: str) -> sqlite3.Connection:
    writable_copy = sqlite3.connect(copy_path, check_same_thread=False, isolation_level=None)
    with contextlib.closing(connection):
        connection.backup(writable_copy)  # includes the write-ahead log
    writable_copy.execute("PRAGMA journal_mode = MEMORY")
    writable_copy.execute("PRAGMA synchronous = OFF")  # the copy is temporary
    num_pages = writable_copy.execute("PRAGMA page_count").fetchone()[0]
    writable_copy.execute(f"PRAGMA max_page_count = {num_pages + MAX_GROWTH_PAGES}")
    return writable_copy


def _authorize_read(action: int, first_argument: str | None, second_argument: str | None, *_: Any) -> int:
    if action == sqlite3.SQLITE_PRAGMA or action in READ_ACTIONS:
        return _authorize_write(action, first_argument, second_argument)
    return sqlite3.SQLITE_DENY


def _authorize_write(action: int, first_argument: str | None, second_argument: str | None, *_: Any) -> int:
    is_denied = action in DENIED_ACTIONS or (
        action == sqlite3.SQLITE_FUNCTION and (second_argument or "").lower() in DENIED_FUNCTIONS
    )
    if action == sqlite3.SQLITE_PRAGMA:
        is_denied = (first_argument or "").lower() not in ALLOWED_PRAGMAS
    return sqlite3.SQLITE_DENY if is_denied else sqlite3.SQLITE_OK


def as_table(column_names: list[str], rows: list[list[Any]], is_truncated: bool) -> str:
    lines = [" | ".join(map(_format_cell, row)) for row in [column_names, *rows]]
    num_rows = len(rows)
    footer = (
        f"(the first {num_rows} rows; there are more)"
        if is_truncated
        else f"({num_rows} row{'' if num_rows == 1 else 's'})"
    )
    return "\n".join([*lines, footer])


def as_json(column_names: list[str], rows: list[list[Any]], is_truncated: bool) -> str:
    return json.dumps(
        {"columns": column_names, "rows": rows, "count": len(rows), "more": is_truncated}, ensure_ascii=False
    )


def _truncate(value: Any) -> Any:
    """Truncate a value to its displayed size, so that large values are not kept in memory."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if not isinstance(value, str) or len(value) <= MAX_CELL_CHARS:
        return value
    return f"{value[:MAX_CELL_CHARS]}[... {len(value) - MAX_CELL_CHARS} characters cut]"


def _digest_long(value: Any) -> Any:
    """Replace a large value by a list of its type and digest, so that only equal values are replaced by equal lists."""
    if isinstance(value, str) and len(value) <= MAX_CELL_CHARS and not TRUNCATED_VALUE.search(value):
        return value
    if not isinstance(value, str | bytes):
        return value
    value_bytes = value.encode() if isinstance(value, str) else value
    return [type(value).__name__, hashlib.sha256(value_bytes).hexdigest()]


def _format_cell(value: Any) -> str:
    text = "NULL" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
