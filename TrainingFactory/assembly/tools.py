"""Make the tools of a run, and their cache, from what its config and its caller name."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.assembly.remote_tools import Hosted, RemoteTools
from TrainingFactory.common.texts import SECRET_VARIABLES, is_secret
from TrainingFactory.common.user_code import chosen, is_file_name
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.protocols import EnvironmentFactory, Tool, ToolSession, ToolSource
from TrainingFactory.tools import ToolOptions
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.decorator import FunctionTool
from TrainingFactory.tools.making import make_tool
from TrainingFactory.tools.mcp_tools import MCPTools

Handed = Tool | ToolSource
# From the names of the tools on offer, each with that of its server, to the names of those that are taken, and whether
# their repeated calls may be answered from the cache.
Choice = Callable[[Mapping[str, str]], dict[str, bool]]
SANDBOX = ("python", "code_interpreter")
VARIABLE = re.compile(r"\$\{(\w+)\}")


def listed(tools: Any) -> list[Any]:
    """Return what `tools=` was given as a list: several, or a single one."""
    if isinstance(tools, ToolSource | Tool | str | Mapping) or not isinstance(tools, Iterable):
        return [tools]
    return list(tools)


def make_tools(
    config: TrainingConfig, given: Sequence[Any] = (), environment: EnvironmentFactory | None = None
) -> list[Handed]:
    """Return the tools of the config and those given as objects; sources are not open yet. An entry that only names a
    tool which the environment brings itself adds nothing."""
    own, files = _own_tools(environment), set[str]()
    remote, on_ray = RemoteTools(config.environment.num_workers), config.compute.backend == "ray"
    made: list[Handed] = []
    for number, entry in enumerate(config.tools):
        where = f"tools.{number}"
        if entry.config is None:
            brought = entry.name in own and not entry.options
            if brought and entry.remote:
                raise ValueError(f"{where}.remote: {entry.name} is the environment's own, which runs here")
            tools = [] if brought else _tools_of(entry, where)
            # By default the sandbox: it has no state but that of an episode.
            if tools and on_ray and (entry.remote or (entry.remote is None and entry.name in SANDBOX)):
                remote.entries.append(entry)
                remote.tools += tools
                tools = [] if remote in made else [remote]
            made += tools
            continue
        if entry.remote:
            raise ValueError(f"{where}.remote: servers run where {entry.config} says, here or at their url")
        if entry.options:
            raise ValueError(f"{where}.options are for built-in tools; a server's stand in {entry.config}")
        if entry.config not in files:
            files.add(entry.config)
            made += _from_servers(entry.config, config.tools)
    return [*made, *map(as_tool, given)]


def tools_there(entries: Sequence[Mapping[str, Any]]) -> Callable[..., Any]:
    """Make tools on another machine, with its own environment variables; return what answers calls."""
    plain = [ToolEntry(**entry).model_copy(update={"cache_enabled": False}) for entry in entries]
    return Hosted([tool for entry in plain for tool in _tools_of(entry, entry.name)]).answer


def _own_tools(environment: EnvironmentFactory | None) -> set[str]:
    """Return the names of the tools that an environment class brings itself."""
    if not inspect.isclass(environment):
        return set()
    members = (getattr(environment, name, None) for name in dir(environment))
    return {member.spec.name for member in members if isinstance(member, FunctionTool)}


def _tools_of(entry: ToolEntry, where: str) -> list[Handed]:
    """Return a built-in tool, one of an installed package, or those of a Python file."""
    if is_file_name(entry.name):
        if entry.options:
            raise ValueError(f"{where}.options are for built-in tools; {entry.name} is a Python file")
        made = _from_file(entry.name)
    else:
        try:
            made = [make_tool({"name": entry.name, "options": filled_in(entry.options, "options")})]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not entry.cache_enabled:
        return made
    return [
        Chosen(tool, lambda offered: dict.fromkeys(offered, True))
        if isinstance(tool, ToolSource)
        else cacheable(tool)
        for tool in made
    ]


def _from_file(name: str) -> list[Handed]:
    """Return all `@tool` functions of `mytools.py`, or what `mytools.py:lookup` names: it may be a plain function."""
    path, wanted, found = chosen("tool", name)
    if wanted:
        return [as_tool(found[0])]
    tools: list[Handed] = [value for value in found if isinstance(value, FunctionTool)]
    if not tools:
        raise ValueError(f"{path} defines no tool: put @tool (from TrainingFactory.tools) over a function")
    return tools


def _from_servers(path: str, entries: Sequence[ToolEntry]) -> list[Handed]:
    """Return what all entries with this file want of it, over one set of connections, and the tools that it names."""
    loaded = MCPTools.load_from_config(path)

    def choose(offered: Mapping[str, str]) -> dict[str, bool]:
        taken: dict[str, bool] = {}
        for number, entry in enumerate(entries):
            if entry.config == path and entry.name not in loaded.named:
                for name in choose_names(entry.name, offered, f"tools.{number}", path):
                    taken[name] = entry.cache_enabled or taken.get(name, False)
        return taken

    servers = [Chosen(MCPTools([*loaded.configs.values()]), choose)] if loaded.configs else []
    return [*loaded.named.values(), *servers]


class Chosen:
    """A source of which only some tools are taken, as `choose` says once they are known."""

    def __init__(self, source: ToolSource, choose: Choice) -> None:
        self._source, self._choose = source, choose
        self._taken: dict[str, bool] = {}

    async def open(self) -> None:
        await self._source.open()
        session = self._source.session()
        offered = {tool.spec.name: options_of(tool).server for tool in session.tools}
        await session.close()
        self._taken = self._choose(offered)

    def session(self) -> ToolSession:
        return _ChosenSession(self._source.session(), self._taken)

    async def close(self) -> None:
        await self._source.close()


class _ChosenSession:
    def __init__(self, session: ToolSession, taken: Mapping[str, bool]) -> None:
        tools = [tool for tool in session.tools if tool.spec.name in taken]
        self.tools = [cacheable(tool) if taken[tool.spec.name] else tool for tool in tools]
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
    return getattr(tool, "options", ToolOptions())  # a foreign tool need not have any


def make_tool_cache(config: TrainingConfig) -> ToolCache | None:
    """Return one for all runs of the folder. It is on for all tools that are marked pure or stateful as soon as
    anybody asks for it; an entry that does also marks its own tools."""
    wanted = config.optimization.tool_cache
    if not wanted and not any(entry.cache_enabled for entry in config.tools):
        return None
    if isinstance(wanted, str) and wanted:
        target = _filled("tool_cache", wanted, "optimization.tool_cache")
        return ToolCache(os.path.expanduser(target))
    folder = Path(config.logging.output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return ToolCache(folder / "tool_cache.sqlite")


def filled_in(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return options with ${NAME} from the environment. Secrets must come that way: the config is kept with the
    run."""
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
    if is_secret(key, value):
        SECRET_VARIABLES.update(VARIABLE.findall(value))
    try:
        return VARIABLE.sub(lambda found: os.environ[found[1]], value)
    except KeyError as error:
        raise ValueError(f"{where}: the environment variable {error.args[0]} is not set") from None
