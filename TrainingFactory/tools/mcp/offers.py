"""Selection, naming, description and options of the server tools that models see, as the config specifies."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.texts import escape_control
from TrainingFactory.tools.mcp.server_config import ServerConfig, ToolOverride
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import check_schema, without_titles
from TrainingFactory.types import ToolSpec

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OfferedTool:
    """A tool as its server describes it."""

    name: str
    description: str
    parameters: dict[str, Any]
    output_schema: dict[str, Any] | None = None  # the schema of structured results
    is_idempotent: bool = False  # according to the server's hints
    version: str = ""


@dataclass(slots=True)
class Offer:
    """A server's tool as models see it. It does not change during the lifetime of its `MCPTools`."""

    server: str  # its name; empty for a catalog tool that the config names
    remote_name: str  # its name on the server
    spec: ToolSpec
    options: ToolOptions


def make_offers(config: ServerConfig, tools: Sequence[OfferedTool]) -> list[Offer]:
    """Return the tools of one server that the config selects; raise ValueError if one is unusable for models."""
    tools_by_name = {tool.name: tool for tool in tools}
    for name in sorted(name for name, count in Counter(tool.name for tool in tools).items() if count > 1):
        log.warning(
            "%s offers several tools called %r; using the last one", config.location, escape_control(name)
        )
    overrides = config.overrides or {}
    settings = config.settings
    name_lists = (overrides, settings.tools, settings.pure, settings.stateful, settings.idempotent)
    for name in [name for names in name_lists if isinstance(names, list | dict) for name in names]:
        if name not in tools_by_name:
            hint = did_you_mean(nearest(name, tools_by_name)) or f"; its tools are {', '.join(tools_by_name)}"
            raise ValueError(f"{config.location} offers no tool {name!r}{hint}")
    tool_names = overrides or [name for name in tools_by_name if name in (settings.tools or tools_by_name)]
    return [_make_offer(config, tools_by_name[name], overrides.get(name)) for name in tool_names]


def _make_offer(config: ServerConfig, tool: OfferedTool, override: ToolOverride | None) -> Offer:
    settings = config.settings
    prefix = settings.prefix
    if isinstance(prefix, bool):
        prefix = re.sub(r"[^A-Za-z0-9_-]", "_", config.name) + "_" if prefix else ""
    name = prefix + tool.name
    if not re.fullmatch(r"[A-Za-z0-9_./-]{1,128}", name):
        raise ValueError(
            f"{config.location}: invalid tool name {name!r}: models can call only names of 1 to 128 letters, digits "
            "and _ . / -; list the other tools in tfactory.tools"
        )
    is_idempotent = tool.is_idempotent if settings.idempotent is None else settings.idempotent
    options = ToolOptions(
        timeout=settings.timeout,
        ordered=settings.isolation != "shared",  # all calls of an episode share the state of its session
        pure=option_applies(settings.pure, tool.name),
        stateful=option_applies(settings.stateful, tool.name),
        idempotent=option_applies(is_idempotent, tool.name),
        retries=settings.retries,
        concurrency=settings.concurrency,
        rate=settings.rate,
        server=config.name,
        version=f"{tool.version} {config.digest}".strip(),
    )
    schema, description = without_titles(tool.parameters), tool.description
    if override is not None:
        schema = schema if override.parameters is None else override.parameters
        description = description if override.description is None else override.description
    return Offer(
        config.name, tool.name, _make_spec(name, description.strip(), schema, config.location), options
    )


def option_applies(option: bool | list[str], tool_name: str) -> bool:
    """Return whether an option such as `pure`, true or a list of tool names, applies to the tool."""
    return tool_name in option if isinstance(option, list) else option


def _make_spec(name: str, description: str, parameters: dict[str, Any], location: str) -> ToolSpec:
    """Return a validated spec. Drop `$schema`, which models do not need, unless the schema is invalid without it."""
    schema = {"type": "object", "properties": {}} | parameters
    lean_spec = ToolSpec(name, description, {key: value for key, value in schema.items() if key != "$schema"})
    with contextlib.suppress(ValueError):
        check_schema(lean_spec, location)
        return lean_spec
    try:
        check_schema(spec := ToolSpec(name, description, schema), location)
    except ValueError as error:
        raise ValueError(f"{error}; fix the server, or list its other tools in tfactory.tools") from None
    return spec
