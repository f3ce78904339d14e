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
from urllib.parse import urlsplit

from TrainingFactory.options import did_you_mean, nearest
from TrainingFactory.tools.mcp.server_config import ServerConfig, ToolText, server_config

ENTRY_KEYS = {"command", "url", "serverUrl"}  # one of these is in every entry
TOOL_KEYS = ("name", "description", "parameters", "mcp_server", "tfactory", "type")


def read_config(path: str | Path) -> list[ServerConfig]:
    """Return the servers of a file; raise ValueError with file, server and remedy if it is none of the known
    forms."""
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"{path}: cannot be read: {reason}; give the mcpServers file of your servers"
        ) from None
    return parse_config(_literal(path, text), str(path), path.resolve().parent)


def parse_config(data: Any, origin: str, folder: Path) -> list[ServerConfig]:
    """Do the same for what is read already. Relative paths are looked up from `folder`."""
    servers: dict[str, ServerConfig] = {}
    for name, entry, tool in _entries(data, origin):
        server = server_config(name, origin, folder, entry)
        if tool is not None:
            _add_tool(servers, server, *tool)
        elif name in servers:
            raise ValueError(f"{origin}: two servers are called {name!r}; rename one")
        else:
            servers[name] = server
    if not servers:
        raise ValueError(f'{origin}: names no servers; expected {{"mcpServers": {{"name": {{...}}}}}}')
    return list(servers.values())


def _literal(path: Path, text: str) -> Any:
    """Return JSON; from a .pydata file a Python literal, which is read and never executed."""
    if path.suffix == ".pydata":
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise ValueError(
                f"{path}{line}: is not a Python literal; .pydata holds only lists, dicts, texts and numbers"
            ) from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        commented = re.search(r"^\s*//|/\*", text, re.MULTILINE)
        hint = "; JSON has no comments" if commented else ""
        raise ValueError(
            f"{path}, line {error.lineno}, column {error.colno}: is not JSON: {error.msg}{hint}"
        ) from None


def _entries(data: Any, origin: str) -> Iterator[tuple[str, Any, tuple[str, ToolText] | None]]:
    """Yield name, entry and, in the seeds' form, the one tool and its text, for every server that is not disabled."""
    if isinstance(data, list):
        for item in data:
            yield from _entries(item, origin)
        return
    if isinstance(data, str):
        raise ValueError(
            f"{origin}: {data!r} is the name of a tool that qwen_agent brings along, not a server; "
            "name tools that are not from a server in the tools list of the training config"
        )
    if not isinstance(data, dict):
        raise ValueError(f"{origin}: expected an object with mcpServers, found {type(data).__name__}")
    if "mcp_server" in data:
        yield _seed(data, origin)
        return
    for name, entry in _servers(data, origin).items():
        off = isinstance(entry, dict) and (entry.get("disabled") is True or entry.get("enabled") is False)
        if not off:
            yield str(name), entry, None


def _servers(data: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the entries by name, under whichever key they stand."""
    nested = data.get("mcp")
    for holder in (data, nested if isinstance(nested, dict) else {}):
        for key in ("mcpServers", "servers"):
            if key in holder:
                if not isinstance(holder[key], dict):
                    raise ValueError(f"{origin}: {key} must be an object of servers by name")
                return holder[key]
    if data and all(isinstance(entry, dict) and entry.keys() & ENTRY_KEYS for entry in data.values()):
        return data  # without a key above
    raise ValueError(
        f'{origin}: has neither "mcpServers" nor "servers" nor "mcp_server"'
        f"; its keys are {', '.join(map(repr, list(data)[:8])) or 'none'}"
    )


def _seed(data: dict[str, Any], origin: str) -> tuple[str, Any, tuple[str, ToolText]]:
    """Return a server without a name for `{"name", "description", "parameters", "mcp_server"}`, which is one tool of
    it described anew."""
    name = data.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f'{origin}: an entry with mcp_server needs a "name", that of the tool')
    for key in data.keys() - set(TOOL_KEYS):
        near = did_you_mean(nearest(key, TOOL_KEYS))
        raise ValueError(f"{origin}: tool {name!r} has an unknown key {key!r}{near}")
    description, parameters = data.get("description"), data.get("parameters")
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise ValueError(f"{origin}: tool {name!r}: description is a text, and parameters are a JSON schema")
    if parameters and not parameters.keys() & {"type", "properties"}:  # the properties alone
        needed = [key for key, schema in parameters.items() if "default" not in schema]
        parameters = {"type": "object", "properties": parameters, "required": needed}
    entry = data["mcp_server"]
    if isinstance(entry, str) and "://" in entry:
        entry = {"url": entry}
    elif isinstance(entry, str):
        command, *args = shlex.split(entry) or [""]
        entry = {"command": command, "args": args}
    if not isinstance(entry, dict):
        raise ValueError(f"{origin}: tool {name!r}: mcp_server must be a URL, a command or an object")
    if "tfactory" in data:
        entry = entry | {"tfactory": data["tfactory"]}
    url = entry.get("url") or entry.get("serverUrl")
    server = urlsplit(str(url)).hostname if url else Path(str(entry.get("command", ""))).name
    return server or "server", entry, (name, ToolText(description, parameters))


def _add_tool(servers: dict[str, ServerConfig], server: ServerConfig, tool: str, text: ToolText) -> None:
    """Add one tool of a server to that server if it is there already, else the server under a name that is free."""
    name, number = server.name, 2
    while (known := servers.get(name)) is not None:
        if known.texts is not None and replace(known, name=server.name, texts=None) == server:
            if tool in known.texts:
                raise ValueError(f"{server.origin}: two entries describe the tool {tool!r}; remove one")
            known.texts[tool] = text
            return
        name, number = f"{server.name}-{number}", number + 1
    servers[name] = replace(server, name=name, texts={tool: text})
