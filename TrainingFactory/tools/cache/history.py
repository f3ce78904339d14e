"""The cache in one episode: pure calls by their arguments, stateful ones by the calls before them as well."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from TrainingFactory.tools.fingerprint import call_name, digest
from TrainingFactory.tools.protocols import PendingCall, SharedState
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

    def __init__(self, results: Results, scope: str, max_output_chars: int) -> None:
        self._results, self._scope, self._size = results, scope, str(max_output_chars)
        self._histories: dict[str, History] = {}

    async def obtain(self, call: PendingCall) -> ToolResult:
        deadline = time.monotonic() + call.seconds
        if call.options.pure:
            name = call_name(call.tool, call.options, call.arguments)

            async def make() -> ToolResult:
                return (await call.make(deadline)).result

            return await make() if name is None else await self._through(name, make, deadline)
        if call.state is None or not call.state.stateful:
            return (await call.make(deadline)).result
        history = self._histories.get(call.state.server)
        if history is None:
            history = self._histories[call.state.server] = History(call.state.server, self._scope)
        outer, history.busy = history.busy, True
        if outer:
            history.lose()
        try:
            return await self._after(history, call, call.state, deadline)
        except BaseException:
            history.lose()
            raise
        finally:
            history.busy = outer

    async def _after(
        self, history: History, call: PendingCall, state: SharedState, deadline: float
    ) -> ToolResult:
        """Answer a call that depends on the calls before it, or that changes the answers after it."""
        name = call_name(call.tool, call.options, call.arguments)
        key = history.key(name) if call.options.stateful else None
        lost = False

        async def make() -> ToolResult:
            nonlocal lost
            await state.catch_up()
            outcome = await call.make(deadline)
            lost = outcome.lost
            return outcome.result

        result = await make() if key is None else await self._through(key, make, deadline)
        if result.cached:
            state.skip(call, result.content)
        if lost:
            history.lose()
        elif result.error not in ("schema", "unavailable"):  # else the call never reached the tool
            # A failure may have reasons of its own, such as time: it is shared with those who failed alike.
            history.add(name if name is None or result.ok else digest(name, result.content))
        return result

    async def _through(
        self, key: str, make: Callable[[], Awaitable[ToolResult]], deadline: float
    ) -> ToolResult:
        """The same call cut to another size is another entry of the cache."""
        return await self._results.through(digest(key, self._size), make, deadline)
