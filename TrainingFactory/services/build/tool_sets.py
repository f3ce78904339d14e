"""The tools that are handed to a run: made from config entries and Python objects, restricted, closed at the end."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.options import is_secret
from TrainingFactory.protocols import EnvironmentFactory, Tool, ToolSession, ToolSource
from TrainingFactory.running import run
from TrainingFactory.tools import AsyncToolExecutor, FunctionTool, ToolOptions
from TrainingFactory.types import Task, ToolResult, ToolSpec

Handed = Tool | ToolSource
DEFAULT_OPTIONS = ToolOptions()
VARIABLE = re.compile(r"\$\{(\w+)\}")


class ToolSet:
    """`made` were made for the run and are closed with it. `given` are objects of the caller's, who may use them in
    the next run as well."""

    def __init__(self, made: Iterable[Handed] = (), given: Iterable[Handed] = ()) -> None:
        self.made, self.given = list(made), list(given)

    @property
    def tools(self) -> list[Handed]:
        return [*self.made, *self.given]

    def specs(self) -> list[ToolSpec]:
        """What the model will be told about them."""
        return [tool.spec for tool in self._of_an_episode()]

    def offered(self) -> dict[str, str]:
        """The names of the tools, each with the name of its server."""
        return {tool.spec.name: options_of(tool).server for tool in self._of_an_episode()}

    def _of_an_episode(self) -> list[Tool]:
        executor = AsyncToolExecutor(self.tools)
        run(executor.close)
        return executor.tools

    def close(self) -> None:
        """Ends servers and processes; again does nothing."""
        made, self.made = self.made, []
        for handed in made:
            if isinstance(handed, ToolSource):
                handed.close()


class Chosen:
    """A source of which only some tools are taken; `cached` names those whose repeated calls may be answered from
    the cache. None stands for all."""

    def __init__(
        self, source: ToolSource, names: Collection[str] | None, cached: Collection[str] | None = ()
    ) -> None:
        self._source, self._names, self._cached = source, names, cached

    def session(self) -> ToolSession:
        return _ChosenSession(self._source.session(), self._names, self._cached)

    def close(self) -> None:
        self._source.close()


class _ChosenSession:
    def __init__(
        self, session: ToolSession, names: Collection[str] | None, cached: Collection[str] | None
    ) -> None:
        self._session = session
        taken = [tool for tool in session.tools if names is None or tool.spec.name in names]
        self.tools = [
            cacheable(tool) if cached is None or tool.spec.name in cached else tool for tool in taken
        ]

    async def close(self) -> None:
        await self._session.close()


class _Cacheable:
    """A tool that the config calls cacheable."""

    def __init__(self, tool: Tool, options: ToolOptions) -> None:
        self._tool, self.spec, self.options = tool, tool.spec, options
        self.__wrapped__ = tool  # the cache has to see who answers
        if ready := getattr(tool, "until_ready", None):
            self.until_ready = ready

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await self._tool.run(arguments)


def cacheable(tool: Tool) -> Tool:
    """The tool, marked pure unless it says itself how it may be cached. One that takes its calls in order has a
    state, so its answers are known by the calls before them, never by their arguments alone."""
    options = options_of(tool)
    if options.pure or options.stateful:
        return tool
    kind = {"stateful": True} if options.ordered else {"pure": True}
    return _Cacheable(tool, dataclasses.replace(options, **kind))


def options_of(tool: Tool) -> ToolOptions:
    return getattr(tool, "options", DEFAULT_OPTIONS)  # a foreign tool need not have any


def listed(tools: Any) -> list[Any]:
    """What `tools=` takes: several, or a single one."""
    if isinstance(tools, ToolSource | Tool | str | Mapping) or not isinstance(tools, Iterable):
        return [tools]
    return list(tools)


def chosen_names(name: str, offered: Mapping[str, str], where: str, path: str) -> set[str]:
    """Which tools of a file an entry means: the tool of that name, else all of the server of that name; where the
    file has one server only, the name is a label for all of its tools."""
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


def filled_in(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options with ${NAME} from the environment. Secrets must come that way: the config is kept with the run."""
    return {key: _filled(key, value, f"{where}.{key}") for key, value in options.items()}


def _filled(key: str, value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return filled_in(value, where)
    if isinstance(value, list):
        return [_filled(key, item, where) for item in value]
    if not isinstance(value, str):
        return value
    # What ends in _env names a variable.
    if is_secret(key, value) and not key.endswith("_env") and not VARIABLE.search(value):
        raise ValueError(
            f"{where} holds a secret, and the config is kept with the run; put it into an environment variable "
            f"and write {key}: ${{NAME}}"
        )
    return VARIABLE.sub(lambda found: _variable(found[1], where), value)


def _variable(name: str, where: str) -> str:
    if name not in os.environ:
        raise ValueError(f"{where}: the environment variable {name} is not set")
    return os.environ[name]


def own_tools(environment: EnvironmentFactory | None) -> set[str]:
    """The names of the tools that an environment class brings itself."""
    if not inspect.isclass(environment):
        return set()
    members = (getattr(environment, name, None) for name in dir(environment))
    return {member.spec.name for member in members if isinstance(member, FunctionTool)}


def with_tools(environment: Any, tools: Sequence[Handed], system_prompt: str | None = None) -> Any:
    """The environment with tools and a system prompt of the config's; without either, as it is."""
    if not tools and system_prompt is None:
        return environment
    name = getattr(environment, "__name__", type(environment).__name__)
    if not inspect.isclass(environment) or not issubclass(environment, ToolEnvironment):
        what = "tools" if tools else "environment.system_prompt"
        raise ValueError(f"{what} can be given to a class that inherits from ToolEnvironment; {name} is none")
    if tools and not _takes_tools(environment):
        raise ValueError(
            f"{name} takes no tools: its __init__ needs a parameter `tools` that it hands on, as in "
            "def __init__(self, task, tools=()): super().__init__(task, tools)"
        )
    given: Callable[..., None] = environment.__init__
    more = {"tools": list(tools)} if tools else {}

    class Equipped(environment):
        def __init__(self, task: Task) -> None:
            given(self, task, **more)

    Equipped.__name__ = Equipped.__qualname__ = name
    if system_prompt is not None:
        Equipped.system_prompt = system_prompt
    return Equipped


def _takes_tools(environment: type) -> bool:
    parameters = inspect.signature(environment).parameters.values()
    return any(
        parameter.name == "tools" or parameter.kind == parameter.VAR_KEYWORD for parameter in parameters
    )
