"""Rules that ask a tool of the environment: code by its tests, a query by its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.answers import Extraction, references
from TrainingFactory.rewards.checks import check_flag
from TrainingFactory.rewards.rules_base import paid
from TrainingFactory.rewards.rules_form import last_fenced
from TrainingFactory.tools.history import digest
from TrainingFactory.tools.sql_rows import same_result
from TrainingFactory.types import Reward, ToolFailure, ToolResult


@dataclass(frozen=True, kw_only=True)
class ToolRule(Extraction):
    """The final text's last fenced block, or all of it, is what the tool gets."""

    extract: str = "whole"

    def code_of(self, episode: Episode) -> str | None:
        text = self.text_of(episode.trajectory)
        return (last_fenced(text) or self.answer_in(text)) if text is not None else None


@dataclass(frozen=True, kw_only=True)
class CodeTests(ToolRule):
    """The tests that the code passes, by the environment's `tool`. Tests are the task's metadata `tests`, else its
    answer: one Python text, or a list of them, each run by itself after the code. `partial`: the share that passes."""

    rule: ClassVar[str] = "code_tests"
    tool: str = "python"
    partial: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("partial", self.partial)

    async def __call__(self, episode: Episode) -> Reward:
        tests = episode.task.metadata.get("tests") or references(episode.task, self.rule)
        tests = [tests] if isinstance(tests, str) else list(tests)
        code = self.code_of(episode)
        if not code:
            return paid(self.rule, 0.0)
        passed = [await self._passes(episode, code, str(test)) for test in tests]
        return paid(self.rule, sum(passed) / len(passed) if self.partial else float(all(passed)))

    async def _passes(self, episode: Episode, code: str, test: str) -> bool:
        # A word that the code cannot know shows that the end was reached: leaving early is not passing. The same code
        # gets the same word again, so that a recorded call is found.
        word = digest(code, test)
        script = f"{code}\n\n{test}\nprint({word!r})\n"
        result = _asked(await episode.call(self.tool, code=script), self.tool)
        return result.ok and word in result.content


@dataclass(frozen=True, kw_only=True)
class SqlResult(ToolRule):
    """The query gives the rows that the right one gives, by the environment's `tool`. Their order counts if the right
    query orders them; names of columns never do."""

    rule: ClassVar[str] = "sql_result"
    tool: str = "sql"

    async def __call__(self, episode: Episode) -> Reward:
        [right] = references(episode.task, self.rule)[:1]
        query = self.code_of(episode)
        if not query:
            return paid(self.rule, 0.0)

        async def ask(sql: str) -> ToolResult:
            return _asked(await episode.call(self.tool, query=sql), self.tool)

        try:
            return paid(self.rule, float(await same_result(ask, query, str(right))))
        except ValueError as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error


def _asked(result: ToolResult, tool: str) -> ToolResult:
    if result.error == "unknown":
        raise ToolFailure(f"the environment has no tool {tool!r}, which the reward needs")
    return result
