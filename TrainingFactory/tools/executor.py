"""One executor runs every call: checked, bounded in time and size, answered in call order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import logging
import time
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator

from TrainingFactory.protocols import Tool, ToolSession, ToolSource
from TrainingFactory.tools.decorator import as_result
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import schema_problems
from TrainingFactory.tools.waiting import OutOfTime, within
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult

log = logging.getLogger(__name__)
MAX_ERROR_CHARS = 300
MAX_NAMES = 10
DEFAULT_OPTIONS = ToolOptions()
_VALIDATORS: dict[int, Draft202012Validator] = {}


class AsyncToolExecutor:
    """Runs the calls of one turn at the same time. A call that fails is a result that the model reads; only
    `ToolFailure` (the tools are gone) is raised."""

    def __init__(
        self, tools: Sequence[Tool | ToolSource], timeout: float = 30.0, max_output_chars: int = 100_000
    ) -> None:
        if timeout <= 0 or max_output_chars < 1:
            raise ValueError(f"timeout ({timeout}) and max_output_chars ({max_output_chars}) must be over 0")
        self.timeout = timeout
        self.max_output_chars = max_output_chars
        self.tools: list[Tool] = []
        self._sessions: list[ToolSession] = []
        for given in tools:
            if isinstance(given, ToolSource):
                self._sessions.append(given.session())
                self.tools += self._sessions[-1].tools
            else:
                self.tools.append(given)
        self._tools = {tool.spec.name: tool for tool in self.tools}
        if len(self._tools) < len(self.tools):
            names = [tool.spec.name for tool in self.tools]
            twice = ", ".join(sorted({name for name in names if names.count(name) > 1}))
            raise ValueError(f"two tools have the same name: {twice}; rename one with @tool(name=...)")

    async def close(self) -> None:
        """Close the sessions of this episode; again does nothing."""
        sessions, self._sessions = self._sessions, []
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)

    async def batch_execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        in_turn = asyncio.Lock()  # first come, first served: ordered calls run in call order
        # Exceptions are collected, so that a ToolFailure of one call leaves no other call running unseen.
        running = (self._execute(call, in_turn) for call in calls)
        results = await asyncio.gather(*running, return_exceptions=True)
        finished = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            finished.append(result)
        return finished

    async def _execute(self, call: ToolCall, in_turn: asyncio.Lock) -> ToolResult:
        if call.error is not None:
            return ToolResult(call.error, ok=False, error="malformed")
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(self._unknown(call.name), ok=False, error="unknown")
        options: ToolOptions = getattr(tool, "options", DEFAULT_OPTIONS)  # a foreign tool need not have any
        async with in_turn if options.ordered else contextlib.nullcontext():
            started = time.perf_counter()
            result = await self._run(tool, call.arguments, options.timeout or self.timeout)
            seconds = time.perf_counter() - started
        return dataclasses.replace(result, content=self._bounded(result.content), seconds=seconds)

    async def _run(self, tool: Tool, arguments: dict[str, Any], timeout: float) -> ToolResult:
        name = tool.spec.name
        try:
            return await within(timeout, self._attempt(tool, arguments))
        except ToolFailure:
            raise
        except OutOfTime:
            log.info("tool %s was given up after %g s", name, timeout)
            text = f"{name} took longer than {timeout:g} s and was stopped"
            return ToolResult(text, ok=False, error="timeout")
        except Exception as error:
            log.info("tool %s failed", name, exc_info=True)
            return ToolResult(f"{name} failed: {describe(error)}", ok=False, error="exception")

    async def _attempt(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        """Check and call. What a call passes through besides (limits, retries, a cache) belongs here."""
        problems = schema_problems(tool.spec, _validator(tool.spec.parameters), arguments)
        if problems is not None:
            return ToolResult(problems, ok=False, error="schema")
        try:
            return as_result(await tool.run(arguments))
        except SystemExit as error:
            raise RuntimeError("it tried to end the program") from error

    def _unknown(self, name: str) -> str:
        if not self._tools:
            return "There are no tools here; answer in plain text."
        near = difflib.get_close_matches(name[:100], self._tools, n=MAX_NAMES, cutoff=0.0)
        return f"There is no tool named {name[:60]!r}. The tools are: {', '.join(near)}."

    def _bounded(self, text: str) -> str:
        """Cut, so that no later step has to handle a text of absurd size, and made valid Unicode."""
        if len(text) > self.max_output_chars:
            head = self.max_output_chars * 3 // 4
            tail = self.max_output_chars - head
            cut = len(text) - head - tail
            text = f"{text[:head]}\n[... {cut} characters cut ...]\n{text[len(text) - tail :]}"
        return valid_text(text)


def _validator(schema: dict[str, Any]) -> Draft202012Validator:
    """Kept by the identity of the schema: every episode has an executor of its own over the same tools."""
    known = _VALIDATORS.get(id(schema))
    if known is None or known.schema is not schema:  # an id may be used again
        if len(_VALIDATORS) > 1000:
            _VALIDATORS.clear()
        known = _VALIDATORS[id(schema)] = Draft202012Validator(schema)
    return known


def valid_text(text: str) -> str:
    """Without lone surrogates, which Python strings may hold and tokenizers refuse."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def describe(error: BaseException) -> str:
    """An exception in one short line."""
    try:
        text = str(error)
    except Exception:  # the exception's own code is foreign too
        text = ""
    text = " ".join(text.split())[:MAX_ERROR_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
