"""Makes the tools of a run from the entries of its config."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.protocols import EnvironmentFactory, ToolSource
from TrainingFactory.services.build.tool_sets import (
    Chosen,
    Handed,
    ToolSet,
    cacheable,
    chosen_names,
    filled_in,
    own_tools,
)
from TrainingFactory.services.build.user_code import tools_from_file
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.builtin.making import make_tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.python_files import is_file_name


def make_tools(
    config: TrainingConfig, given: Sequence[Any] = (), environment: EnvironmentFactory | None = None
) -> ToolSet:
    """The tools of the config and those given as objects. An entry that only names a tool which the environment
    brings itself adds nothing."""
    own, opened = own_tools(environment), set[str]()
    made = ToolSet(given=[as_tool(value) for value in given])
    try:
        for number, entry in enumerate(config.tools):
            if entry.config is not None and entry.config not in opened:
                opened.add(entry.config)
                made.made.append(_from_servers(entry.config, config.tools))
            elif entry.config is None and (entry.options or entry.name not in own):
                made.made += _tools_of(entry, f"tools.{number}")
    except BaseException:
        made.close()
        raise
    return made


def _tools_of(entry: ToolEntry, where: str) -> list[Handed]:
    """A built-in tool, one of an installed package, or those of a Python file."""
    if not is_file_name(entry.name):
        made: list[Handed] = [_built_in(entry, where)]
    elif entry.options:
        raise ValueError(f"{where}.options are for built-in tools; {entry.name} is a Python file")
    else:
        made = list(tools_from_file(entry.name))
    if not entry.cache_enabled:
        return made
    return [
        Chosen(tool, None, cached=None) if isinstance(tool, ToolSource) else cacheable(tool) for tool in made
    ]


def _built_in(entry: ToolEntry, where: str) -> Handed:
    try:
        return make_tool({"name": entry.name, "options": filled_in(entry.options, "options")})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _from_servers(path: str, entries: Sequence[ToolEntry]) -> ToolSource:
    """What all entries with this file want of it, over one set of connections."""
    from TrainingFactory.tools import MCPTools

    source = MCPTools.load_from_config(Path(path).expanduser())
    try:
        offered = ToolSet([source]).offered()
        taken, cached = set[str](), set[str]()
        for number, entry in enumerate(entries):
            if entry.config != path:
                continue
            if entry.options:
                raise ValueError(f"tools.{number}.options are for built-in tools; a server's stand in {path}")
            names = chosen_names(entry.name, offered, f"tools.{number}", path)
            taken |= names
            cached |= names if entry.cache_enabled else set()
    except BaseException:
        source.close()
        raise
    return Chosen(source, taken, cached)


def make_tool_cache(config: TrainingConfig) -> ToolCache | None:
    """One for all runs of the folder. It is on for all tools that are marked pure or stateful as soon as anybody
    asks for it; an entry that does also marks its own tools."""
    wanted = config.optimization.tool_cache
    if not wanted and not any(entry.cache_enabled for entry in config.tools):
        return None
    if isinstance(wanted, str) and wanted:
        target = filled_in({"tool_cache": wanted}, "optimization")["tool_cache"]
        return ToolCache(os.path.expanduser(target))
    folder = Path(config.logging.output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return ToolCache(folder / "tool_cache.sqlite")
