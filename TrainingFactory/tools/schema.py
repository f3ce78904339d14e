"""JSON schemas of tools: made from a function's signature; and bad arguments, in words a model can act on."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError as SchemaError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from TrainingFactory.types import ToolSpec

MAX_PROBLEMS = 3  # as many are told at once
MAX_VALUE_CHARS = 60


def arguments_model(function: Callable[..., Any], name: str, skip_first: bool) -> type[BaseModel]:
    """A pydantic model with one field per parameter. Its fields are called a0, a1, ... and carry the real
    names as aliases, because a parameter may have any name, also one that BaseModel uses itself."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"tool {name}: {error}; types in hints must be defined at module level") from error
    explained = _parameter_docs(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
    for index, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"tool {name}: {parameter} cannot be shown to a model; use named parameters only"
            )
        if parameter.name not in hints:
            raise ValueError(f"tool {name}: parameter {parameter.name!r} needs a type hint, for instance str")
        hint = hints[parameter.name]
        default = ... if parameter.default is parameter.empty else parameter.default
        description = _annotated_text(hint) or explained.get(parameter.name)
        fields[f"a{index}"] = (hint, Field(default, alias=parameter.name, description=description))
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticUserError as error:
        raise ValueError(f"tool {name}: a type hint cannot be turned into a JSON schema: {error}") from error


def parameters_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's JSON schema without what only costs tokens: titles, and the rule against extra arguments
    (which the model enforces anyway)."""
    schema = _without_titles(model.model_json_schema(by_alias=True))
    schema.pop("additionalProperties", None)
    schema.pop("description", None)  # of the pydantic class, not of the tool
    return {"type": "object", "properties": {}} | schema


def description_of(function: Callable[..., Any]) -> str:
    """The docstring up to its first section (Args, Returns, ...)."""
    doc = inspect.getdoc(function) or ""
    return re.split(r"\n\s*(?:\w+:[ \t]*\n|:param )", "\n" + doc, maxsplit=1)[0].strip()


def _parameter_docs(doc: str) -> dict[str, str]:
    """The texts of `name: text` lines under Args: and of `:param name: text` lines."""
    section = re.search(r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+.*\n?|\n)+)", doc, re.MULTILINE)
    listed = section.group(1) if section else ""
    lines = re.findall(r"^[ \t]+(\w+)(?: \([^)]*\))?:[ \t]+(.+)$", listed, re.MULTILINE)
    return dict(lines) | dict(re.findall(r"^:param (\w+):[ \t]+(.+)$", doc, re.MULTILINE))


def _annotated_text(hint: Any) -> str | None:
    """The first plain string in Annotated[type, "text"]."""
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((note for note in notes if isinstance(note, str)), None)


def _without_titles(schema: Any, is_schema: bool = True) -> Any:
    """`title` goes where it is a keyword and stays where it is the name of a property."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned = {}
    for key, value in sorted(schema.items(), key=_reading_order) if is_schema else schema.items():
        if is_schema and key == "title":
            continue
        is_data = is_schema and key in ("default", "enum", "const", "examples")
        cleaned[key] = value if is_data else _without_titles(value, key not in ("properties", "$defs"))
    return cleaned


def _reading_order(item: tuple[str, Any]) -> int:
    """The order everybody writes, and models have seen: pydantic's own is alphabetical."""
    usual = ("type", "description", "properties", "items", "enum", "default")
    return usual.index(item[0]) if item[0] in usual else len(usual)


def schema_problems(spec: ToolSpec, validator: Draft202012Validator, arguments: Any) -> str | None:
    """What is wrong with the arguments, or None."""
    errors = sorted(validator.iter_errors(arguments), key=lambda error: len(error.absolute_path))
    return _explain(spec, (_schema_problem(error) for error in errors)) if errors else None


def model_problems(spec: ToolSpec, error: ValidationError) -> str:
    """The same for what pydantic found."""
    problems = []
    for found in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in found["loc"]) or "the arguments"
        if found["type"] == "extra_forbidden":
            problems.append(f"there is no argument `{_short(where)}`")
        else:
            problems.append(f"`{_short(where)}`: {found['msg']}")
    return _explain(spec, problems)


def _explain(spec: ToolSpec, problems: Iterable[str]) -> str:
    listed = list(problems)
    more = f"; and {len(listed) - MAX_PROBLEMS} more" if len(listed) > MAX_PROBLEMS else ""
    properties = spec.parameters.get("properties", {})
    required = spec.parameters.get("required", [])
    wanted = [
        f"{name} ({_expected(schema)}{'' if name in required else ', optional'})"
        for name, schema in properties.items()
    ]
    return f"{spec.name}: {'; '.join(listed[:MAX_PROBLEMS])}{more}. Arguments: {', '.join(wanted) or 'none'}."


def _schema_problem(error: SchemaError) -> str:
    where = ".".join(str(part) for part in error.absolute_path) or "the arguments"
    if error.validator == "required":
        return f"{_short(where)}: {error.message}" if error.absolute_path else error.message
    if error.validator in ("type", "enum", "const", "anyOf", "oneOf"):
        got = _short(json.dumps(error.instance, ensure_ascii=False, default=str))
        return f"`{_short(where)}` must be {_expected(error.schema)}, not {got}"
    return f"`{_short(where)}`: {_short(error.message, 200)}"


def _expected(schema: Any) -> str:
    """A schema in a few words."""
    if not isinstance(schema, dict):
        return "any value"
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_expected(choice) for choice in schema[key])
    kind = schema.get("type", "object" if "$ref" in schema else "any value")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array" and isinstance(schema.get("items"), dict) and schema["items"]:
        return f"array of {_expected(schema['items'])}"
    return kind


def _short(text: str, limit: int = MAX_VALUE_CHARS) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
