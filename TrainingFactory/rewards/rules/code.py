"""Rules that run the answer with a tool of the environment: code against its tests."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, Text
from TrainingFactory.common.sql.compare import RunQuery
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.rules.answers import ExtractionRule, ExtractMode, reference_answers
from TrainingFactory.rewards.rules.code_asserts import split_test
from TrainingFactory.rewards.rules.json_answers import last_fenced_block
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Reward, Task, ToolFailure, ToolResult


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ToolRule(ExtractionRule):
    """Base of rules that run the final text's last fenced block, or the whole text, with the environment's `tool`."""

    extract: ExtractMode = "whole"
    tool: Text = "python"

    def check_environment(self, environment: Environment, task: Task) -> None:
        """Raise ValueError if the environment lacks the tool."""
        available = [tool.spec.name for tool in environment.tools]
        if self.tool not in available:
            raise ValueError(
                f"the reward {self.rule} needs the tool {self.tool!r}, but {type(environment).__name__} has "
                f"{', '.join(available) or 'none'}; add it under tools, or set the option tool to another one"
            )

    def code_of(self, episode: Episode) -> str | None:
        text = self.text_of(episode.trajectory)
        return (last_fenced_block(text) or self.answer_in(text)) if text is not None else None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CodeTests(ToolRule):
    """Reward code that passes the tests in the task's metadata `tests`, else in its answer: Python source, or a list of
    sources. Tests that can only run in the same process as the code need `trusting`, because the code could fake their
    result."""

    rule: ClassVar[str] = "code_tests"
    partial: bool = False
    trusting: bool = False

    async def __call__(self, episode: Episode) -> Reward:
        tests = episode.task.metadata.get("tests") or reference_answers(episode.task, self.rule)
        tests = [tests] if isinstance(tests, str) else list(tests)
        code = self.code_of(episode)
        if not code:
            return self.make_reward(0.0)
        has_passed = [await self._passes(episode, code, str(test)) for test in tests]
        return self.make_reward(sum(has_passed) / len(has_passed) if self.partial else all(has_passed))

    async def _passes(self, episode: Episode, code: str, test: str) -> bool:
        try:
            split = split_test(test)
        except ValueError as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error
        call = tool_caller(episode, self.tool, "code")
        if split is not None:
            displayed = "'[' + ', '.join(_found) + ']'"
            output = await run_and_read(call, f"{code}\n\n{split.script}", displayed, split.size)
            return output is not None and split.accepts(output)
        if not self.trusting:
            raise ValueError(
                f"task {episode.task.id}: the code could fake the test {test.strip()[:60]!r}; rewrite the test in the "
                "form assert f(2) == 4, use tool_verified with code_cases, or set trusting: true"
            )
        return await run_and_read(call, f"{code}\n\n{test}", "''") is not None


def tool_caller(episode: Episode, tool: str, argument: str) -> RunQuery:
    """Return a function that calls the environment's tool; it raises ToolFailure if the environment lacks the tool."""

    async def call(text: str) -> ToolResult:
        result = await episode.call(tool, **{argument: text})
        if result.error == "unknown":
            raise ToolFailure(f"the environment has no tool {tool!r}, which the reward needs")
        return result

    return call


async def run_and_read(call: RunQuery, code: str, expression: str, size: int = 0) -> str | None:
    """Run the code and return the value of a string expression; None if the code failed. Raise ValueError if the tool
    truncated output that may be correct; `size` is the length of the correct value."""
    # The digest marks our line among the output of the code, so that exiting early does not pass. It depends only on
    # the code, so that recorded calls can be replayed; code that guesses it gains nothing.
    marker = digest(code)
    result = await call(f"{code}\nprint('\\n' + {marker!r} + {expression})\n")
    if _TRUNCATION_MARK.search(result.content) and size * 2 > len(result.content):
        raise ValueError(
            "cannot compare the output of the code, because the tool truncated it and the expected value is too long "
            "as well; raise the tool's max_output_chars, or use a test with a shorter value"
        )
    lines = [line for line in result.content.splitlines() if line.startswith(marker)]
    return lines[0].removeprefix(marker) if result.ok and len(lines) == 1 else None


_TRUNCATION_MARK = re.compile(r"\[\.\.\. \d+ (?:bytes|characters) cut \.\.\.\]")
