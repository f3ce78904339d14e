"""Endpoints by name.

openai:MODEL, anthropic:MODEL, gemini:MODEL     a model of a provider
openai:MODEL@http://127.0.0.1:8000/v1           a model at another address that speaks the same wire format
teacher.yaml                                    a file with the options of `EndpointSettings`
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import JsonValue, validate_call
from pydantic.dataclasses import dataclass

from TrainingFactory.common.endpoints.anthropic import MessagesEndpoint
from TrainingFactory.common.endpoints.budget import Budget
from TrainingFactory.common.endpoints.gemini import GeminiEndpoint
from TrainingFactory.common.endpoints.openai import ChatEndpoint
from TrainingFactory.common.endpoints.transport import KEY_BY_HOST, Endpoint
from TrainingFactory.common.options import STRICT, Count, NotNegative, Positive, Text, ZeroOrMore, make_from

Api = Literal["openai", "anthropic", "gemini"]


class WireFormat(NamedTuple):
    endpoint_class: type[Endpoint]
    base_url: str  # of the provider


class ModelAddress(NamedTuple):
    api: Api
    model: str
    base_url: str


APIS: dict[Api, WireFormat] = {
    "openai": WireFormat(ChatEndpoint, "https://api.openai.com/v1"),
    "anthropic": WireFormat(MessagesEndpoint, "https://api.anthropic.com/v1"),
    "gemini": WireFormat(GeminiEndpoint, "https://generativelanguage.googleapis.com/v1"),
}
ADDRESS_PATTERN = re.compile(rf"(?P<api>{'|'.join(APIS)}):(?P<model>.+?)(?:@(?P<base_url>https?://.+))?")
SETTINGS_SUFFIXES = (".yaml", ".yml")
MAX_FILE_BYTES = 64 << 10  # of a file that may have endpoint options


@dataclass(config=STRICT, frozen=True, kw_only=True)
class EndpointSettings:
    """A model behind an endpoint, with limits and prices. docs/TEACHERS.md describes the options."""

    model: Text
    api: Api = "openai"
    base_url: str = ""  # "": the provider's, if the model is written as openai:MODEL
    api_key_env: str | None = KEY_BY_HOST
    timeout: Positive = 120.0
    options: Mapping[str, JsonValue] | None = None
    concurrency: Count | None = 8
    rate: Positive | None = None
    retries: ZeroOrMore = 5
    pause: NotNegative = 0.5
    cache: Text | None = None
    replay: bool = False
    max_cost: NotNegative | None = None
    max_tokens: NotNegative | None = None
    max_requests: NotNegative | None = None
    input_price: NotNegative = 0.0
    output_price: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.replay and self.cache is None:
            raise ValueError(
                "replay is true without a recording; set cache to the file of the recorded replies"
            )
        _ = self.budget  # validates it

    @property
    def budget(self) -> Budget:
        return Budget(self.max_cost, self.max_tokens, self.max_requests, self.input_price, self.output_price)

    def make_endpoint(self) -> Endpoint:
        return make_endpoint(
            model=self.model, api=self.api, base_url=self.base_url, api_key_env=self.api_key_env,
            timeout=self.timeout, options=self.options,
        )  # fmt: skip

    def check_key(self) -> None:
        """Raise ValueError if the key is needed and not set."""
        if not self.replay:
            check_key(self.make_endpoint())


@validate_call(config=STRICT)
def make_endpoint(
    *,
    model: Text,
    api: Api = "openai",
    base_url: str = "",
    api_key_env: str | None = KEY_BY_HOST,
    timeout: Positive = 60.0,
    options: Mapping[str, Any] | None = None,
) -> Endpoint:
    """Return the client of a model. A `model` such as gemini:MODEL needs no `base_url`, because it names its
    provider."""
    parsed_address = None if base_url else _parse_address(model)
    address = parsed_address or ModelAddress(api, model, base_url)
    cls = APIS[address.api].endpoint_class
    return cls(address.base_url, address.model, api_key_env=api_key_env, timeout=timeout, options=options)


def check_key(endpoint: Endpoint) -> None:
    """Raise ValueError if the environment variable with the endpoint's key is not set."""
    if endpoint.api_key_env is not None and not os.environ.get(endpoint.api_key_env):
        raise ValueError(
            f"the environment variable {endpoint.api_key_env} with the API key for {endpoint.host} is not set; set it, "
            "name another variable with api_key_env, or set api_key_env: null if the endpoint needs no key"
        )


def is_endpoint(name: str) -> bool:
    return _parse_address(name) is not None or _is_settings_file(name)


def find_endpoint(name: str, **options: Any) -> EndpointSettings:
    """Return the settings of the endpoint with this name. Each of `options` that is not None replaces the endpoint's
    own value."""
    options = {option: value for option, value in options.items() if value is not None}
    if (address := _parse_address(name)) is not None:
        return make_from(EndpointSettings, address._asdict() | options, f"the endpoint {name}")
    if not _is_settings_file(name):
        raise ValueError(
            f"{name!r} is not an endpoint. Write openai:MODEL, anthropic:MODEL or gemini:MODEL, with @URL for another "
            "address, or a YAML file of endpoint options"
        )
    path = Path(name).expanduser()
    try:
        file_options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    settings: EndpointSettings = make_from(EndpointSettings, file_options, f"the endpoint in {path}")
    if settings.cache is not None and ":" not in settings.cache:
        settings = replace(settings, cache=str(path.parent / Path(settings.cache).expanduser()))
    return make_from(EndpointSettings, list_options(settings) | options, f"the endpoint {name}")


def endpoint_files(folder: Path) -> list[Path]:
    """Return the YAML files in a folder that look like endpoint options: with a model's name, and an address unless the
    name is such as openai:MODEL."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in SETTINGS_SUFFIXES)
    return [path for path in paths if _has_endpoint_options(path)]


def _has_endpoint_options(path: Path) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return False
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return False
    model = options.get("model") if isinstance(options, dict) else None
    return isinstance(model, str) and ("base_url" in options or _parse_address(model) is not None)


def list_options(settings: EndpointSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in EndpointSettings.__dataclass_fields__}


def _parse_address(name: str) -> ModelAddress | None:
    match = ADDRESS_PATTERN.fullmatch(name)
    if match is None:
        return None
    api: Any = match["api"]
    return ModelAddress(api, match["model"], match["base_url"] or APIS[api].base_url)


def _is_settings_file(name: str) -> bool:
    return name.endswith(SETTINGS_SUFFIXES) and Path(name).expanduser().is_file()
