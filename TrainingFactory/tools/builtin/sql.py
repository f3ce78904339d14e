"""`SqlTool`, SQL queries on a SQLite file. Read-only by default; with `write`, every episode gets a private copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import validate_call

from TrainingFactory.common.options import STRICT, Count, Positive, Text, ZeroOrMore
from TrainingFactory.common.sql.database import Format, SqlDatabase
from TrainingFactory.protocols import Tool
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec

_SQL_SCHEMA = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "one SQL statement"}},
    "required": ["query"],
}


class SqlTool:
    """Runs one SQL statement per call on the SQLite file `path`; see `SqlDatabase`. With `write`, every episode works
    on a private copy. The default description lists tables and columns, in at most `schema_chars` characters."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        path: str | Path,
        *,
        write: bool = False,
        name: Text = "sql",
        description: str | None = None,
        timeout: Positive = 5.0,
        max_rows: Count = 50,
        format: Format = "table",
        schema_chars: ZeroOrMore = 2000,
    ) -> None:
        self.path = Path(path).resolve()
        self.open_database = partial(
            SqlDatabase, self.path, can_write=write, timeout=timeout, max_rows=max_rows, format=format
        )
        try:
            table_list = self.open_database().list_tables(schema_chars)
        except ValueError as error:
            raise ValueError(f"tool {name}: {error}; set path to an existing SQLite file") from error
        statement = "statement; reading and writing" if write else "query (read-only)"
        self.spec = ToolSpec(name, description or f"Run one SQLite {statement}. {table_list}", _SQL_SCHEMA)
        self.options = ToolOptions(
            timeout=timeout
            + 30.0,  # `timeout` stops the statement; the rest is for opening and copying the file
            ordered=write,
            pure=not write,
            stateful=write,
            version=_compute_version(self.path, write, max_rows, format),
        )

    def session(self) -> SqlSession:
        return SqlSession(self)

    async def open(self) -> None:
        """Do nothing: every session opens its own connection."""

    close = open


class SqlSession:
    """One episode's database connection, as a session and as its only tool."""

    def __init__(self, tool: SqlTool) -> None:
        self.spec, self.options = tool.spec, tool.options
        self.database = tool.open_database()

    @property
    def tools(self) -> Sequence[Tool]:  # a property, because an attribute would be a reference cycle
        return [self]

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await in_thread(self.database.run, arguments["query"])

    async def close(self) -> None:
        await in_thread(self.database.close)


def _compute_version(path: Path, *settings: Any) -> str:
    """Return a digest of the file's state and the settings; a change invalidates cached results."""
    file_stats = [file.stat() for file in (path, Path(f"{path}-wal")) if file.exists()]
    return digest(str(path), str([(stat.st_mtime_ns, stat.st_size) for stat in file_stats]), str(settings))
