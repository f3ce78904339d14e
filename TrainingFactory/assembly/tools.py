"""The tools of a run and their cache, from its config and from Python objects."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.assembly.remote_tools import HostedTools, RemoteTools
from TrainingFactory.common.texts import SECRET_VARIABLES, is_secret
from TrainingFactory.common.user_code import is_file_name, load_objects
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.protocols import EnvironmentFactory, Tool, ToolSession, ToolSource
from TrainingFactory.tools import ToolOptions
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.decorator import FunctionTool
from TrainingFactory.tools.making import make_tool
from TrainingFactory.tools.mcp_tools import MCPTools

ToolOrSource = Tool | ToolSource
# Maps offered tools (name -> server) to selected tools (name -> whether their calls may be cached).
ToolSelector = Callable[[Mapping[str, str]], dict[str, bool]]
SANDBOX = ("python", "code_interpreter")
VARIABLE_REFERENCE = re.compile(r"\$\{(\w+)\}")


def as_list(tools: Any) -> list[Any]:
    """Return `tools` as a list; it may be a single tool."""
    if isinstance(tools, ToolSource | Tool | str | Mapping) or not isinstance(tools, Iterable):
        return [tools]
    return list(tools)


def make_tools(
    config: TrainingConfig, user_tools: Sequence[Any] = (), environment: EnvironmentFactory | None = None
) -> list[ToolOrSource]:
    """Return the tools of the config and the `user_tools` objects; tool sources are not open yet. An entry that names a
    tool of the environment and sets no options adds nothing."""
    environment_tools = _list_environment_tools(environment)
    server_files: set[str] = set()
    remote_tools = RemoteTools(config.environment.num_workers)
    uses_ray = config.compute.backend == "ray"
    tools: list[ToolOrSource] = []
    for index, entry in enumerate(config.tools):
        location = f"tools.{index}"
        if entry.config is None:
            is_environment_tool = entry.name in environment_tools and not entry.options
            if is_environment_tool and entry.remote:
                raise ValueError(
                    f"{location}.remote: {entry.name} belongs to the environment, which runs in this process"
                )
            new_tools = [] if is_environment_tool else _load_tools(entry, location)
            # Only the sandbox is remote by default, because its state lasts no longer than an episode.
            if new_tools and uses_ray and (entry.remote or (entry.remote is None and entry.name in SANDBOX)):
                remote_tools.tool_entries.append(entry)
                remote_tools.tools += new_tools
                new_tools = [] if remote_tools in tools else [remote_tools]
            tools += new_tools
            continue
        if entry.remote:
            raise ValueError(f"{location}.remote: {entry.config} decides where its servers run; leave it out")
        if entry.options:
            raise ValueError(f"{location}.options are for built-in tools; set a server's in {entry.config}")
        if entry.config not in server_files:
            server_files.add(entry.config)
            tools += _load_server_tools(entry.config, config.tools)
    return [*tools, *map(as_tool, user_tools)]


def make_hosted_tools(entries: Sequence[Mapping[str, Any]]) -> Callable[..., Any]:
    """Make tools with the environment variables of this remote machine; return the function that answers calls."""
    uncached_entries = [ToolEntry(**entry).model_copy(update={"cache_enabled": False}) for entry in entries]
    return HostedTools([tool for entry in uncached_entries for tool in _load_tools(entry, entry.name)]).answer


def _list_environment_tools(environment: EnvironmentFactory | None) -> set[str]:
    """Return the names of an environment class's own tools."""
    if not inspect.isclass(environment):
        return set()
    members = (getattr(environment, name, None) for name in dir(environment))
    return {member.spec.name for member in members if isinstance(member, FunctionTool)}


def _load_tools(entry: ToolEntry, location: str) -> list[ToolOrSource]:
    """Return the tools of an entry: a built-in tool, a tool of an installed package, or those of a Python file."""
    if is_file_name(entry.name):
        if entry.options:
            raise ValueError(f"{location}.options are for built-in tools; {entry.name} is a Python file")
        tools = _load_file_tools(entry.name)
    else:
        try:
            tools = [make_tool({"name": entry.name, "options": fill_variables(entry.options, "options")})]
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
    if not entry.cache_enabled:
        return tools
    return [
        SelectedTools(tool, lambda names: dict.fromkeys(names, True))
        if isinstance(tool, ToolSource)
        else mark_cacheable(tool)
        for tool in tools
    ]


def _load_file_tools(file_name: str) -> list[ToolOrSource]:
    """Load all `@tool` functions of `mytools.py`, or the function `mytools.py:lookup`, which needs no decorator."""
    path, attribute, objects = load_objects("tool", file_name)
    if attribute:
        return [as_tool(objects[0])]
    tools: list[ToolOrSource] = [member for member in objects if isinstance(member, FunctionTool)]
    if not tools:
        raise ValueError(f"{path} defines no tool: put @tool (from TrainingFactory.tools) over a function")
    return tools


def _load_server_tools(path: str, tool_entries: Sequence[ToolEntry]) -> list[ToolOrSource]:
    """Return the tools of one MCP file: its built-in tools, and one source with the tools of all its servers that an
    entry of the config selects. The source opens one set of connections for all entries."""
    tool_servers = MCPTools.load_from_config(path)

    def select(offered_tools: Mapping[str, str]) -> dict[str, bool]:
        selection: dict[str, bool] = {}
        for index, entry in enumerate(tool_entries):
            if entry.config == path and entry.name not in tool_servers.named_tools:
                for name in choose_names(entry.name, offered_tools, f"tools.{index}", path):
                    selection[name] = entry.cache_enabled or selection.get(name, False)
        return selection

    servers = (
        [SelectedTools(MCPTools([*tool_servers.configs.values()]), select)] if tool_servers.configs else []
    )
    return [*tool_servers.named_tools.values(), *servers]


class SelectedTools:
    """Tool source restricted to the tools that `selector` selects when it opens."""

    def __init__(self, tool_source: ToolSource, selector: ToolSelector) -> None:
        self._source = tool_source
        self._selector = selector
        self._selection: dict[str, bool] = {}

    async def open(self) -> None:
        await self._source.open()
        session = self._source.session()
        offered_tools = {tool.spec.name: get_options(tool).server for tool in session.tools}
        await session.close()
        self._selection = self._selector(offered_tools)

    def session(self) -> ToolSession:
        return _SelectedSession(self._source.session(), self._selection)

    async def close(self) -> None:
        await self._source.close()


class _SelectedSession:
    def __init__(self, session: ToolSession, selection: Mapping[str, bool]) -> None:
        tools = [tool for tool in session.tools if tool.spec.name in selection]
        self.tools = [mark_cacheable(tool) if selection[tool.spec.name] else tool for tool in tools]
        self.close = session.close


def choose_names(entry_name: str, offered_tools: Mapping[str, str], location: str, path: str) -> set[str]:
    """Return the tools of a file that an entry selects: the tool of that name, else all tools of the server of that
    name. If the file has one server, any name selects all of its tools."""
    if entry_name in offered_tools:
        return {entry_name}
    server_tools = {tool_name for tool_name, server in offered_tools.items() if server == entry_name}
    servers = set(offered_tools.values())
    if server_tools or len(servers) == 1:
        return server_tools or set(offered_tools)
    raise ValueError(
        f"{location}.name is {entry_name!r}, but {path} has no tool or server of that name; its servers: "
        f"{', '.join(sorted(servers)) or 'none'}; its tools: {', '.join(sorted(offered_tools)) or 'none'}"
    )


class _CacheableTool:
    """Tool that the config marks as cacheable."""

    def __init__(self, tool: Tool, options: ToolOptions) -> None:
        self.spec, self.run, self.options = tool.spec, tool.run, options
        self.__wrapped__ = tool  # the cache fingerprints the wrapped tool
        if until_ready := getattr(tool, "until_ready", None):
            self.until_ready = until_ready


def mark_cacheable(tool: Tool) -> Tool:
    """Mark a tool as pure, unless it declares itself pure or stateful. An ordered tool is marked as stateful, because
    the preceding calls may change its results and must be part of the cache key."""
    options = get_options(tool)
    if options.pure or options.stateful:
        return tool
    mark_options = {"stateful": True} if options.ordered else {"pure": True}
    return _CacheableTool(tool, dataclasses.replace(options, **mark_options))


def get_options(tool: Tool) -> ToolOptions:
    return getattr(tool, "options", ToolOptions())  # a foreign tool need not have any


def make_tool_cache(config: TrainingConfig) -> ToolCache | None:
    """Return the tool cache that all runs of the output folder share; None if neither optimization.tool_cache nor an
    entry's cache_enabled turns it on. It serves all tools marked pure or stateful."""
    cache_setting = config.optimization.tool_cache
    if not cache_setting and not any(entry.cache_enabled for entry in config.tools):
        return None
    if isinstance(cache_setting, str) and cache_setting:
        cache_path = _fill_value("tool_cache", cache_setting, "optimization.tool_cache")
        return ToolCache(os.path.expanduser(cache_path))
    folder = Path(config.logging.output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return ToolCache(folder / "tool_cache.sqlite")


def fill_variables(options: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Replace ${NAME} in options by the value of the environment variable. Secrets must be written as ${NAME}, because
    the run folder stores the config."""
    return {key: _fill_value(key, value, f"{location}.{key}") for key, value in options.items()}


def _fill_value(key: str, value: Any, location: str) -> Any:
    if isinstance(value, Mapping):
        return fill_variables(value, location)
    if isinstance(value, list):
        return [_fill_value(key, element, location) for element in value]
    if not isinstance(value, str):
        return value
    # A key that ends in _env holds the name of a variable.
    if is_secret(key, value) and not key.endswith("_env") and not VARIABLE_REFERENCE.search(value):
        raise ValueError(
            f"{location} holds a secret, and the run folder stores the config; put it into an environment variable and "
            f"write {key}: ${{NAME}}"
        )
    if is_secret(key, value):
        SECRET_VARIABLES.update(VARIABLE_REFERENCE.findall(value))
    try:
        return VARIABLE_REFERENCE.sub(lambda match: os.environ[match[1]], value)
    except KeyError as error:
        raise ValueError(f"{location}: the environment variable {error.args[0]} is not set") from None
