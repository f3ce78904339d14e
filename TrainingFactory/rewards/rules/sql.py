"""Queries by the rows that they give: `sql_result` among the rules, `sql_execution` among the verifiers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from TrainingFactory.options import STRICT, Count, Text
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.rules.answers import references
from TrainingFactory.rewards.rules.code import ToolRule, through
from TrainingFactory.sql.compare import Ask, same_result
from TrainingFactory.sql.database import Database
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Task

MAX_ROWS = 10_000  # that are compared


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SqlResult(ToolRule):
    """The query gives the rows that the right one (the task's answer) gives. Their order counts if the right query
    orders them; names of columns never do.

    Where the environment's `tool` is a `SqlTool`, or the environment has one as `database`, both run on its file,
    read-only and as it was before the episode: what the model may have written counts for nothing. Another tool is
    called, and must show rows as JSON."""

    rule: ClassVar[str] = "sql_result"
    tool: Text = "sql"

    def check_environment(self, environment: Environment, task: Task) -> None:
        if _source(environment, self.tool) is None:
            super().check_environment(environment, task)

    async def __call__(self, episode: Episode) -> Reward:
        [right] = references(episode.task, self.rule)[:1]
        query = self.code_of(episode)
        if not query:
            return self.rewarded(0.0)
        try:
            return self.rewarded(await self.same(episode, query, str(right)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error

    async def same(self, episode: Episode, query: str, right: str) -> bool:
        source = _source(episode.environment, self.tool)
        if source is None:
            return await same_result(through(episode, self.tool, "query"), query, right)
        async with _opened(source.path, source.timeout) as ask:
            return await same_result(ask, query, right)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SqlExecution(SqlResult):
    """`sql_result` on the SQLite files that the task's metadata names in `database`, one or several: a query that is
    right by chance on one file, or that writes the result down as constants, is not right on all. Without them it asks
    the environment's `tool`. Writing, several statements, endless and huge queries are wrong."""

    rule: ClassVar[str] = "sql_execution"
    database: Text = "database"  # key in the task's metadata
    timeout: Annotated[float, Field(ge=0.001)] = 5.0  # seconds for a query on a database
    max_rows: Count = MAX_ROWS

    def check_environment(self, environment: Environment, task: Task) -> None:
        if self.database not in task.metadata:
            super().check_environment(environment, task)

    async def same(self, episode: Episode, query: str, right: str) -> bool:
        if (named := episode.task.metadata.get(self.database)) is None:
            return await super().same(episode, query, right)
        files = [named] if isinstance(named, str | Path) else list(named)
        if not files:
            raise ValueError(
                f"its metadata {self.database} is empty; it must be a SQLite file, or a list of them"
            )
        results = []
        for path in files:
            async with _opened(Path(path), self.timeout, self.max_rows) as ask:
                results.append(await same_result(ask, query, right))
        return all(results)


def _source(environment: Environment, tool: str) -> Database | None:
    """Return the `database` of the environment or of its tool, if one has any."""
    tools = (one for one in getattr(environment, "tools", ()) if one.spec.name == tool)
    found = (getattr(one, "database", None) for one in (environment, *tools))
    return next((database for database in found if isinstance(database, Database)), None)


@contextlib.asynccontextmanager
async def _opened(path: Path, timeout: float, max_rows: int = MAX_ROWS) -> AsyncIterator[Ask]:
    database = await in_thread(Database, path, timeout=timeout, max_rows=max_rows, format="exact")
    try:
        yield lambda query: in_thread(database.run, query)
    finally:
        await in_thread(database.close)
