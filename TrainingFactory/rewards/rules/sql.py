"""Rewards for SQL queries by their result: the rule `sql_result` and the verifier `sql_execution`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, Count, Text
from TrainingFactory.common.sql.compare import rows_match
from TrainingFactory.common.sql.database import SqlDatabase
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.rules.answers import get_references
from TrainingFactory.rewards.rules.code import ToolRule, make_tool_caller
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Task

MAX_ROWS = 10_000  # limit of a compared result


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SqlExecution(ToolRule):
    """Reward a query that returns the same rows as the reference query, in the same order if that has ORDER BY.

    Both run on the SQLite files in the task's metadata `database`, one or several: with several files, a query that is
    correct by chance or returns constants fails. Without `database` they run on the file of the environment's
    `SqlTool`, read-only and in its state before the episode; any other tool is called with the queries."""

    rule: ClassVar[str] = "sql_execution"
    tool: Text = "sql"
    timeout: Annotated[float, Field(ge=0.001)] = 5.0  # seconds for a query on a database
    max_rows: Count = MAX_ROWS

    def check_environment(self, environment: Environment, task: Task) -> None:
        if "database" not in task.metadata and _find_database(environment, self.tool) is None:
            super().check_environment(environment, task)

    async def __call__(self, episode: Episode) -> Reward:
        [reference] = get_references(episode.task, self.rule)[:1]
        query = self.extract_code(episode)
        if not query:
            return self.make_reward(0.0)
        try:
            return self.make_reward(await self._has_same_result(episode, query, str(reference)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error

    async def _has_same_result(self, episode: Episode, query: str, reference: str) -> bool:
        paths = episode.task.metadata.get("database")
        if paths is None:
            if (database := _find_database(episode.environment, self.tool)) is None:
                return await rows_match(make_tool_caller(episode, self.tool, "query"), query, reference)
            return await self._match_in_file(database.path, database.timeout, query, reference)
        files = [paths] if isinstance(paths, str | Path) else list(paths)
        if not files:
            raise ValueError("its metadata database is empty; list at least one SQLite file")
        return all([await self._match_in_file(Path(path), self.timeout, query, reference) for path in files])

    async def _match_in_file(self, path: Path, timeout: float, query: str, reference: str) -> bool:
        database = await in_thread(SqlDatabase, path, timeout=timeout, max_rows=self.max_rows, format="exact")
        try:
            return await rows_match(partial(in_thread, database.run), query, reference)
        finally:
            await in_thread(database.close)


class SqlResult(SqlExecution):
    rule: ClassVar[str] = "sql_result"


def _find_database(environment: Environment, tool_name: str) -> SqlDatabase | None:
    """Return the `database` of the environment or of the named tool; None if neither has one."""
    tools = (candidate for candidate in getattr(environment, "tools", ()) if candidate.spec.name == tool_name)
    databases = (getattr(owner, "database", None) for owner in (environment, *tools))
    return next((database for database in databases if isinstance(database, SqlDatabase)), None)
