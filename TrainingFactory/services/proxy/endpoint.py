"""Where the programs of all episodes call: one address on this machine, and a key for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

from TrainingFactory.http import listen
from TrainingFactory.http.api import Api, Handler
from TrainingFactory.services.proxy.calls import Calls

ANEW = ("rewritten", "arguments", "tools", "cut", "template")  # why a history was written anew
COUNTS = ("turns", "rows", *ANEW, "aborted", "malformed", "refused", "ignored", "unknown_key")


class Endpoint:
    """Knows the episodes that are open, by their keys. A request with any other key reaches nobody."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.open_calls: dict[str, Calls] = {}
        self.base_url = ""
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    def api(self, token: str | None = None, local: bool = True) -> Api:
        """Make the pages that a client of an episode sees."""
        api = Api(token, local)
        api.post_by_key("/v1/chat/completions", lambda key: self._found(key, "chat"))
        api.post_by_key("/v1/reward", lambda key: self._found(key, "reward"))
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "trainingfactory"}
        api.get("/v1/models", lambda: {"object": "list", "data": [model]}, keyed=False)
        return api

    async def open(self) -> None:
        """Listen on a free port of this machine; again does nothing."""
        if self._serving is None:
            bound = listen.bind("127.0.0.1", 0)
            self.base_url = f"{listen.address_of(bound)}/v1"
            self._server = listen.make_server(self.api().app, inside=True)
            self._serving = asyncio.create_task(self._server.serve([bound]))

    async def close(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.should_exit = True
            await serving

    @contextlib.contextmanager
    def admitted(self, calls: Calls, key: str | None = None) -> Iterator[str]:
        """Give the episode a key for as long."""
        key = key or f"tf-{secrets.token_urlsafe(32)}"
        self.open_calls[key] = calls
        try:
            yield key
        finally:
            del self.open_calls[key]

    def metrics(self) -> dict[str, float]:
        """Return the counts since the last time. `extended` is the share of the turns with a history whose tokens go on
        from those that were sampled."""
        counts, share = self.counts.copy(), {}
        self.counts.clear()
        if history := counts["extended"] + sum(counts[why] for why in ANEW):
            share = {"proxy/extended": counts["extended"] / history}
        return share | {f"proxy/{name}": float(counts[name]) for name in COUNTS}

    def _found(self, key: str, what: str) -> Handler | None:
        if (calls := self.open_calls.get(key)) is None:
            self.counts["unknown_key"] += 1
            return None
        return calls.chat if what == "chat" else calls.reward
