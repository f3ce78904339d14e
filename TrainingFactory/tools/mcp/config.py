"""Which MCP servers there are: every form of config that users have already, read into one."""

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
from TrainingFactory.tools.mcp.server_config import OneTool, ServerConfig, server_config

_STRING = r'("(?:[^"\\]|\\.)*")'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"{_STRING}|,(?=\s*[\]}}])")


def read_config(path: str | Path) -> tuple[list[ServerConfig], list[str]]:
    """Return the servers of a file, and the tools that need none: texts in its list, as RL-Factory writes them. A
    .pydata file holds a Python literal, which is read and never executed."""
    path = Path(path).expanduser()
    data = _data(path)
    names = [each for each in data if isinstance(each, str)] if isinstance(data, list) else []
    rest = [each for each in data if not isinstance(each, str)] if names else data
    return parse_config(rest, str(path), path.resolve().parent) if rest or not names else [], names


def _data(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8-sig")
        return ast.literal_eval(text.strip()) if path.suffix == ".pydata" else parse_json(text)
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        raise ValueError(
            f"{path}: cannot be read: {error}; give the mcpServers file of your servers"
        ) from None


def parse_json(text: str) -> Any:
    """Read JSON that may have comments and a comma before a closing bracket, as editors write it."""
    for pattern in (_COMMENT, _LAST_COMMA):  # blanks in their place, so that an error names the right line
        text = pattern.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)
    return json.loads(text)


def parse_config(data: Any, origin: str, folder: Path) -> list[ServerConfig]:
    """Do the same for what is read already. Relative paths are looked up from `folder`."""
    servers: dict[str, ServerConfig] = {}
    for name, entry, tool in _entries(data, origin):
        server = server_config(name, origin, folder, entry)
        if tool is not None:
            _add_tool(servers, server, tool)
        elif name in servers:
            raise ValueError(f"{origin}: two servers are called {name!r}; rename one")
        else:
            servers[name] = server
    if not servers:
        raise ValueError(f'{origin}: names no servers; expected {{"mcpServers": {{"name": {{...}}}}}}')
    return list(servers.values())


def _entries(data: Any, origin: str) -> Iterator[tuple[str, Any, OneTool | None]]:
    """Yield name, entry and, in the seeds' form, the one tool, for every server that is not disabled."""
    if isinstance(data, list):
        for item in data:
            yield from _entries(item, origin)
        return
    keys = data if isinstance(data, dict) else {}
    if "mcp_server" in keys:
        yield _seed(keys, origin)
        return
    holder = keys["mcp"] if isinstance(keys.get("mcp"), dict) else keys
    servers = holder.get("mcpServers", holder.get("servers"))
    if not isinstance(servers, dict):
        found = ", ".join(map(repr, list(keys)[:8])) or type(data).__name__
        needs = 'needs an object of servers by name under "mcpServers" or "servers", or "mcp_server"'
        raise ValueError(f"{origin}: {needs}; found {found}")
    for name, entry in servers.items():
        if not isinstance(entry, dict):
            raise ValueError(
                f'{origin}: server {name!r} must be an object such as {{"command": "npx", "args": [...]}}'
            )
        if not entry.get("disabled") and entry.get("enabled", True):
            yield name, entry, None


def _seed(data: dict[str, Any], origin: str) -> tuple[str, Any, OneTool]:
    """Return the server of `{"name", "description", "parameters", "mcp_server"}`, which is one tool described anew."""
    try:
        tool: OneTool = make_from(OneTool, data, "a tool")
    except OptionError as error:
        raise ValueError(f"{origin}: tool {data.get('name')!r}: {error}") from None
    entry = tool.mcp_server
    if isinstance(entry, str) and "://" in entry:
        entry = {"url": entry}
    elif isinstance(entry, str):
        command, *args = shlex.split(entry) or [""]
        entry = {"command": command, "args": args}
    if tool.tfactory is not None:
        entry = entry | {"tfactory": tool.tfactory}
    return tool.name, entry, tool


def _add_tool(servers: dict[str, ServerConfig], server: ServerConfig, tool: OneTool) -> None:
    """Add one tool of a server to that server if it is there already, else the server under the tool's name."""
    parameters = tool.parameters
    if parameters and not parameters.keys() & {"type", "properties"}:  # the properties alone
        needed = [key for key, schema in parameters.items() if "default" not in schema]
        parameters = {"type": "object", "properties": parameters, "required": needed}
    if any(tool.name in (known.texts or {}) for known in servers.values()):
        raise ValueError(f"{server.origin}: two entries describe the tool {tool.name!r}; remove one")
    texts = {tool.name: replace(tool, parameters=parameters)}
    for name, known in servers.items():
        if known.texts and replace(known, name=server.name, texts=None) == server:
            servers[name] = replace(known, texts=known.texts | texts)
            return
    servers[server.name] = replace(server, texts=texts)
