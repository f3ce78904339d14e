"""Queries by the rows that they give: `sql_result` among the rules, `sql_execution` among the verifiers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, Count, Text
from TrainingFactory.common.sql.compare import same_result
from TrainingFactory.common.sql.database import Database
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.rules.answers import references
from TrainingFactory.rewards.rules.code import ToolRule, through
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Task

MAX_ROWS = 10_000  # that are compared


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SqlExecution(ToolRule):
    """Reward a query that gives the rows of the right one, in their order if the right query orders them.

    Both run on the SQLite files that the task's metadata names in `database`, one or several: a query that is right by
    chance on one file, or writes the result down as constants, is not right on all. Without them they run on the file
    of the environment's `SqlTool`, read-only and as it was before the episode; another tool is called."""

    rule: ClassVar[str] = "sql_execution"
    tool: Text = "sql"
    timeout: Annotated[float, Field(ge=0.001)] = 5.0  # seconds for a query on a database
    max_rows: Count = MAX_ROWS

    def check_environment(self, environment: Environment, task: Task) -> None:
        if "database" not in task.metadata and _source(environment, self.tool) is None:
            super().check_environment(environment, task)

    async def __call__(self, episode: Episode) -> Reward:
        [right] = references(episode.task, self.rule)[:1]
        query = self.code_of(episode)
        if not query:
            return self.rewarded(0.0)
        try:
            return self.rewarded(await self._same(episode, query, str(right)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error

    async def _same(self, episode: Episode, query: str, right: str) -> bool:
        named = episode.task.metadata.get("database")
        if named is None:
            if (source := _source(episode.environment, self.tool)) is None:
                return await same_result(through(episode, self.tool, "query"), query, right)
            return await self._same_in(source.path, source.timeout, query, right)
        files = [named] if isinstance(named, str | Path) else list(named)
        if not files:
            raise ValueError("its metadata database is empty; it must be a SQLite file, or a list of them")
        return all([await self._same_in(Path(path), self.timeout, query, right) for path in files])

    async def _same_in(self, path: Path, timeout: float, query: str, right: str) -> bool:
        database = await in_thread(Database, path, timeout=timeout, max_rows=self.max_rows, format="exact")
        try:
            return await same_result(partial(in_thread, database.run), query, right)
        finally:
            await in_thread(database.close)


class SqlResult(SqlExecution):
    rule: ClassVar[str] = "sql_result"


def _source(environment: Environment, tool: str) -> Database | None:
    """Return the `database` of the environment or of its tool, if one has any."""
    tools = (one for one in getattr(environment, "tools", ()) if one.spec.name == tool)
    found = (getattr(one, "database", None) for one in (environment, *tools))
    return next((database for database in found if isinstance(database, Database)), None)
