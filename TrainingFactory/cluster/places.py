"""Where engines of a fleet live: in a process of this machine, or in a Ray actor."""

from __future__ import annotations

from typing import Any, Protocol


class PlaceLost(Exception):
    """The process or actor is gone, or the engine in it is of no use any more: it is left out and made anew."""


class Place(Protocol):
    """One engine elsewhere."""

    @property
    def name(self) -> str:
        """Return what a user can look for: sampler 0 on node-a, process 4711."""
        ...

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of its `Engine`. Raise PlaceLost where the engine cannot be used any more, and what the engine
        raised (as ValueError) where only this call was wrong. Cancelling the awaiting task cancels the call."""
        ...

    async def close(self) -> None:
        """End it, with everything that it has started; again does nothing."""
        ...


class Places(Protocol):
    """Makes places."""

    async def make(self, number: int) -> Place:
        """Start engine `number` and return when it is ready; raise ValueError where it cannot be."""
        ...

    async def close(self) -> None: ...
