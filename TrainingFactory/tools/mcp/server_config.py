"""One MCP server as a config describes it: what is started or connected to, and what of it is secret.

Nothing is executed and nothing is connected here. Values of variables, environment and headers are secrets: they
are kept out of errors and reprs, and `ServerConfig.hide` takes them out of other people's texts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.options import STRICT, OptionError, make_from, nested
from TrainingFactory.tools.mcp.secrets import secret_values, without
from TrainingFactory.tools.mcp.settings import ServerSettings

Transport = Literal["stdio", "http", "sse"]
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
_Value = str | int | float


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
        """Return what is connected to, without what may be secret."""
        if self.transport == "stdio":
            # The program, and what it runs where that comes first; other arguments may be secrets.
            plain = self.args[1:] if self.args[:1] in (("-y",), ("-m",)) else self.args
            runs = plain[:1] if plain and not plain[0].startswith("-") else ()
            return self.hide(" ".join(Path(text).name for text in (self.command, *runs)))
        parts = urlsplit(self.url)
        return self.hide(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")

    def hide(self, text: str) -> str:
        """Return the text without any value of a variable, of the environment or of a header, and without what is
        private in the URL."""
        parts = urlsplit(self.url)
        values = {*self.filled.values(), *self.env.values(), *self.headers.values(), *self.secrets}
        values |= {parts.password or "", parts.query}
        return without(text, sorted((v for v in values if len(v) >= SHOWN_ANYWAY), key=len, reverse=True))

    @property
    def secrets(self) -> list[str]:
        """Return what must not be shown even where a tool's own result has it: headers, what is named a secret,
        passwords in URLs. Other values, such as paths, are part of what tools talk about."""
        named = [*self.filled.items(), *self.env.items()]
        return secret_values(named, self.headers.values(), [self.url, *self.args])

    @property
    def launch(self) -> str:
        """Return a digest of how it is reached and read: with another one it is another server, whatever its name."""
        place = (self.cwd or os.getcwd()) if self.transport == "stdio" else ""
        pattern = self.settings.error_text.pattern if self.settings.error_text else None
        how = (self.transport, self.command, self.args, place, self.env, self.url, self.headers, pattern)
        return hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:16]


@checked_dataclass(config=STRICT, kw_only=True, frozen=True)
class _Entry:
    """The keys of a server in a file, as they are written there."""

    command: str | None = None
    args: list[_Value] = Field(default_factory=list)
    env: dict[str, _Value] = Field(default_factory=dict)
    cwd: str = ""
    url: str | None = None
    serverUrl: str | None = None
    headers: dict[str, _Value] = Field(default_factory=dict)
    type: str | None = None
    transport: str | None = None
    tfactory: Annotated[ServerSettings, nested(ServerSettings, "a server")] = Field(
        default_factory=ServerSettings
    )


def server_config(name: str, origin: str, folder: Path, given: Any) -> ServerConfig:
    """Return the server that an entry describes; raise ValueError with file, server and remedy. Relative paths are
    looked up from `folder`."""
    where = f"{origin}: server {name!r}"
    entry, address = _read(given, where), ""
    transport = _transport(entry, where)
    fill = _Fill(where, folder)
    if transport != "stdio":
        address = _address(fill(entry.url or entry.serverUrl or ""), where)
        if entry.tfactory.isolation == "process":
            raise ValueError(
                f"{where}: an HTTP server's process is not ours to start; write isolation session, "
                "or give a command instead of a URL"
            )
    config = ServerConfig(
        name,
        origin,
        transport,
        url=address,
        headers={key: fill(str(value)) for key, value in entry.headers.items()},
        settings=entry.tfactory,
        filled=fill.used,
    )
    return config if transport != "stdio" else _with_command(config, entry, folder, fill)


def _read(given: Any, where: str) -> _Entry:
    if not isinstance(given, Mapping):
        raise ValueError(f'{where} must be an object such as {{"command": "npx", "args": [...]}}')
    for key in REFUSED:
        if key in given:
            raise ValueError(f"{where}: {key} is not supported; {REFUSED[key]}")
    options = {key: value for key, value in given.items() if key not in IGNORED and value is not None}
    try:
        return make_from(_Entry, options, "a server")
    except OptionError as error:
        # Only what stands under our own key is no secret.
        wrong = (
            each if each.option.startswith("tfactory") else replace(each, value=...) for each in error.wrong
        )
        raise ValueError(f"{where}: {OptionError(*wrong)}") from None


def _transport(entry: _Entry, where: str) -> Transport:
    url, named = entry.url or entry.serverUrl, entry.type or entry.transport
    if named is None:
        if (url is None) == (entry.command is None):
            both = "has both a command and a url; remove one" if url else "needs a command or a url"
            raise ValueError(f"{where} {both}")
        if url is None:
            return "stdio"
        return "sse" if urlsplit(url).path.rstrip("/").endswith("/sse") else "http"
    kind = named.lower()
    if kind in ("stdio", "sse"):
        transport: Transport = "stdio" if kind == "stdio" else "sse"
    elif kind in ("http", "streamable-http", "streamable_http", "streamablehttp"):
        transport = "http"
    else:
        known = "stdio, http (also streamable-http) and sse"
        raise ValueError(f"{where}: unknown transport {named!r}; there are {known}")
    if (entry.command if transport == "stdio" else url) is None:
        needed = "a command" if transport == "stdio" else "a url"
        raise ValueError(f"{where}: a server of type {named} needs {needed}")
    return transport


def _address(url: str, where: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{where}: its url must begin with http:// or https:// and name a host")
    return url if parts.path else parts._replace(path="/mcp").geturl()  # the customary place


def _with_command(config: ServerConfig, entry: _Entry, folder: Path, fill: _Fill) -> ServerConfig:
    cwd = str(folder / Path(fill(entry.cwd)).expanduser()) if entry.cwd else None
    if cwd is not None and not Path(cwd).is_dir():
        raise ValueError(f"{config.where}: its cwd is not a folder: {entry.cwd}")
    env = {key: fill(str(value)) for key, value in entry.env.items()}
    command = fill(entry.command or "")
    if "/" in command or os.sep in command:
        # A relative path is looked up from cwd, from beside the file, and from here.
        starts = [start for start in (cwd, folder, Path.cwd()) if start is not None]
        tried = (shutil.which(Path(start) / Path(command).expanduser()) for start in starts)
        found = next((path for path in tried if path), None)
    else:
        found = shutil.which(command, path=env.get("PATH"))
    if found is None:
        raise ValueError(
            f"{config.where}: there is no program {entry.command!r}; install it, or write its full path"
        )

    def from_the_file(text: str) -> str:
        """Return the full path of a file beside the config, which may be named from there."""
        looks_like_a_path = not text.startswith("-") and ("/" in text or Path(text).suffix)
        if cwd is None and looks_like_a_path and not Path(text).exists() and (folder / text).exists():
            return str(folder / text)
        return text

    args = tuple(from_the_file(fill(str(text))) for text in entry.args)
    return replace(config, command=os.path.abspath(found), args=args, env=env, cwd=cwd)


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
                "environment variable and write ${NAME}"
            )
        name = name.removeprefix("env:")
        if name in self.known:
            return self.known[name]
        value = os.environ.get(name, default if has_default else None)
        if value is None:
            raise ValueError(
                f"{self.where}: the environment variable {name} is not set; set it, or write ${{{name}:-default}}"
            )
        self.used[name] = value
        return value
