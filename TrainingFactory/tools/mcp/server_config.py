"""One MCP server as a config describes it: what is started or connected to, its options, and what of it is secret.
Values of variables, environment and headers stay out of errors and reprs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.common.options import (
    STRICT,
    Count,
    OptionError,
    Positive,
    Text,
    ZeroOrMore,
    make_from,
    nested,
)
from TrainingFactory.common.texts import SECRET_VARIABLES, secrets_in, without

Transport = Literal["stdio", "http", "sse"]
Named = Literal["stdio", "http", "streamable-http", "streamable_http", "streamableHttp", "sse"]
# Keys of other programs that make no difference here.
IGNORED = {"disabled", "enabled", "description", "icon", "icons", "name", "note", "gallery", "version", "dev"} | {
    "autoApprove", "alwaysAllow", "trust", "timeout", "sse_read_timeout", "disabledTools", "_comment"
}  # fmt: skip
OTHER_NAMES = {"serverUrl": "url", "transport": "type"}
SHOWN_ANYWAY = 4  # values shorter than this are no secrets: true, 8080
SHORTEST = 8  # characters; shorter ones stand in any text by chance
_SECRET_NAME = re.compile(
    r"key|token|secret|pass|pwd|auth(?!ors?(?![a-z]))|credential|cookie|dsn", re.IGNORECASE
)
_VARIABLE = re.compile(r"\$\{(?:env:)?([^}]*?)(?::-([^}]*))?\}")
_Value = str | int | float
Fill = Callable[[str], str]


@checked_dataclass(config=STRICT, kw_only=True, frozen=True)
class ServerSettings:
    """Holds what an entry says under the key `tfactory`; docs/TOOLS.md has the meanings."""

    isolation: Literal["shared", "session", "process"] = "shared"
    instances: Count = 1  # shared: connections over which calls are spread; else: started ahead of episodes
    max: Count = 64  # own connections at the same time
    timeout: Positive | None = None  # seconds for one call
    connect_timeout: Positive = 30.0  # seconds for start, handshake and list of tools
    concurrency: Count | None = None  # calls of one tool at the same time
    rate: Positive | None = None  # calls of one tool per second
    # Of the server's tools: true (all of them), false, or a list of names. See `ToolOptions`.
    pure: bool | list[str] = False
    stateful: bool | list[str] = False
    idempotent: bool | list[str] | None = None  # None: as the server's own hints say
    retries: ZeroOrMore = 2
    tools: list[str] | None = None  # the only ones to offer
    prefix: str | bool = False  # before the names of tools; true: the server's name and _
    error_text: re.Pattern[str] | None = None  # a text in which it is found is a failure

    @model_validator(mode="after")
    def _check_stateful(self) -> Self:
        if self.stateful and self.isolation == "shared":
            raise ValueError(
                "tools of a shared server see the calls of all episodes, so they cannot be stateful; "
                "write isolation session or process"
            )
        return self


@checked_dataclass(config=STRICT, kw_only=True, frozen=True)
class OneTool:
    """The seeds' form: one tool of a server, with what is said about it in place of what the server says."""

    name: Text
    mcp_server: str | dict[str, Any]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tfactory: Any = None
    type: Any = None


class ServerDown(Exception):
    """The connection is gone, or could not be made. `sent`: the server may have seen the call."""

    def __init__(self, reason: str, sent: bool = True) -> None:
        super().__init__(reason)
        self.sent = sent


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
    texts: dict[str, OneTool] | None = field(default=None, repr=False)  # the only tools to offer, by name
    filled: dict[str, str] = field(default_factory=dict, repr=False)  # variables that were filled in

    @property
    def where(self) -> str:
        return f"{self.origin}: server {self.name!r}"

    @property
    def target(self) -> str:
        """Return what is connected to, without what may be secret."""
        if self.transport == "stdio":
            # The program, and what it runs where that comes first; other arguments may be secrets.
            runs = [text for text in self.args[:1] if not text.startswith("-")]
            return self.hide(" ".join(Path(text).name for text in (self.command, *runs)))
        parts = urlsplit(self.url)
        return self.hide(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")

    def hide(self, text: str) -> str:
        """Return the text without values of variables, environment and headers, and what is private in the URL."""
        parts = urlsplit(self.url)
        values = {*self.filled.values(), *self.env.values(), *self.headers.values(), *self.secrets}
        values |= {parts.password or "", parts.query}
        return without(text, sorted((v for v in values if len(v) >= SHOWN_ANYWAY), key=len, reverse=True))

    @property
    def secrets(self) -> list[str]:
        """Return what must not be shown even in a tool's own result; other values, such as paths, may be."""
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

    command: str = ""
    args: list[_Value] = Field(default_factory=list)
    env: dict[str, _Value] = Field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: dict[str, _Value] = Field(default_factory=dict)
    type: Named | None = None
    tfactory: Annotated[ServerSettings, nested(ServerSettings, "a server")] = Field(
        default_factory=ServerSettings
    )


def server_config(name: str, origin: str, folder: Path, given: Mapping[str, Any]) -> ServerConfig:
    """Return the server that an entry describes; relative paths are looked up from `folder`."""
    where = f"{origin}: server {name!r}"
    filled: dict[str, str] = {}
    try:
        entry = _read(given)
        config = ServerConfig(name, origin, _transport(entry), settings=entry.tfactory, filled=filled)
        fill = _filler(folder, filled)
        for key, value in (entry.env | entry.headers).items():
            if _SECRET_NAME.search(key):
                SECRET_VARIABLES.update(found[1] for found in _VARIABLE.finditer(str(value)))
        if config.transport == "stdio":
            return replace(config, **_process(entry, folder, fill))
        headers = {key: fill(str(value)) for key, value in entry.headers.items()}
        return replace(config, url=_address(fill(entry.url)), headers=headers)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read(given: Mapping[str, Any]) -> _Entry:
    options = {OTHER_NAMES.get(key, key): value for key, value in given.items() if value is not None}
    try:
        return make_from(_Entry, {key: options[key] for key in options if key not in IGNORED}, "a server")
    except OptionError as error:
        # Only what stands under our own key is no secret.
        wrong = (
            each if each.option.startswith("tfactory") else replace(each, value=...) for each in error.wrong
        )
        raise OptionError(*wrong) from None


def _transport(entry: _Entry) -> Transport:
    if bool(entry.command) == bool(entry.url):
        raise ValueError("it needs a command or a url, and not both")
    if entry.type == "stdio" or (entry.type is None and entry.command):
        return "stdio"
    if entry.tfactory.isolation == "process":
        raise ValueError(
            "an HTTP server's process is not ours to start; write isolation session, or give a command instead of a URL"
        )
    older = entry.type == "sse" or (
        entry.type is None and urlsplit(entry.url).path.rstrip("/").endswith("/sse")
    )
    return "sse" if older else "http"


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("its url must begin with http:// or https:// and name a host")
    return url if parts.path else parts._replace(path="/mcp").geturl()  # the customary place


def _process(entry: _Entry, folder: Path, fill: Fill) -> dict[str, Any]:
    """Return what is started: command, args, env and cwd."""
    cwd = str(folder / Path(fill(entry.cwd)).expanduser()) if entry.cwd else None
    env = {key: fill(str(value)) for key, value in entry.env.items()}
    command = fill(entry.command)
    if "/" in command:
        # A relative path is looked up from cwd, from beside the file, and from here.
        tried = (
            shutil.which(Path(start) / Path(command).expanduser()) for start in (cwd or folder, folder, ".")
        )
        found = next((path for path in tried if path), None)
    else:
        found = shutil.which(command, path=env.get("PATH"))
        if found is None and command in ("python", "python3"):
            found = sys.executable  # some systems have no program of that name
    if found is None:
        raise ValueError(f"there is no program {entry.command!r}; install it, or write its full path")

    def from_the_file(text: str) -> str:
        """Return the full path of a file beside the config, which may be named from there."""
        looks_like_a_path = not text.startswith("-") and ("/" in text or Path(text).suffix)
        if cwd is None and looks_like_a_path and not Path(text).exists() and (folder / text).exists():
            return str(folder / text)
        return text

    args = tuple(from_the_file(fill(str(text))) for text in entry.args)
    return {"command": os.path.abspath(found), "args": args, "env": env, "cwd": cwd}


def _filler(folder: Path, used: dict[str, str]) -> Fill:
    """Return a function that puts the values of variables in place of ${NAME}, and notes them in `used`."""
    workspace = folder.parent if folder.name in (".vscode", ".cursor") else folder
    known = {"workspaceFolder": str(workspace), "userHome": str(Path.home())}

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name in known:
            return known[name]
        found = os.environ.get(name, default)
        if found is None:
            raise ValueError(
                f"the environment variable {name} is not set; set it, or write ${{{name}:-default}}"
            )
        used[name] = found
        return found

    return lambda text: _VARIABLE.sub(value, text)


def secret_values(
    named: Iterable[tuple[str, str]], headers: Iterable[str], texts: Iterable[str]
) -> list[str]:
    """Return headers, values whose name says that they are secret, in `texts` that are arguments too (--api-key=x), and
    what is secret in values that are URLs. The longest first, since one may be part of another."""
    named, headers, texts = list(named), list(headers), list(texts)
    headers += [value for _, value in secrets_in(texts) if "://" not in value]
    values = {value for name, value in named if _SECRET_NAME.search(name)} | set(headers)
    values |= {value.split(" ", 1)[1] for value in headers if " " in value}  # Bearer x
    for text in (*texts, *(value for _, value in named)):
        values |= _in_url(text)
    return sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True)


def _in_url(text: str) -> set[str]:
    try:
        parts = urlsplit(text)
    except ValueError:
        return set()
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    found = {password, unquote(password)}
    return found | {value for name, value in parse_qsl(parts.query) if _SECRET_NAME.search(name)}
