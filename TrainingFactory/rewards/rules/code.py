"""Rules that ask a tool of the environment: code by its tests."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, Text
from TrainingFactory.common.sql.compare import Ask
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.rules.answers import Extract, Extraction, references
from TrainingFactory.rewards.rules.code_asserts import read_asserts
from TrainingFactory.rewards.rules.json_answers import last_fenced
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Reward, Task, ToolFailure, ToolResult


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ToolRule(Extraction):
    """Ask the environment's `tool` about the final text's last fenced block, or all of it."""

    extract: Extract = "whole"
    tool: Text = "python"

    def check_environment(self, environment: Environment, task: Task) -> None:
        """Raise ValueError if the tool is needed and not there."""
        has = [tool.spec.name for tool in environment.tools]
        if self.tool not in has:
            raise ValueError(
                f"the reward {self.rule} needs the tool {self.tool!r}, and {type(environment).__name__} has "
                f"{', '.join(has) or 'none'}; add it under tools, or name another one by the option tool"
            )

    def code_of(self, episode: Episode) -> str | None:
        text = self.text_of(episode.trajectory)
        return (last_fenced(text) or self.answer_in(text)) if text is not None else None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CodeTests(ToolRule):
    """Reward code that passes the tests in the task's metadata, else its answer: one Python text, or a list of them.
    Those that would run beside the code, which can make them say what it likes, need `trusting`."""

    rule: ClassVar[str] = "code_tests"
    partial: bool = False
    trusting: bool = False

    async def __call__(self, episode: Episode) -> Reward:
        tests = episode.task.metadata.get("tests") or references(episode.task, self.rule)
        tests = [tests] if isinstance(tests, str) else list(tests)
        code = self.code_of(episode)
        if not code:
            return self.rewarded(0.0)
        passed = [await self._passes(episode, code, str(test)) for test in tests]
        return self.rewarded(sum(passed) / len(passed) if self.partial else all(passed))

    async def _passes(self, episode: Episode, code: str, test: str) -> bool:
        try:
            asserts = read_asserts(test)
        except ValueError as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error
        ask = through(episode, self.tool, "code")
        if asserts is not None:
            shown = "'[' + ', '.join(_found) + ']'"
            said = await value_after(ask, f"{code}\n\n{asserts.script}", shown, expected=asserts.size)
            return said is not None and asserts.hold(said)
        if not self.trusting:
            raise ValueError(
                f"task {episode.task.id}: the code could cheat the test {test.strip()[:60]!r}, which is not of the "
                "form assert f(2) == 4; write it so, use tool_verified with code_cases, or set trusting: true"
            )
        return await value_after(ask, f"{code}\n\n{test}", "''") is not None


def through(episode: Episode, tool: str, argument: str) -> Ask:
    """Return what calls the environment's tool. One that is not there is no fault of the model's."""

    async def ask(text: str) -> ToolResult:
        result = await episode.call(tool, **{argument: text})
        if result.error == "unknown":
            raise ToolFailure(f"the environment has no tool {tool!r}, which the reward needs")
        return result

    return ask


async def value_after(ask: Ask, code: str, shown: str, expected: int = 0) -> str | None:
    """Return the text that `shown` gives after the code, or None; raise where the tool has cut what may be right."""
    # Tells it from what the code prints itself: leaving early is not passing. The same code gets the same word again,
    # so that a recorded call is found; who finds it out gains nothing.
    word = digest(code)
    result = await ask(f"{code}\nprint('\\n' + {word!r} + {shown})\n")
    if _CUT.search(result.content) and expected * 2 > len(result.content):
        raise ValueError(
            "the tool has cut what the code gives, and the right value is too long as well, so they cannot be "
            "compared; raise the tool's max_output_chars, or ask for less"
        )
    found = [line for line in result.content.splitlines() if line.startswith(word)]
    return found[0].removeprefix(word) if result.ok and len(found) == 1 else None


_CUT = re.compile(r"\[\.\.\. \d+ (?:bytes|characters) cut \.\.\.\]")
