"""Generates the reference of the public Python names from their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from pydantic import BaseModel

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
LONGEST_SIGNATURE = 100
HEAD = """# Python

Look up the classes and functions that programs import: trainers, tools, environments, rewards, data types and
interfaces. Keywords of trainers that are options of the config are in [the config reference](config.md).

"""
# Title of a part of the page, the module that its names are imported from, the names.
PARTS = [
    (
        "Trainers",
        "TrainingFactory",
        "SFTTrainer RFTTrainer GRPOTrainer PPOTrainer DPOTrainer KTOTrainer RewardModelTrainer",
    ),
    ("Trainer base class and report", "TrainingFactory.trainers.trainer", "Trainer TrainingReport"),
    ("Config", "TrainingFactory.config", "TrainingConfig load_config ConfigError"),
    (
        "Tools",
        "TrainingFactory.tools",
        "tool as_tool FunctionTool MCPTools ToolOptions ToolCache ToolRuntime AsyncToolExecutor",
    ),
    (
        "Environments",
        "TrainingFactory.envs",
        "ToolEnvironment SelfPlayEnvironment CalculatorEnvironment SearchEnvironment",
    ),
    (
        "Rewards",
        "TrainingFactory.rewards",
        "as_reward Combined ProcessReward calculate_process_reward LearnedReward Unscored",
    ),
    ("Rollouts", "TrainingFactory.evaluation.rollouts", "Rollouts"),
    ("Recorded episodes", "TrainingFactory.data.trajectories", "load_trajectories"),
    (
        "Data types",
        "TrainingFactory.types",
        "Task Reward Message ToolCall ToolResult ToolSpec Turn Trajectory Step SamplingParams Completion",
    ),
    (
        "Interfaces",
        "TrainingFactory.protocols",
        "Episode Environment EnvironmentFactory Tool ToolSource ToolSession GroupReward Scorer Sampler "
        "SamplingSession ChatFormat Policy Algorithm Tracker",
    ),
]


def python_page() -> str:
    parts = [HEAD]
    for title, module, names in PARTS:
        parts.append(f"## {title}\n")
        home = import_module(module)
        parts.extend(name_entry(module, name, getattr(home, name)) for name in names.split())
    return "\n".join([*parts, "## Types of trainer arguments\n", *alias_entries()])


def alias_entries() -> list[str]:
    """Return an entry for each type alias of the trainers' arguments; the comment before an alias is its text."""
    source = inspect.getsource(import_module("TrainingFactory.trainers.inputs"))
    aliases = re.findall(r"((?:^# .*\n)*)^(\w+): TypeAlias = (\((?:\n .*)*\n\)|.*)$", source, re.MULTILINE)
    entries = []
    for comment, name, definition in aliases:
        text = " ".join(line.removeprefix("# ") for line in comment.splitlines())
        code = code_block(f"from TrainingFactory import {name}\n\n{name} = {definition.strip(chr(34))}")
        entries.append(f"### {name}\n\n{code}\n{text}\n")
    return entries


def name_entry(module: str, name: str, item: Any) -> str:
    """Return the entry of a class or function: its import, signature, docstring, fields and methods."""
    lines = [f"### {name}\n", code_block(f"from {module} import {name}\n\n{signature(name, item)}")]
    lines.append(docstring(f"{module}.{name}", item))
    if inspect.isclass(item):
        lines += [f"- `{field}`{text}" for field, text in field_texts(item)] + [""]
        for method, member in public_methods(item):
            lines += [f"#### {name}.{method}\n", code_block(signature(method, member))]
            lines.append(clean(member.__doc__))
    return "\n".join(lines)


def code_block(text: str) -> str:
    return f"```python\n{text}\n```\n"


def clean(doc: str | None) -> str:
    return inspect.cleandoc(doc or "") + "\n"


def docstring(where: str, item: Any) -> str:
    """Return the docstring of a class, with that of its `__init__`, or of a function."""
    doc = item.__doc__
    if is_dataclass(item) and (doc or "").startswith(f"{item.__name__}("):  # generated from the fields
        doc = ""
    elif not doc:
        raise ValueError(f"{where} is public and has no docstring: write one")
    init = item.__dict__.get("__init__") if inspect.isclass(item) and not is_dataclass(item) else None
    return "\n".join(clean(text) for text in (doc, getattr(init, "__doc__", None)) if text)


def signature(name: str, item: Any) -> str:
    """Return the signature as Python writes it, one parameter per line where it is long."""
    if getattr(item, "_is_protocol", False):
        return f"class {name}(Protocol)"
    if inspect.isclass(item) and issubclass(item, BaseModel):
        return f"class {name}(**sections)"
    if inspect.isclass(item) and issubclass(item, Exception):
        return f"class {name}({item.__base__.__name__})"
    function = getattr(item, "__func__", item)  # of a class method
    keyword = (
        "class" if inspect.isclass(item) else "async def" if inspect.iscoroutinefunction(function) else "def"
    )
    shown = inspect.signature(function)
    decorator = "@classmethod\n" if isinstance(item, classmethod) else ""
    parameters = [each for each in shown.parameters.values() if each.name not in ("self", "cls")]
    texts = with_star(parameters, [parameter_text(parameter) for parameter in parameters])
    returns = shown.return_annotation
    plain = keyword == "class" or returns in (inspect.Signature.empty, None, "None")
    arrow = "" if plain else f" -> {hint(returns)}"
    line = f"{keyword} {name}({', '.join(texts)}){arrow}"
    if len(line) > LONGEST_SIGNATURE:
        line = f"{keyword} {name}(\n    " + ",\n    ".join(texts) + f",\n){arrow}"
    return decorator + line


def with_star(parameters: list[inspect.Parameter], texts: list[str]) -> list[str]:
    """Insert the `*` before keyword-only parameters."""
    kinds = [parameter.kind for parameter in parameters]
    if KEYWORD_ONLY not in kinds or VAR_POSITIONAL in kinds:
        return texts
    first = kinds.index(KEYWORD_ONLY)
    return [*texts[:first], "*", *texts[first:]]


def parameter_text(parameter: inspect.Parameter) -> str:
    stars = {VAR_POSITIONAL: "*", VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    annotated = parameter.annotation is not inspect.Parameter.empty
    if annotated:
        text += f": {hint(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        default = repr(parameter.default)
        if " at 0x" in default or "factory" in default:
            default = "..."
        text += f" = {default}" if annotated else f"={default}"
    return text


def hint(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def field_texts(item: type) -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass, each with its type and its comment in the source."""
    if not is_dataclass(item):
        return
    notes = field_notes(item)
    for field in fields(item):
        if not field.name.startswith("_"):
            note = notes.get(field.name, "")
            yield field.name, f" (`{hint(field.type)}`)" + (f": {note}" if note else "")


def field_notes(item: type) -> dict[str, str]:
    """Return the comment at the end of each field's line in the source."""
    notes = {}
    for line in inspect.getsource(item).splitlines():
        if found := re.match(r"\s{4}(\w+): .*?\s# (.+)$", line):
            notes[found[1]] = found[2]
    return notes


def public_methods(item: type) -> Iterator[tuple[str, Any]]:
    """Yield the documented methods that the class itself defines, in the order of the source."""
    for name, member in item.__dict__.items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        own = inspect.isfunction(function) and function.__module__ == item.__module__
        if own and function.__doc__ and not name.startswith("_"):
            yield name, member if isinstance(member, classmethod) else function
