"""The cache in one episode: pure calls by their arguments, stateful ones by the calls before them as well."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from TrainingFactory.tools.calls import PendingCall, ToolState
from TrainingFactory.tools.fingerprint import call_name, digest
from TrainingFactory.types import ToolResult


class Results(Protocol):
    """Results by key; see `ToolCache`."""

    async def through(
        self, key: str, run: Callable[[], Awaitable[ToolResult]], deadline: float
    ) -> ToolResult: ...


class History:
    """A digest of the calls that a server has had in this episode, in order. Two episodes with equal histories share
    cached results."""

    def __init__(self, server: str, scope: str) -> None:
        # Servers begin alike for all; objects of this process, such as an environment, may be made from a task.
        self._digest: str | None = digest("start", server, "" if server else scope)  # None: lost
        self.busy = False  # a call is under way; another one now comes from inside it

    def key(self, name: str | None) -> str | None:
        """Return the key of a call that comes next; None where it must not be cached."""
        return None if name is None or self._digest is None else digest(self._digest, name)

    def add(self, name: str | None) -> None:
        """Note that the call was made, or answered from the cache."""
        self._digest = self.key(name)

    def lose(self) -> None:
        """Share nothing from here on: nobody knows what the server has done."""
        self._digest = None


class EpisodeHistory:
    """Answers the calls of one episode from the cache, or makes them."""

    def __init__(self, results: Results, scope: str) -> None:
        self._results, self._scope = results, scope
        self._histories: dict[str, History] = {}

    async def obtain(self, call: PendingCall) -> ToolResult:
        deadline = time.monotonic() + call.seconds
        name = call_name(call.tool, call.options, call.arguments)
        if not call.options.pure and call.state is not None and call.state.stateful:
            return await self._in_history(call, call.state, name, deadline)

        async def make() -> ToolResult:
            return (await call.make(call, deadline)).result

        key = name if call.options.pure else None
        return await self._through(key, call, make, deadline)

    async def _in_history(
        self, call: PendingCall, state: ToolState, name: str | None, deadline: float
    ) -> ToolResult:
        history = self._histories.setdefault(state.server, History(state.server, self._scope))
        outer, history.busy = history.busy, True
        if outer:
            history.lose()
        try:
            return await self._after(history, call, state, name, deadline)
        except BaseException:
            history.lose()
            raise
        finally:
            history.busy = outer

    async def _after(
        self, history: History, call: PendingCall, state: ToolState, name: str | None, deadline: float
    ) -> ToolResult:
        """Answer a call that depends on the calls before it, or that changes the answers after it."""
        lost = False

        async def make() -> ToolResult:
            nonlocal lost
            await state.catch_up()
            outcome = await call.make(call, deadline)
            lost = outcome.lost
            return outcome.result

        key = history.key(name) if call.options.stateful else None
        result = await self._through(key, call, make, deadline)
        if result.cached:
            state.skip(call, result.content)
        if lost:
            history.lose()
        elif result.error not in ("schema", "unavailable"):  # else the call never reached the tool
            # A failure may have reasons of its own, such as time: it is shared with those who failed alike.
            history.add(name if name is None or result.ok else digest(name, result.content))
        return result

    async def _through(
        self, key: str | None, call: PendingCall, make: Callable[[], Awaitable[ToolResult]], deadline: float
    ) -> ToolResult:
        if key is None:
            return await make()
        # The same call cut to another size is another entry.
        return await self._results.through(digest(key, str(call.max_output_chars)), make, deadline)
