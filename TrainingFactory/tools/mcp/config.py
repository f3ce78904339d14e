"""Parsing of MCP configs: every format in use is read into a list of `ServerConfig`."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from TrainingFactory.common.options import OptionError, make_from
from TrainingFactory.tools.mcp.server_config import ServerConfig, ToolOverride, make_server_config

_STRING_PATTERN = r'("(?:[^"\\]|\\.)*")'
_COMMENT_PATTERN = re.compile(rf"{_STRING_PATTERN}|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA_PATTERN = re.compile(rf"{_STRING_PATTERN}|,(?=\s*[\]}}])")


def read_config(path: str | Path) -> tuple[list[ServerConfig], list[str]]:
    """Return the servers of a config file, and the names of catalog tools: strings in its list, as RL-Factory writes
    them. A .pydata file holds a Python literal, which is parsed and never executed."""
    path = Path(path).expanduser()
    config = _load_file(path)
    tool_names = [entry for entry in config if isinstance(entry, str)] if isinstance(config, list) else []
    entries = [entry for entry in config if not isinstance(entry, str)] if tool_names else config
    if tool_names and not entries:
        return [], tool_names
    return parse_config(entries, str(path), path.resolve().parent), tool_names


def _load_file(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8-sig")
        return ast.literal_eval(text.strip()) if path.suffix == ".pydata" else parse_json(text)
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        raise ValueError(f"{path}: cannot read the MCP config ({error}); check path and syntax") from None


def parse_json(text: str) -> Any:
    """Parse JSON with comments and trailing commas, as editors write it."""
    for pattern in (_COMMENT_PATTERN, _TRAILING_COMMA_PATTERN):  # blanks keep the line numbers of errors
        text = pattern.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)
    return json.loads(text)


def parse_config(config: Any, origin: str, folder: Path) -> list[ServerConfig]:
    """Return the servers of a loaded config. `origin` names it in errors; relative paths start at `folder`."""
    servers: dict[str, ServerConfig] = {}
    for name, entry, tool in _iterate_entries(config, origin):
        server = make_server_config(name, origin, folder, entry)
        if tool is not None:
            _add_tool(servers, server, tool)
        elif name in servers:
            raise ValueError(f"{origin}: two servers are called {name!r}; rename one")
        else:
            servers[name] = server
    if not servers:
        raise ValueError(f'{origin}: no servers; expected {{"mcpServers": {{"name": {{...}}}}}}')
    return list(servers.values())


def _iterate_entries(loaded_config: Any, origin: str) -> Iterator[tuple[str, Any, ToolOverride | None]]:
    """Yield (name, entry, tool) for every enabled server; `tool` is None unless the entry describes a single tool."""
    if isinstance(loaded_config, list):
        for nested_config in loaded_config:
            yield from _iterate_entries(nested_config, origin)
        return
    config = loaded_config if isinstance(loaded_config, dict) else {}
    if "mcp_server" in config:
        yield _parse_single_tool(config, origin)
        return
    section = config["mcp"] if isinstance(config.get("mcp"), dict) else config
    servers = section.get("mcpServers", section.get("servers"))
    if not isinstance(servers, dict):
        key_list = ", ".join(map(repr, list(config)[:8])) or type(loaded_config).__name__
        advice = 'expected an object of servers by name under "mcpServers" or "servers", or "mcp_server"'
        raise ValueError(f"{origin}: {advice}; found {key_list}")
    for name, entry in servers.items():
        if not isinstance(entry, dict):
            raise ValueError(
                f'{origin}: server {name!r} must be an object such as {{"command": "npx", "args": [...]}}'
            )
        if not entry.get("disabled") and entry.get("enabled", True):
            yield name, entry, None


def _parse_single_tool(raw_entry: dict[str, Any], origin: str) -> tuple[str, Any, ToolOverride]:
    """Parse the entry of a single tool, `{"name", "description", "parameters", "mcp_server"}`. Return the tool's name,
    the entry of its server, and the override of its description."""
    try:
        tool: ToolOverride = make_from(ToolOverride, raw_entry, "a tool")
    except OptionError as error:
        raise ValueError(f"{origin}: tool {raw_entry.get('name')!r}: {error}") from None
    entry = tool.mcp_server
    if isinstance(entry, str) and "://" in entry:
        entry = {"url": entry}
    elif isinstance(entry, str):
        command, *args = shlex.split(entry) or [""]
        entry = {"command": command, "args": args}
    if tool.tfactory is not None:
        entry = entry | {"tfactory": tool.tfactory}
    return tool.name, entry, tool


def _add_tool(servers: dict[str, ServerConfig], server: ServerConfig, tool: ToolOverride) -> None:
    """Add a tool to its server if that is already listed; otherwise add the server under the tool's name."""
    parameters = tool.parameters
    if parameters and not parameters.keys() & {"type", "properties"}:  # only the properties of a schema
        required_names = [key for key, schema in parameters.items() if "default" not in schema]
        parameters = {"type": "object", "properties": parameters, "required": required_names}
    if any(tool.name in (listed_server.overrides or {}) for listed_server in servers.values()):
        raise ValueError(f"{server.origin}: two entries describe the tool {tool.name!r}; remove one")
    overrides = {tool.name: replace(tool, parameters=parameters)}
    for name, listed_server in servers.items():
        if listed_server.overrides and replace(listed_server, name=server.name, overrides=None) == server:
            servers[name] = replace(listed_server, overrides=listed_server.overrides | overrides)
            return
    servers[server.name] = replace(server, overrides=overrides)
