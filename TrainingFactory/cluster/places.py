"""Interfaces of a fleet's engines, which run in processes on this machine or in Ray actors."""

from __future__ import annotations

from typing import Any, Protocol


class EngineLost(Exception):
    """Raised when an engine's process or actor has ended, or the engine has failed; the fleet restarts it."""


class EngineHandle(Protocol):
    """One engine in another process."""

    @property
    def name(self) -> str:
        """Return a name that shows where the engine runs, such as "sampler 0 on node-a, process 4711"."""
        ...

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the `Engine`. Raise EngineLost if the engine can no longer be used, and ValueError if only
        this call is invalid. Cancelling the awaiting task cancels the call."""
        ...

    async def close(self) -> None:
        """End the engine and all processes it has started. Further calls do nothing."""
        ...


class EngineLauncher(Protocol):
    """Launcher that starts the engines of a fleet."""

    async def launch_engine(self, number: int) -> EngineHandle:
        """Start engine `number` and return when it is ready; raise ValueError if it cannot be started."""
        ...

    async def close(self) -> None: ...
