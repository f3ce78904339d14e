"""Makes the tools of a run, and their cache, from what its config and its caller name."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.options import is_secret
from TrainingFactory.protocols import EnvironmentFactory, Tool, ToolSource
from TrainingFactory.services.build.chosen_tools import Chosen, cacheable, choose_names
from TrainingFactory.services.build.user_code import tools_from_file
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.builtin.making import make_tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.decorator import FunctionTool
from TrainingFactory.tools.mcp_tools import MCPTools
from TrainingFactory.user_code import is_file_name

Handed = Tool | ToolSource
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
    made: list[Handed] = []
    for number, entry in enumerate(config.tools):
        where = f"tools.{number}"
        if entry.config is None:
            if entry.options or entry.name not in own:
                made += _tools_of(entry, where)
            continue
        if entry.options:
            raise ValueError(f"{where}.options are for built-in tools; a server's stand in {entry.config}")
        if entry.config not in files:
            files.add(entry.config)
            made.append(_from_servers(entry.config, config.tools))
    return [*made, *map(as_tool, given)]


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
        made = tools_from_file(entry.name)
    else:
        try:
            made = [make_tool({"name": entry.name, "options": filled_in(entry.options, "options")})]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not entry.cache_enabled:
        return made
    return [
        Chosen(tool, lambda offered: (set(offered), set(offered)))
        if isinstance(tool, ToolSource)
        else cacheable(tool)
        for tool in made
    ]


def _from_servers(path: str, entries: Sequence[ToolEntry]) -> ToolSource:
    """Return what all entries with this file want of it, over one set of connections."""

    def choose(offered: Mapping[str, str]) -> tuple[set[str], set[str]]:
        taken, cached = set[str](), set[str]()
        for number, entry in enumerate(entries):
            if entry.config == path:
                names = choose_names(entry.name, offered, f"tools.{number}", path)
                taken |= names
                cached |= names if entry.cache_enabled else set()
        return taken, cached

    return Chosen(MCPTools.load_from_config(Path(path).expanduser()), choose)


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
    try:
        return VARIABLE.sub(lambda found: os.environ[found[1]], value)
    except KeyError as error:
        raise ValueError(f"{where}: the environment variable {error.args[0]} is not set") from None
