"""Tools as the entries of a config want them: some of a source, or cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from TrainingFactory.protocols import Tool, ToolSession, ToolSource
from TrainingFactory.tools import ToolOptions

DEFAULT_OPTIONS = ToolOptions()
# From the names of the tools on offer, each with that of its server, to the names of those that are taken and of those
# whose repeated calls may be answered from the cache.
Choice = Callable[[Mapping[str, str]], tuple[set[str], set[str]]]


class Chosen:
    """A source of which only some tools are taken, as `choose` says once they are known."""

    def __init__(self, source: ToolSource, choose: Choice) -> None:
        self._source, self._choose = source, choose
        self._taken, self._cached = set[str](), set[str]()

    async def open(self) -> None:
        await self._source.open()
        session = self._source.session()
        offered = {tool.spec.name: options_of(tool).server for tool in session.tools}
        await session.close()
        self._taken, self._cached = self._choose(offered)

    def session(self) -> ToolSession:
        return _ChosenSession(self._source.session(), self._taken, self._cached)

    async def close(self) -> None:
        await self._source.close()


class _ChosenSession:
    def __init__(self, session: ToolSession, taken: set[str], cached: set[str]) -> None:
        self.tools = [
            cacheable(tool) if tool.spec.name in cached else tool
            for tool in session.tools
            if tool.spec.name in taken
        ]
        self.close = session.close


def choose_names(name: str, offered: Mapping[str, str], where: str, path: str) -> set[str]:
    """Return which tools of a file an entry means: the tool of that name, else all of the server of that name; where
    the file has one server only, the name is a label for all of its tools."""
    if name in offered:
        return {name}
    of_server = {tool for tool, server in offered.items() if server == name}
    servers = set(offered.values())
    if of_server or len(servers) == 1:
        return of_server or set(offered)
    raise ValueError(
        f"{where}.name is {name!r}, and {path} has neither a tool nor a server of that name; its servers: "
        f"{', '.join(sorted(servers)) or 'none'}; its tools: {', '.join(sorted(offered)) or 'none'}"
    )


class _Cacheable:
    """A tool that the config calls cacheable."""

    def __init__(self, tool: Tool, options: ToolOptions) -> None:
        self.spec, self.run, self.options = tool.spec, tool.run, options
        self.__wrapped__ = tool  # the cache has to see who answers
        if ready := getattr(tool, "until_ready", None):
            self.until_ready = ready


def cacheable(tool: Tool) -> Tool:
    """Return the tool marked pure, unless it says itself how it may be cached. One that takes its calls in order has a
    state, so its answers are known by the calls before them, never by their arguments alone."""
    options = options_of(tool)
    if options.pure or options.stateful:
        return tool
    kind = {"stateful": True} if options.ordered else {"pure": True}
    return _Cacheable(tool, dataclasses.replace(options, **kind))


def options_of(tool: Tool) -> ToolOptions:
    return getattr(tool, "options", DEFAULT_OPTIONS)  # a foreign tool need not have any
