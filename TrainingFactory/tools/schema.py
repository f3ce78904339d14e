"""Makes JSON schemas from signatures, and explains bad arguments in words that a model can act on."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError as InvalidSchema
from jsonschema.exceptions import ValidationError as SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from TrainingFactory.tools.fingerprint import ByIdentity
from TrainingFactory.types import ToolSpec

MAX_PROBLEMS = 3  # as many are told at once
MAX_VALUE_CHARS = 60


def arguments_model(function: Callable[..., Any], name: str, skip_first: bool) -> type[BaseModel]:
    """Make a pydantic model with one field per parameter. Its fields are called a0, a1, ... and carry the real
    names as aliases, because a parameter may have any name, also one that BaseModel uses itself."""
    hints = get_type_hints(function, include_extras=True)
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
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def parameters_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the model's JSON schema without what only costs tokens: titles, and the rule against extra arguments
    (which the model enforces anyway)."""
    schema = without_titles(model.model_json_schema(by_alias=True))
    schema.pop("additionalProperties", None)
    schema.pop("description", None)  # of the pydantic class, not of the tool
    return {"type": "object", "properties": {}} | schema


def description_of(function: Callable[..., Any]) -> str:
    """Return the docstring up to its first section (Args, Returns, ...)."""
    doc = inspect.getdoc(function) or ""
    return re.split(r"\n\s*(?:\w+:[ \t]*\n|:param |\w+\n-{3,})", "\n" + doc, maxsplit=1)[0].strip()


def _parameter_docs(doc: str) -> dict[str, str]:
    """Read what a docstring says about parameters: `name: text` lines under Args:, `:param name: text` lines, and
    numpy's `name : type` lines with the text below. A text may go on in lines that are indented further."""
    section = re.search(r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+.*\n?|\n)+)", doc, re.MULTILINE)
    listed = inspect.cleandoc(section.group(1)) if section else ""
    numpy = re.search(r"^Parameters\n-{3,}\n((?:.*\n?)*?)(?=^\w+\n-{3,}|\Z)", doc, re.MULTILINE)
    found = re.findall(r"^(\w+)(?: \(.*\))?:[ \t]+(.+(?:\n[ \t]+.+)*)", listed, re.MULTILINE)
    underlined = numpy.group(1) if numpy else ""
    found += re.findall(r"^(\w+)[ \t]*(?::.*)?\n((?:[ \t]+.+\n?)+)", underlined, re.MULTILINE)
    found += re.findall(r"^:param (?:[^:\n]+ )?(\w+):[ \t]+(.+(?:\n[ \t]+.+)*)", doc, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _annotated_text(hint: Any) -> str | None:
    """Return the first plain string in Annotated[type, "text"], or the description of a Field there."""
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    texts = [note.description if isinstance(note, FieldInfo) else note for note in notes]
    return next((text for text in texts if isinstance(text, str)), None)


_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of schemas


def without_titles(schema: Any, is_schema: bool = True) -> Any:
    """`title` goes where it is a keyword and stays where it is the name of a property."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned = {}
    for key, value in sorted(schema.items(), key=_reading_order) if is_schema else schema.items():
        if is_schema and key == "title":
            continue
        is_data = is_schema and key in ("default", "enum", "const", "examples")
        cleaned[key] = value if is_data else without_titles(value, key not in _BY_NAME)
    return cleaned


def _reading_order(item: tuple[str, Any]) -> int:
    """Sort keys as everybody writes them, and models have seen: pydantic's own order is alphabetical."""
    usual = ("type", "description", "properties", "items", "enum", "default")
    return usual.index(item[0]) if item[0] in usual else len(usual)


def check_schema(spec: ToolSpec, where: str = "") -> None:
    """Raise ValueError if the spec of a tool from elsewhere cannot be used; `where` says whose it is."""
    problem = None if isinstance(spec.name, str) and spec.name else f"its name is {spec.name!r}"
    problem = problem or _schema_fault(spec.parameters)
    if problem:
        owner = f"{where}: " if where else ""
        raise ValueError(
            f"{owner}tool {str(spec.name)[:64]}: {problem}; parameters must be a JSON schema of type object, "
            'for instance {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
        )


def validator_of(schema: dict[str, Any]) -> Validator:
    """Make a validator of the draft that the schema names, else of the newest."""
    return validator_for(schema, default=Draft202012Validator)(schema)


@ByIdentity  # every episode asks again
def _schema_fault(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return f"its parameters are {_short(repr(schema))}"
    if schema.get("type", "object") != "object":
        return f"its parameters have the type {_short(repr(schema['type']))}"
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except InvalidSchema as error:
        place = ".".join(str(part) for part in error.absolute_path) or "its parameters"
        return f"{_short(place)} is no JSON schema ({_short(error.message, 120)})"
    except RecursionError:
        return "its parameters are nested too deeply"
    unknown = unknown_reference(schema)
    return f"its parameters refer to {_short(unknown)}, which is not in them" if unknown else None


def unknown_reference(schema: dict[str, Any]) -> str | None:
    """Return the first $ref that leads nowhere within the schema, if there is one: such a one would be fetched over the
    network when arguments are checked."""
    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except (Unresolvable, ValueError):
            return reference
    return None


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for key, value in schema.items():
            if key not in ("default", "enum", "const", "examples"):
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


_SAID = {"type", "description", "title", "default"}  # any other keyword asks for more than a type
_EXACT = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}


def _plainly_right(schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Tell whether the schema names nothing but types, and the arguments have exactly these: most do, soon seen."""
    for name, value in arguments.items():
        asked = schema.get("properties", {}).get(name)
        plain = isinstance(asked, dict) and asked.keys() <= _SAID
        if not plain or _EXACT.get(str(asked.get("type"))) is not type(value):
            return False
    only = schema.get("type") == "object" and schema.keys() <= _SAID | {"properties", "required"}
    return only and all(name in arguments for name in schema.get("required", ()))


def schema_problems(spec: ToolSpec, validator: Validator, arguments: Any) -> str | None:
    """Say what is wrong with the arguments; None if nothing is."""
    if isinstance(arguments, dict) and _plainly_right(spec.parameters, arguments):
        return None
    errors = sorted(validator.iter_errors(arguments), key=lambda error: len(error.absolute_path))
    return _explain(spec, [_schema_problem(error) for error in errors]) if errors else None


def model_problems(spec: ToolSpec, error: ValidationError) -> str:
    """Say the same for what pydantic found."""
    problems = []
    for found in error.errors(include_url=False, include_context=False):
        where = _short(".".join(str(part) for part in found["loc"]) or "the arguments")
        unknown = found["type"] == "extra_forbidden"
        problems.append(f"there is no argument `{where}`" if unknown else f"`{where}`: {found['msg']}")
    return _explain(spec, problems)


def _explain(spec: ToolSpec, problems: list[str]) -> str:
    more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    properties = spec.parameters.get("properties", {})
    required = spec.parameters.get("required", [])
    wanted = [
        f"{name} ({_expected(schema)}{'' if name in required else ', optional'})"
        for name, schema in properties.items()
    ]
    listed = ", ".join(wanted) or "none"
    return f"{spec.name}: {'; '.join(problems[:MAX_PROBLEMS])}{more}. Arguments: {listed}."


def _schema_problem(error: SchemaError) -> str:
    where = ".".join(str(part) for part in error.absolute_path) or "the arguments"
    if error.validator == "required":
        return f"{_short(where)}: {error.message}" if error.absolute_path else error.message
    if error.validator in ("type", "enum", "const", "anyOf", "oneOf"):
        got = _short(json.dumps(error.instance, ensure_ascii=False, default=str))
        return f"`{_short(where)}` must be {_expected(error.schema)}, not {got}"
    return f"`{_short(where)}`: {_short(error.message, 200)}"


def _expected(schema: Any) -> str:
    """Describe a schema in a few words."""
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
