"""What models are told about the tools of servers: chosen, named, described and marked as the config says."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.texts import clean
from TrainingFactory.tools.mcp.server_config import OneTool, ServerConfig
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
    output: dict[str, Any] | None = None  # the schema of structured answers
    idempotent: bool = False  # by the server's own hints
    version: str = ""


@dataclass(slots=True)
class Offer:
    """One tool as it is offered to models: fixed for the life of its `MCPTools`."""

    server: str  # empty for a tool of the catalog that the config names
    remote_name: str  # what its server calls it
    spec: ToolSpec
    options: ToolOptions


def make_offers(config: ServerConfig, offered: Sequence[OfferedTool]) -> list[Offer]:
    """Return the tools of one server that the config asks for; raise ValueError where models could not use one."""
    by_name = {tool.name: tool for tool in offered}
    for name in sorted(name for name, count in Counter(tool.name for tool in offered).items() if count > 1):
        log.warning(
            "%s offers several tools called %r; models are told of the last one", config.where, clean(name)
        )
    texts = config.texts or {}
    settings = config.settings
    lists = (texts, settings.tools, settings.pure, settings.stateful, settings.idempotent)
    for name in [name for names in lists if isinstance(names, list | dict) for name in names]:
        if name not in by_name:
            near = did_you_mean(nearest(name, by_name)) or f"; there are {', '.join(by_name)}"
            raise ValueError(f"{config.where} offers no tool {name!r}{near}")
    chosen = texts or [name for name in by_name if name in (settings.tools or by_name)]
    return [_offer(config, by_name[name], texts.get(name)) for name in chosen]


def _offer(config: ServerConfig, tool: OfferedTool, text: OneTool | None) -> Offer:
    settings = config.settings
    prefix = settings.prefix
    if isinstance(prefix, bool):
        prefix = re.sub(r"[^A-Za-z0-9_-]", "_", config.name) + "_" if prefix else ""
    name = prefix + tool.name
    if not re.fullmatch(r"[A-Za-z0-9_./-]{1,128}", name):
        raise ValueError(
            f"{config.where}: tool {tool.name!r}: its name has characters that models cannot write; leave it out "
            "with tfactory.tools"
        )
    hint = tool.idempotent if settings.idempotent is None else settings.idempotent
    options = ToolOptions(
        timeout=settings.timeout,
        ordered=settings.isolation != "shared",  # the calls of a turn share the state of the session
        pure=marked(settings.pure, tool.name),
        stateful=marked(settings.stateful, tool.name),
        idempotent=marked(hint, tool.name),
        retries=settings.retries,
        concurrency=settings.concurrency,
        rate=settings.rate,
        server=config.name,
        version=f"{tool.version} {config.launch}".strip(),
    )
    parameters, description = without_titles(tool.parameters), tool.description
    if text is not None:
        parameters = parameters if text.parameters is None else text.parameters
        description = description if text.description is None else text.description
    return Offer(config.name, tool.name, _spec(name, description.strip(), parameters, config.where), options)


def marked(option: bool | list[str], tool: str) -> bool:
    """Return whether an option such as `pure` holds for the tool."""
    return tool in option if isinstance(option, list) else option


def _spec(name: str, description: str, parameters: dict[str, Any], where: str) -> ToolSpec:
    """Return a checked one. `$schema` says nothing to a model, so it stays only where the schema is wrong without."""
    given = {"type": "object", "properties": {}} | parameters
    bare = ToolSpec(name, description, {key: value for key, value in given.items() if key != "$schema"})
    with contextlib.suppress(ValueError):
        check_schema(bare, where)
        return bare
    try:
        check_schema(whole := ToolSpec(name, description, given), where)
    except ValueError as error:
        raise ValueError(f"{error}; mend the server, or leave the tool out with tfactory.tools") from None
    return whole
