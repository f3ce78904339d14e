"""What the cache knows a call by, and what one episode has done to a server whose answers depend on it."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from TrainingFactory.protocols import Tool
from TrainingFactory.tools.limits import Gate
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.runtime import Outcome
from TrainingFactory.types import ToolFailure

log = logging.getLogger(__name__)
_FORMAT = "1"  # of the keys; a new one makes all that is cached old
_texts: dict[int, tuple[Any, str]] = {}
_inside: ContextVar[tuple[Group, ...]] = ContextVar("groups whose turn the running code has", default=())


def call_name(tool: Tool, options: ToolOptions, arguments: dict[str, Any]) -> str | None:
    """A call, whoever makes it: server, tool, version, schema and arguments. The order of keys does not matter;
    1, 1.0 and true differ, and so do a default that is written out and one that is not. None for arguments that
    are no JSON, which only Python code can make."""
    try:
        text = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return None
    schema = _text_of(tool.spec.parameters, lambda schema: json.dumps(schema, sort_keys=True, default=str))
    answering: Any = inspect.unwrap(tool)  # type: ignore[arg-type]  # a function, or an object with `run`
    code = _text_of(_code_of(answering) or _code_of(getattr(answering, "run", None)), _source)
    return digest(options.server, tool.spec.name, options.version, schema, code, text)


def definition(thing: Any) -> str:
    """For `version`: an object by the text of its methods and by its plain attributes; of others the type counts."""
    cls, attributes = type(thing), dict[str, Any]()
    for base in reversed(cls.__mro__):
        attributes |= {name: value for name, value in vars(base).items() if name != "__dict__"}
    methods = {name: _source(_code_of(value)) for name, value in attributes.items() if _code_of(value)}
    attributes |= getattr(thing, "__dict__", {})
    plain = {name: value for name, value in attributes.items() if not name.startswith("__")} | methods
    try:
        text = json.dumps(plain, sort_keys=True, default=lambda value: type(value).__qualname__)
    except (TypeError, ValueError, RecursionError):
        text = ""
    return digest(cls.__module__, cls.__qualname__, text)


def digest(*parts: str) -> str:
    """One name for several texts; no two lists of texts share one."""
    return hashlib.blake2b(json.dumps([_FORMAT, *parts]).encode(), digest_size=20).hexdigest()


def _text_of(thing: Any, make: Callable[[Any], str]) -> str:
    """Kept by identity: every episode has the same schemas and functions."""
    known = _texts.get(id(thing))
    if known is None or known[0] is not thing:  # an id may be used again
        if len(_texts) > 1000:
            _texts.clear()
        known = _texts[id(thing)] = (thing, make(thing))
    return known[1]


def _code_of(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _source(code: Any) -> str:
    """The text of a function: who changes it does not want the old results. What it calls is not seen; that is
    what `version` is for. Always by its code: Python would parse the whole file for a class."""
    try:
        return "" if code is None else inspect.getsource(code)
    except (OSError, TypeError):
        return ""


class Skipped(NamedTuple):
    """A call that was answered from the cache, so that the server of this episode has not seen it."""

    tool: str
    content: str
    make: Callable[[], Awaitable[Outcome]]


class Group:
    """Tools of one executor that share state: those of a server, or those of this process that say so. Their calls
    run one after another, as the model wrote them.

    The history is a digest of the calls so far, in order. Two episodes with equal histories share cached results.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.stateful = False  # whether any of its tools is
        self._turn = Gate(1)
        self._history: str | None = digest("start", server)  # None: lost
        self._skipped: list[Skipped] = []

    def start(self, scope: str) -> None:
        """`scope` is what the state begins with. Servers begin alike for all; objects of this process, such as an
        environment, may have been made from a task."""
        self._history = digest("start", self.server, "" if self.server else scope)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """First come, first served. A tool that calls tools of its own group does not wait for itself."""
        outer = _inside.get()
        if self in outer:
            self.lose()
            yield
            return
        async with self._turn:
            token = _inside.set((*outer, self))
            try:
                yield
            finally:
                _inside.reset(token)

    def key(self, name: str | None) -> str | None:
        """The key of a call that comes next; None where it must not be cached."""
        return None if name is None or self._history is None else digest(self._history, name)

    def add(self, name: str | None) -> None:
        """The call was made, or answered from the cache."""
        self._history = self.key(name)

    def skip(self, call: Skipped) -> None:
        self._skipped.append(call)

    def lose(self) -> None:
        """Nobody knows what the server has done, so nothing is shared from here on."""
        self._history = None

    async def catch_up(self) -> None:
        """Make the calls that the cache has answered, in order, so that the server is where the model thinks."""
        while self._skipped:
            call = self._skipped[0]
            outcome = await call.make()
            if outcome.lost or outcome.result.error == "unavailable":
                raise ToolFailure(
                    f"{call.tool} was answered from the cache, and {self.server or 'its tool'} cannot be brought to "
                    f"that state: {outcome.result.content}"
                )
            del self._skipped[0]
            if outcome.result.content != call.content:
                log.warning(
                    "%s is marked stateful, but after equal calls it answered differently; the cache and training "
                    "on it are not reliable",
                    call.tool,
                )
