"""Which MCP servers there are: every form of config that users have already, read into one.

Nothing is executed and nothing is connected here. Values of variables, environment and headers are secrets: they
are kept out of errors and reprs, and `ServerConfig.hide` takes them out of other people's texts.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.mcp.secrets import secret_values, without
from TrainingFactory.tools.mcp.settings import ServerSettings, nearest, read_settings

Transport = Literal["stdio", "http", "sse"]
TRANSPORTS: dict[str, Transport] = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamablehttp": "http",
    "sse": "sse",
}
KEYS = {"command", "args", "env", "cwd", "url", "serverUrl", "headers", "type", "transport", "tfactory"}
# Keys of other programs that make no difference here ...
IGNORED = {"disabled", "enabled", "description", "icon", "icons", "name", "note", "gallery", "version", "dev"} | {
    "autoApprove", "alwaysAllow", "trust", "timeout", "sse_read_timeout", "disabledTools", "_comment"
}  # fmt: skip
# ... and some that do, which we cannot honour.
REFUSED = {
    "envFile": "write the variables under env, as ${NAME}",
    "auth": "write a header, such as Authorization: Bearer ${TOKEN}",
    "oauth": "write a header, such as Authorization: Bearer ${TOKEN}",
    "authProviderType": "write a header, such as Authorization: Bearer ${TOKEN}",
}
SHOWN_ANYWAY = 4  # values shorter than this are no secrets: true, 8080
_VARIABLE = re.compile(r"\$\{([^}]*)\}")


@dataclass(slots=True, frozen=True)
class ToolText:
    """What the seeds' form says about a tool, in place of what its server says."""

    description: str | None = None
    parameters: dict[str, Any] | None = None


@dataclass(slots=True, frozen=True)
class ServerConfig:
    """One server, with variables filled in and paths resolved."""

    name: str
    origin: str  # the file it comes from
    transport: Transport
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: dict[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str = field(default="", repr=False)
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    settings: ServerSettings = field(default_factory=ServerSettings)
    texts: dict[str, ToolText] | None = field(default=None, repr=False)  # the only tools to offer, by name
    filled: dict[str, str] = field(default_factory=dict, repr=False)  # variables that were filled in

    @property
    def where(self) -> str:
        return f"{self.origin}: server {self.name!r}"

    @property
    def target(self) -> str:
        """What is connected to, without what may be secret."""
        if self.transport == "stdio":
            # The program, and what it runs where that comes first; other arguments may be secrets.
            plain = self.args[1:] if self.args[:1] in (("-y",), ("-m",)) else self.args
            runs = plain[:1] if plain and not plain[0].startswith("-") else ()
            return self.hide(" ".join([Path(self.command).name, *(Path(text).name for text in runs)]))
        parts = urlsplit(self.url)
        return self.hide(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")

    def hide(self, text: str) -> str:
        """The text without any value of a variable, of the environment or of a header, nor what is private in
        the URL."""
        parts = urlsplit(self.url)
        values = {*self.filled.values(), *self.env.values(), *self.headers.values(), *self.secrets}
        values |= {parts.password or "", parts.query}
        return without(text, sorted((v for v in values if len(v) >= SHOWN_ANYWAY), key=len, reverse=True))

    @property
    def secrets(self) -> list[str]:
        """What must not be shown even where a tool's own result has it: headers, what is named a secret, passwords
        in URLs. Other values, such as paths, are part of what tools talk about."""
        named = [*self.filled.items(), *self.env.items()]
        return secret_values(named, self.headers.values(), [self.url, *self.args])

    @property
    def launch(self) -> str:
        """A digest of how it is reached and read: with another one it is another server, whatever its name."""
        place = (self.cwd or os.getcwd()) if self.transport == "stdio" else ""
        how = (self.transport, self.command, self.args, place, self.env, self.url, self.headers)
        return digest(json.dumps((*how, self.settings.error_text), sort_keys=True))[:16]


def read_config(path: str | Path) -> list[ServerConfig]:
    """The servers of a file; ValueError with file, server and remedy if it is not one of the known forms."""
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; give the mcpServers file of your servers") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{path}: cannot be read: {reason}") from None
    return parse_config(_literal(path, text), str(path), path.resolve().parent)


def parse_config(data: Any, origin: str, folder: Path) -> list[ServerConfig]:
    """The same for what is read already. Relative paths are looked up from `folder`."""
    reader = _Reader(origin, folder)
    for name, entry, text in _entries(data, origin):
        reader.add(name, entry, text)
    if not reader.servers:
        raise ValueError(f'{origin}: names no servers; expected {{"mcpServers": {{"name": {{...}}}}}}')
    return list(reader.servers.values())


def _literal(path: Path, text: str) -> Any:
    """JSON; in a .pydata file a Python literal, which is read and never executed."""
    if path.suffix == ".pydata":
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
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
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply to be read") from None


def _entries(data: Any, origin: str) -> Iterator[tuple[str, Any, tuple[str, ToolText] | None]]:
    """(name or "", entry, the one tool and its text in the seeds' form) for every server."""
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
    nested = data.get("mcp")
    for holder in (data, nested if isinstance(nested, dict) else {}):
        for key in ("mcpServers", "servers"):
            servers = holder.get(key)
            if servers is not None and not isinstance(servers, dict):
                raise ValueError(f"{origin}: {key} must be an object of servers by name")
            yield from ((str(name), entry, None) for name, entry in (servers or {}).items())
            if servers is not None:
                return
    if data and all(isinstance(entry, dict) and entry.keys() & KEYS for entry in data.values()):
        # The servers without a key above.
        yield from ((str(name), entry, None) for name, entry in data.items())
        return
    raise ValueError(
        f'{origin}: has neither "mcpServers" nor "servers" nor "mcp_server"'
        f"; its keys are {', '.join(map(repr, list(data)[:8])) or 'none'}"
    )


def _seed(data: dict[str, Any], origin: str) -> tuple[str, Any, tuple[str, ToolText]]:
    """`{"name", "description", "parameters", "mcp_server"}`: one tool of a server, described anew."""
    name = data.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f'{origin}: an entry with mcp_server needs a "name", that of the tool')
    for key in data.keys() - {"name", "description", "parameters", "mcp_server", "tfactory", "type"}:
        wanted = ("name", "description", "parameters", "mcp_server", "tfactory")
        raise ValueError(f"{origin}: tool {name!r} has an unknown key {key!r}{nearest(key, wanted)}")
    description, parameters = data.get("description"), data.get("parameters")
    if description is not None and not isinstance(description, str):
        raise ValueError(f"{origin}: tool {name!r}: description must be a text")
    if parameters is not None and not isinstance(parameters, dict):
        raise ValueError(f"{origin}: tool {name!r}: parameters must be a JSON schema")
    if parameters and not parameters.keys() & {"type", "properties"}:  # the properties alone
        needed = [k for k, v in parameters.items() if not isinstance(v, dict) or "default" not in v]
        parameters = {"type": "object", "properties": parameters, "required": needed}
    entry = data["mcp_server"]
    if isinstance(entry, str) and "://" in entry:
        entry = {"url": entry}
    elif isinstance(entry, str):
        words = shlex.split(entry)
        entry = {"command": words[0] if words else "", "args": words[1:]}
    if not isinstance(entry, dict):
        raise ValueError(f"{origin}: tool {name!r}: mcp_server must be a URL, a command or an object")
    if "tfactory" in data:
        entry = entry | {"tfactory": data["tfactory"]}
    return "", entry, (name, ToolText(description, parameters))


class _Reader:
    """Reads the entries of one file; several tools of the same unnamed server share it."""

    def __init__(self, origin: str, folder: Path) -> None:
        self.origin = origin
        self.folder = folder
        self.servers: dict[str, ServerConfig] = {}

    def add(self, name: str, entry: Any, tool: tuple[str, ToolText] | None) -> None:
        if tool is None:
            if name in self.servers:
                raise ValueError(f"{self.origin}: two servers are called {name!r}; rename one")
            if isinstance(entry, dict) and (entry.get("disabled") is True or entry.get("enabled") is False):
                return
            self.servers[name] = self._server(name, entry)
            return
        server = self._server(_short_name(entry), entry)
        same = next((known for known in self.servers.values() if _same(known, server)), None)
        if same is not None:
            assert same.texts is not None
            if tool[0] in same.texts:
                raise ValueError(f"{self.origin}: two entries describe the tool {tool[0]!r}; remove one")
            same.texts[tool[0]] = tool[1]
            return
        name, number = server.name, 2
        while name in self.servers:
            name, number = f"{server.name}-{number}", number + 1
        self.servers[name] = replace(server, name=name, texts=dict([tool]))

    def _server(self, name: str, entry: Any) -> ServerConfig:
        where = f"{self.origin}: server {name!r}"
        if not isinstance(entry, dict):
            raise ValueError(f'{where} must be an object such as {{"command": "npx", "args": [...]}}')
        _check_keys(entry, where)
        fill = _Fill(where, self.folder)
        transport = _transport(entry, where)
        settings = read_settings(entry.get("tfactory", {}), where, transport != "stdio")
        if transport == "stdio":
            cwd = _text(entry, "cwd", where, fill)
            start = str(self.folder / Path(cwd).expanduser()) if cwd else None
            if start is not None and not Path(start).is_dir():
                raise ValueError(f"{where}: its cwd is not a folder: {entry['cwd']}")
            env = _mapping(entry, "env", where, fill)
            command = _text(entry, "command", where, fill)
            found = _command(command, self.folder, start, env, where, str(entry.get("command")))
            args = tuple(self._argument(text, start) for text in _list(entry, "args", where, fill))
            return ServerConfig(name, self.origin, transport, found, args, env, start, settings=settings,
                                filled=fill.used)  # fmt: skip
        url = _text(entry, "url" if "url" in entry else "serverUrl", where, fill)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"{where}: its url must begin with http:// or https:// and name a host")
        if not parts.path:
            url = parts._replace(path="/mcp").geturl()  # the customary place
        headers = _mapping(entry, "headers", where, fill)
        return ServerConfig(name, self.origin, transport, url=url, headers=headers, settings=settings,
                            filled=fill.used)  # fmt: skip

    def _argument(self, text: str, cwd: str | None) -> str:
        """A file beside the config may be named from there, wherever we were started."""
        looks_like_a_path = not text.startswith("-") and ("/" in text or Path(text).suffix)
        if cwd is None and looks_like_a_path and not Path(text).exists() and (self.folder / text).exists():
            return str(self.folder / text)
        return text


def _same(one: ServerConfig, other: ServerConfig) -> bool:
    return one.texts is not None and replace(one, name="", texts=None) == replace(other, name="", texts=None)


def _short_name(entry: Any) -> str:
    """A name for a server that has none: its host, or its command."""
    if url := entry.get("url") or entry.get("serverUrl"):
        return urlsplit(str(url)).hostname or "server"
    return Path(str(entry.get("command", "server"))).name or "server"


def _check_keys(entry: dict[str, Any], where: str) -> None:
    for key in entry:
        if key in REFUSED:
            raise ValueError(f"{where}: {key} is not supported; {REFUSED[key]}")
        if key not in KEYS | IGNORED:
            raise ValueError(f"{where}: there is no key {key!r}{nearest(str(key), sorted(KEYS))}")


def _transport(entry: dict[str, Any], where: str) -> Transport:
    named = entry.get("type", entry.get("transport"))
    has_url, has_command = "url" in entry or "serverUrl" in entry, "command" in entry
    if named is not None:
        kind = TRANSPORTS.get(str(named).lower())
        if kind is None:
            known = "stdio, http (also streamable-http) and sse"
            raise ValueError(f"{where}: unknown transport {named!r}; there are {known}")
        if kind == "stdio" and not has_command:
            raise ValueError(f"{where}: a stdio server needs a command")
        if kind != "stdio" and not has_url:
            raise ValueError(f"{where}: a server of type {named} needs a url")
        return kind
    if has_url == has_command:
        both = "has both a command and a url; remove one" if has_url else "needs a command or a url"
        raise ValueError(f"{where} {both}")
    if has_command:
        return "stdio"
    path = urlsplit(str(entry.get("url", entry.get("serverUrl")))).path
    return "sse" if path.rstrip("/").endswith("/sse") else "http"


class _Fill:
    """Puts the values of variables in place of ${NAME}, and remembers them."""

    def __init__(self, where: str, folder: Path) -> None:
        self.where = where
        workspace = folder.parent if folder.name in (".vscode", ".cursor") else folder
        self.known = {"workspaceFolder": str(workspace), "userHome": str(Path.home())}
        self.used: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        return _VARIABLE.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        name, has_default, default = match.group(1).partition(":-")
        if name.startswith("input:"):
            raise ValueError(
                f"{self.where}: ${{{name}}} would be asked for in an editor; put the value into an "
                f"environment variable and write ${{NAME}}"
            )
        name = name.removeprefix("env:")
        if name in self.known:
            return self.known[name]
        value = os.environ.get(name)
        if value is None and not has_default:
            raise ValueError(
                f"{self.where}: the environment variable {name} is not set; set it, or write ${{{name}:-default}}"
            )
        filled = default if value is None else value
        self.used[name] = filled
        return filled


def _text(entry: Mapping[str, Any], key: str, where: str, fill: _Fill) -> str:
    value = entry.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be a text")
    return fill(value)


def _list(entry: Mapping[str, Any], key: str, where: str, fill: _Fill) -> list[str]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str | int | float) for item in value):
        raise ValueError(f"{where}: {key} must be a list of texts")
    return [fill(str(item)) for item in value]


def _mapping(entry: Mapping[str, Any], key: str, where: str, fill: _Fill) -> dict[str, str]:
    value = entry.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(v, str | int | float) for v in value.values()):
        raise ValueError(f"{where}: {key} must be an object of texts by name")
    return {str(name): fill(str(item)) for name, item in value.items()}


def _command(
    command: str, folder: Path, cwd: str | None, env: dict[str, str], where: str, written: str
) -> str:
    """The program's full path; a relative path is looked up from cwd, from beside the file, and from here."""
    if not command:
        raise ValueError(f"{where}: its command is empty")
    expanded = Path(command).expanduser()
    if "/" not in command and os.sep not in command:
        found = shutil.which(command, path=env.get("PATH"))
        if found is None:
            raise ValueError(
                f"{where}: the command {written!r} is not on the PATH; install it or write its full path"
            )
        return os.path.abspath(found)
    for start in (cwd, str(folder), os.getcwd()):
        if start is not None and shutil.which(str(Path(start) / expanded)):
            return os.path.abspath(Path(start) / expanded)
    raise ValueError(f"{where}: there is no program {written!r}; check the path, and that it is executable")
