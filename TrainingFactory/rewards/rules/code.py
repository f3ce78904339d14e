"""Rules that run the answer with a tool of the environment: code against its tests."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, Text
from TrainingFactory.common.sql.compare import RunQuery
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.rules.answers import ExtractionRule, ExtractMode, get_references
from TrainingFactory.rewards.rules.code_asserts import split_test
from TrainingFactory.rewards.rules.json_answers import find_last_fenced_block
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Reward, Task, ToolFailure, ToolResult


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ToolRule(ExtractionRule):
    """Base of rules that run the final text's last fenced block, or the whole text, with the environment's `tool`."""

    extract: ExtractMode = "whole"
    tool: Text = "python"

    def check_environment(self, environment: Environment, task: Task) -> None:
        """Raise ValueError if the environment lacks the tool."""
        tool_names = [tool.spec.name for tool in environment.tools]
        if self.tool not in tool_names:
            raise ValueError(
                f"the reward {self.rule} needs the tool {self.tool!r}, but {type(environment).__name__} has "
                f"{', '.join(tool_names) or 'none'}; add it under tools, or set the option tool to another one"
            )

    def extract_code(self, episode: Episode) -> str | None:
        text = self.get_final_text(episode.trajectory)
        return (find_last_fenced_block(text) or self.extract_answer(text)) if text is not None else None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CodeTests(ToolRule):
    """Reward code that passes the tests in the task's metadata `tests`, else in its answer: Python source, or a list of
    sources. Tests that can only run in the same process as the code need `trusting`, because the code could fake their
    result."""

    rule: ClassVar[str] = "code_tests"
    partial: bool = False
    trusting: bool = False

    async def __call__(self, episode: Episode) -> Reward:
        tests = episode.task.metadata.get("tests") or get_references(episode.task, self.rule)
        tests = [tests] if isinstance(tests, str) else list(tests)
        code = self.extract_code(episode)
        if not code:
            return self.make_reward(0.0)
        pass_flags = [await self._passes(episode, code, str(test)) for test in tests]
        return self.make_reward(sum(pass_flags) / len(pass_flags) if self.partial else all(pass_flags))

    async def _passes(self, episode: Episode, code: str, test: str) -> bool:
        try:
            split = split_test(test)
        except ValueError as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error
        run_code = make_tool_caller(episode, self.tool, "code")
        if split is not None:
            expression = "'[' + ', '.join(_found) + ']'"
            output = await run_and_read(run_code, f"{code}\n\n{split.script}", expression, split.max_chars)
            return output is not None and split.accepts(output)
        if not self.trusting:
            raise ValueError(
                f"task {episode.task.id}: the code could fake the test {test.strip()[:60]!r}; rewrite the test in the "
                "form assert f(2) == 4, use tool_verified with code_cases, or set trusting: true"
            )
        return await run_and_read(run_code, f"{code}\n\n{test}", "''") is not None


def make_tool_caller(episode: Episode, tool_name: str, argument_name: str) -> RunQuery:
    """Return a function that calls the environment's tool; it raises ToolFailure if the environment lacks the tool."""

    async def call_tool(text: str) -> ToolResult:
        result = await episode.call(tool_name, **{argument_name: text})
        if result.error == "unknown":
            raise ToolFailure(f"the environment has no tool {tool_name!r}, which the reward needs")
        return result

    return call_tool


async def run_and_read(run_code: RunQuery, code: str, expression: str, expected_chars: int = 0) -> str | None:
    """Run the code and return the value of a string expression; None if the code failed. Raise ValueError if the tool
    truncated output that may be correct; `expected_chars` is the length of the correct value."""
    # The digest marks our line among the output of the code, so that exiting early does not pass. It depends only on
    # the code, so that recorded calls can be replayed; code that guesses it gains nothing.
    marker = digest(code)
    result = await run_code(f"{code}\nprint('\\n' + {marker!r} + {expression})\n")
    if _TRUNCATION_MARK.search(result.content) and expected_chars * 2 > len(result.content):
        raise ValueError(
            "cannot compare the output of the code, because the tool truncated it and the expected value is too long "
            "as well; raise the tool's max_output_chars, or use a test with a shorter value"
        )
    lines = [line for line in result.content.splitlines() if line.startswith(marker)]
    return lines[0].removeprefix(marker) if result.ok and len(lines) == 1 else None


_TRUNCATION_MARK = re.compile(r"\[\.\.\. \d+ (?:bytes|characters) cut \.\.\.\]")
