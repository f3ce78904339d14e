"""The config of one MCP server. Values of variables, environment and headers appear in no error and no repr."""

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
    from_mapping,
    make_from,
)
from TrainingFactory.common.texts import SECRET_VARIABLES, iter_secrets, redact

Transport = Literal["stdio", "http", "sse"]
TransportName = Literal["stdio", "http", "streamable-http", "streamable_http", "streamableHttp", "sse"]
# Keys of other programs, which have no effect here.
UNUSED_KEYS = {"disabled", "enabled", "description", "icon", "icons", "name", "note", "gallery", "version", "dev"} | {
    "autoApprove", "alwaysAllow", "trust", "timeout", "sse_read_timeout", "disabledTools", "_comment"
}  # fmt: skip
KEY_ALIASES = {"serverUrl": "url", "transport": "type"}
MIN_HIDDEN_CHARS = 4  # shorter values, such as true or 8080, are not hidden in errors
MIN_SECRET_CHARS = 8  # shorter values would occur in tool results by chance
_SECRET_NAME_PATTERN = re.compile(
    r"key|token|secret|pass|pwd|auth(?!ors?(?![a-z]))|credential|cookie|dsn", re.IGNORECASE
)
_VARIABLE_PATTERN = re.compile(r"\$\{(?:env:)?([^}]*?)(?::-([^}]*))?\}")
_ConfigValue = str | int | float
FillVariables = Callable[[str], str]  # replaces ${NAME} by the value of the variable


@checked_dataclass(config=STRICT, kw_only=True, frozen=True)
class ServerSettings:
    """The options of a server under the key `tfactory`; docs/TOOLS.md explains them."""

    isolation: Literal["shared", "session", "process"] = "shared"
    instances: Count = 1  # shared: number of connections; otherwise: how many are started ahead of episodes
    max: Count = 64  # maximum number of private connections
    timeout: Positive | None = None  # seconds for one call; None: the executor's default
    connect_timeout: Positive = 30.0  # seconds for start, handshake and tool list
    concurrency: Count | None = None  # maximum concurrent calls of one tool
    rate: Positive | None = None  # maximum calls of one tool per second
    # The next three apply to all tools (true), to none (false), or to those in a list of names. See `ToolOptions`.
    pure: bool | list[str] = False
    stateful: bool | list[str] = False
    idempotent: bool | list[str] | None = None  # None: according to the server's hints
    retries: ZeroOrMore = 2
    tools: list[str] | None = None  # the tools to offer; None: all
    prefix: str | bool = False  # of the tool names; true: the server's name and _
    error_text: re.Pattern[str] | None = None  # a result that matches is a failure

    @model_validator(mode="after")
    def _check_stateful(self) -> Self:
        if self.stateful and self.isolation == "shared":
            raise ValueError(
                "tools of a shared server cannot be stateful, because they see the calls of all episodes; "
                "write isolation session or process"
            )
        return self


@checked_dataclass(config=STRICT, kw_only=True, frozen=True)
class ToolOverride:
    """Config entry of one tool, whose description and parameters replace the server's."""

    name: Text
    mcp_server: str | dict[str, Any]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tfactory: Any = None
    type: Any = None


class ServerDown(Exception):
    """Raised if the connection to a server was lost or failed. `was_sent`: the server may have received the call."""

    def __init__(self, reason: str, was_sent: bool = True) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


@dataclass(slots=True, frozen=True)
class ServerConfig:
    """Config of one server, with variables filled in and paths resolved."""

    name: str
    origin: str  # the config file
    transport: Transport
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: dict[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str = field(default="", repr=False)
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    settings: ServerSettings = field(default_factory=ServerSettings)
    # The only tools to offer, by name.
    overrides: dict[str, ToolOverride] | None = field(default=None, repr=False)
    variables: dict[str, str] = field(default_factory=dict, repr=False)  # values by name, in the entry

    @property
    def location(self) -> str:
        return f"{self.origin}: server {self.name!r}"

    @property
    def target(self) -> str:
        """Return the program or address of the server for error messages, without secrets."""
        if self.transport == "stdio":
            # The program and, if it comes first, its script; other arguments may be secrets.
            script = [argument for argument in self.args[:1] if not argument.startswith("-")]
            return self.hide_secrets(" ".join(Path(argument).name for argument in (self.command, *script)))
        parts = urlsplit(self.url)
        return self.hide_secrets(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")

    def hide_secrets(self, text: str) -> str:
        """Redact the values of variables, environment and headers, and the password and query of the URL."""
        parts = urlsplit(self.url)
        hidden_values = {*self.variables.values(), *self.env.values(), *self.headers.values(), *self.secrets}
        hidden_values |= {parts.password or "", parts.query}
        long_values = [value for value in hidden_values if len(value) >= MIN_HIDDEN_CHARS]
        return redact(text, sorted(long_values, key=len, reverse=True))

    @property
    def secrets(self) -> list[str]:
        """Return the values to redact in tool results. Other values that errors hide, such as paths, may appear
        there."""
        variables = [*self.variables.items(), *self.env.items()]
        return find_secrets(variables, self.headers.values(), [self.url, *self.args])

    @property
    def digest(self) -> str:
        """Return a digest of everything that determines the server's results; part of the version of its tools."""
        folder = (self.cwd or os.getcwd()) if self.transport == "stdio" else ""
        pattern = self.settings.error_text.pattern if self.settings.error_text else None
        fields = (self.transport, self.command, self.args, folder, self.env, self.url, self.headers, pattern)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


@checked_dataclass(config=STRICT, kw_only=True, frozen=True)
class _Entry:
    """The raw entry of a server in a config file."""

    command: str = ""
    args: list[_ConfigValue] = Field(default_factory=list)
    env: dict[str, _ConfigValue] = Field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: dict[str, _ConfigValue] = Field(default_factory=dict)
    type: TransportName | None = None
    tfactory: Annotated[ServerSettings, from_mapping(ServerSettings, "a server")] = Field(
        default_factory=ServerSettings
    )


def make_server_config(name: str, origin: str, folder: Path, raw_entry: Mapping[str, Any]) -> ServerConfig:
    """Return the config of the server that an entry describes; relative paths start at `folder`."""
    location = f"{origin}: server {name!r}"
    variables: dict[str, str] = {}
    try:
        entry = _read_entry(raw_entry)
        config = ServerConfig(
            name, origin, _get_transport(entry), settings=entry.tfactory, variables=variables
        )
        fill_variables = _make_variable_filler(folder, variables)
        for key, value in (entry.env | entry.headers).items():
            if _SECRET_NAME_PATTERN.search(key):
                SECRET_VARIABLES.update(match[1] for match in _VARIABLE_PATTERN.finditer(str(value)))
        if config.transport == "stdio":
            return replace(config, **_make_process_options(entry, folder, fill_variables))
        headers = {key: fill_variables(str(value)) for key, value in entry.headers.items()}
        return replace(config, url=_check_url(fill_variables(entry.url)), headers=headers)
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from None


def _read_entry(raw_entry: Mapping[str, Any]) -> _Entry:
    options = {KEY_ALIASES.get(key, key): value for key, value in raw_entry.items() if value is not None}
    try:
        return make_from(_Entry, {key: options[key] for key in options if key not in UNUSED_KEYS}, "a server")
    except OptionError as error:
        # Values under keys other than `tfactory` may be secrets.
        raise OptionError(
            *(
                option if option.option.startswith("tfactory") else replace(option, value=...)
                for option in error.invalid_options
            )
        ) from None


def _get_transport(entry: _Entry) -> Transport:
    if bool(entry.command) == bool(entry.url):
        raise ValueError("write either a command or a url")
    if entry.type == "stdio" or (entry.type is None and entry.command):
        return "stdio"
    if entry.tfactory.isolation == "process":
        raise ValueError("isolation process needs a command instead of a url; or write isolation session")
    if entry.type is None:
        return "sse" if urlsplit(entry.url).path.rstrip("/").endswith("/sse") else "http"
    return "sse" if entry.type == "sse" else "http"


def _check_url(url: str) -> str:
    """Return the URL, with the customary path /mcp if it has none; raise ValueError if it is invalid."""
    url_parts = urlsplit(url)
    if url_parts.scheme not in ("http", "https") or not url_parts.netloc:
        raise ValueError("its url must begin with http:// or https:// and name a host")
    return url if url_parts.path else url_parts._replace(path="/mcp").geturl()


def _make_process_options(entry: _Entry, folder: Path, fill_variables: FillVariables) -> dict[str, Any]:
    """Return command, args, env and cwd of the server's process."""
    cwd = str(folder / Path(fill_variables(entry.cwd)).expanduser()) if entry.cwd else None
    env = {key: fill_variables(str(value)) for key, value in entry.env.items()}
    command = fill_variables(entry.command)
    if "/" in command:
        # A relative path may start at cwd, at the folder of the config file, or at the current folder.
        candidates = (
            shutil.which(Path(root) / Path(command).expanduser()) for root in (cwd or folder, folder, ".")
        )
        program_path = next((path for path in candidates if path), None)
    else:
        program_path = shutil.which(command, path=env.get("PATH"))
        if program_path is None and command in ("python", "python3"):
            program_path = sys.executable  # some systems have no program of that name
    if program_path is None:
        raise ValueError(f"program {entry.command!r} not found; install it, or write its full path")

    def resolve_path(text: str) -> str:
        """Return the full path of a file that the argument names relative to the config, else the argument."""
        looks_like_a_path = not text.startswith("-") and ("/" in text or Path(text).suffix)
        if cwd is None and looks_like_a_path and not Path(text).exists() and (folder / text).exists():
            return str(folder / text)
        return text

    args = tuple(resolve_path(fill_variables(str(text))) for text in entry.args)
    return {"command": os.path.abspath(program_path), "args": args, "env": env, "cwd": cwd}


def _make_variable_filler(folder: Path, variables: dict[str, str]) -> FillVariables:
    """Return a function that replaces ${NAME} by the variable's value and records the value in `variables`."""
    workspace = folder.parent if folder.name in (".vscode", ".cursor") else folder
    predefined_values = {"workspaceFolder": str(workspace), "userHome": str(Path.home())}

    def get_value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name in predefined_values:
            return predefined_values[name]
        value = os.environ.get(name, default)
        if value is None:
            raise ValueError(f"environment variable {name} is not set; set it, or write ${{{name}:-default}}")
        variables[name] = value
        return value

    return lambda text: _VARIABLE_PATTERN.sub(get_value, text)


def find_secrets(
    variables: Iterable[tuple[str, str]], headers: Iterable[str], texts: Iterable[str]
) -> list[str]:
    """Return all headers, the values of variables and arguments (--api-key=x) with names of secrets, and the secret
    parts of URLs. The longest come first, because one may contain another."""
    variables, headers, texts = list(variables), list(headers), list(texts)
    headers += [value for _, value in iter_secrets(texts) if "://" not in value]
    secrets = {value for name, value in variables if _SECRET_NAME_PATTERN.search(name)} | set(headers)
    secrets |= {value.split(" ", 1)[1] for value in headers if " " in value}  # Bearer x
    for text in (*texts, *(value for _, value in variables)):
        secrets |= _find_url_secrets(text)
    return sorted((value for value in secrets if len(value) >= MIN_SECRET_CHARS), key=len, reverse=True)


def _find_url_secrets(text: str) -> set[str]:
    try:
        url_parts = urlsplit(text)
    except ValueError:
        return set()
    password = url_parts.netloc.rpartition("@")[0].partition(":")[2]
    query_secrets = {value for name, value in parse_qsl(url_parts.query) if _SECRET_NAME_PATTERN.search(name)}
    return {password, unquote(password)} | query_secrets
