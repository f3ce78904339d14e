"""`SqlTool`: questions to a SQLite file. Read-only unless asked for; then every episode has a copy of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import validate_call

from TrainingFactory.common.options import STRICT, Count, Positive, Text, ZeroOrMore
from TrainingFactory.common.sql.database import Database, Format
from TrainingFactory.protocols import Tool
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec

_PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "one SQL statement"}},
    "required": ["query"],
}


class SqlTool:
    """Runs one SQL statement on the SQLite file `path` and shows the rows, as a `Database` does. With `write` every
    episode works on a private copy. The description lists tables and columns, in `schema_chars` characters."""

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
        self.database = partial(
            Database, self.path, write=write, timeout=timeout, max_rows=max_rows, format=format
        )
        try:
            tables = self.database().tables(schema_chars)
        except ValueError as error:
            raise ValueError(f"tool {name}: {error}; set path to an existing one") from error
        can = "statement; reading and writing" if write else "query (read-only)"
        self.spec = ToolSpec(name, description or f"Run one SQLite {can}. {tables}", _PARAMETERS)
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
        """Do nothing: a session has its own connection."""

    close = open


class SqlSession:
    """The tool in one episode: a connection of its own."""

    def __init__(self, tool: SqlTool) -> None:
        self.spec, self.options = tool.spec, tool.options
        self.database = tool.database()

    @property
    def tools(self) -> Sequence[Tool]:  # no attribute: an object that holds itself is not freed at once
        return [self]

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await in_thread(self.database.run, arguments["query"])

    async def close(self) -> None:
        await in_thread(self.database.close)


def _fingerprint(path: Path, *settings: Any) -> str:
    """Name the file, its content and the way to show it: what is cached fits nothing else."""
    stats = [file.stat() for file in (path, Path(f"{path}-wal")) if file.exists()]
    return digest(str(path), str([(stat.st_mtime_ns, stat.st_size) for stat in stats]), str(settings))
