"""Generates the config reference from the schema: every option with its default, values and description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from TrainingFactory.config.schema import ToolEntry, TrainingConfig, get_sections
from TrainingFactory.config.section import Section
from TrainingFactory.web.form import HELP_TEXTS

HEAD = """# Config

Look up any option of a config: its default, its values and what it does. Set options in a YAML file, on the command
line (`tfactory train config.yaml training.batch_size=4`) or as keywords of a trainer (`GRPOTrainer(batch_size=4)`).

Invalid keys and values are reported together, with file, line and the closest match. This page is generated from
`TrainingFactory/config/schema.py`.
"""
LIMITS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
TYPES = {"boolean": "true, false", "array": "list", "object": "mapping", "string": "text"}


def config_page() -> str:
    parts = [HEAD]
    for name in TrainingConfig.model_fields:
        section = get_sections().get(name, ToolEntry)  # tools is a list of entries
        text = HELP_TEXTS.get(name) or f"Options of `training.algorithm: {name}`."
        parts.append(f"## {name}\n\n{text}\n\n" + section_table(name, section))
    return "\n".join(parts)


def section_table(name: str, section: type[Section]) -> str:
    """Return a table with one row per option of the section."""
    schema = section.model_json_schema()
    rows = ["| Option | Default | Values | Description |", "|---|---|---|---|"]
    for key, option in schema["properties"].items():
        default = "required" if key in schema.get("required", []) else code(default_of(section, key))
        cells = [f'<span id="{name}.{key}"></span>`{key}`', default, values(option)]
        rows.append(f"| {' | '.join(map(escape_bars, [*cells, description(option)]))} |")
    return "\n".join(rows) + "\n"


def default_of(section: type[Section], key: str) -> Any:
    return section.model_fields[key].get_default(call_default_factory=True)


def code(value: Any) -> str:
    """Return a value as it is written in YAML."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def values(option: Mapping[str, Any]) -> str:
    """Return the type, range or choices of an option."""
    kinds = option.get("anyOf", [option])
    return ", ".join(kind_text(kind) for kind in kinds)


def kind_text(kind: Mapping[str, Any]) -> str:
    if "enum" in kind or "const" in kind:
        return ", ".join(map(code, kind.get("enum", [kind.get("const")])))
    if kind.get("type") == "null":
        return "`null`"
    name = TYPES.get(kind.get("type", ""), str(kind.get("type", "any")))
    limits = [text.format(kind[key]) for key, text in LIMITS.items() if key in kind]
    return " ".join([name, *limits])


def description(option: Mapping[str, Any]) -> str:
    return " ".join(option.get("description", "").split())


def escape_bars(cell: str) -> str:
    return cell.replace("|", "\\|")
