"""JSON schemas of function signatures, and validation errors that a model can act on."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from TrainingFactory.tools.fingerprint import IdentityCache
from TrainingFactory.types import ToolSpec

# Functions import jsonschema when they need it: it takes a fifth of the start of a command or of a reward process.
if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError as SchemaError
    from jsonschema.protocols import Validator

MAX_PROBLEMS = 3  # listed in one error
MAX_VALUE_CHARS = 60
_DATA_KEYS = ("default", "enum", "const", "examples")  # whose values are data, not schemas


def make_arguments_model(function: Callable[..., Any], name: str, skip_first: bool) -> type[BaseModel]:
    """Create a pydantic model with one field per parameter. The fields are called a0, a1, ... with the parameter names
    as aliases, because a parameter may have a name that BaseModel itself uses."""
    hints = get_type_hints(function, include_extras=True)
    descriptions = _parse_parameter_docs(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
    for index, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {name}: unsupported parameter {parameter}; use named parameters only")
        if parameter.name not in hints:
            raise ValueError(f"tool {name}: parameter {parameter.name!r} needs a type hint, such as str")
        hint = hints[parameter.name]
        default = ... if parameter.default is parameter.empty else parameter.default
        description = _find_description(hint) or descriptions.get(parameter.name)
        fields[f"a{index}"] = (hint, Field(default, alias=parameter.name, description=description))
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def make_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the model's JSON schema without titles and `additionalProperties`, which only cost tokens."""
    schema = without_titles(model.model_json_schema(by_alias=True))
    schema.pop("additionalProperties", None)
    schema.pop("description", None)  # of the pydantic class, not of the tool
    return {"type": "object", "properties": {}} | schema


def get_description(function: Callable[..., Any]) -> str:
    """Return the docstring up to its first section (Args, Returns, ...)."""
    doc = inspect.getdoc(function) or ""
    return re.split(r"\n\s*(?:\w+:[ \t]*\n|:param |\w+\n-{3,})", "\n" + doc, maxsplit=1)[0].strip()


def _parse_parameter_docs(doc: str) -> dict[str, str]:
    """Return the parameter descriptions of a docstring: `name: text` lines under Args:, `:param name: text` lines, and
    numpy's `name : type` lines with the text below. More deeply indented lines continue a text."""
    args_match = re.search(r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+.*\n?|\n)+)", doc, re.MULTILINE)
    google_section = inspect.cleandoc(args_match.group(1)) if args_match else ""
    numpy_match = re.search(r"^Parameters\n-{3,}\n((?:.*\n?)*?)(?=^\w+\n-{3,}|\Z)", doc, re.MULTILINE)
    numpy_section = numpy_match.group(1) if numpy_match else ""
    descriptions = re.findall(r"^(\w+)(?: \(.*\))?:[ \t]+(.+(?:\n[ \t]+.+)*)", google_section, re.MULTILINE)
    descriptions += re.findall(r"^(\w+)[ \t]*(?::.*)?\n((?:[ \t]+.+\n?)+)", numpy_section, re.MULTILINE)
    descriptions += re.findall(r"^:param (?:[^:\n]+ )?(\w+):[ \t]+(.+(?:\n[ \t]+.+)*)", doc, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in descriptions}


def _find_description(hint: Any) -> str | None:
    """Return the first plain string in Annotated[type, "text"], or the description of a Field there."""
    metadata = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    texts = [item.description if isinstance(item, FieldInfo) else item for item in metadata]
    return next((text for text in texts if isinstance(text, str)), None)


# Keywords whose value maps names to schemas.
_SCHEMA_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def without_titles(schema: Any, is_schema: bool = True) -> Any:
    """Remove the keyword `title` from a schema and its parts, but keep properties that are called title."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned_schema = {}
    for key, value in sorted(schema.items(), key=_rank_key) if is_schema else schema.items():
        if is_schema and key == "title":
            continue
        is_data = is_schema and key in _DATA_KEYS
        cleaned_schema[key] = value if is_data else without_titles(value, key not in _SCHEMA_MAP_KEYS)
    return cleaned_schema


def _rank_key(item: tuple[str, Any]) -> int:
    """Return a key's position in the customary order of schemas, because pydantic sorts keys alphabetically."""
    key_order = ("type", "description", "properties", "items", "enum", "default")
    return key_order.index(item[0]) if item[0] in key_order else len(key_order)


def check_schema(spec: ToolSpec, location: str = "") -> None:
    """Raise ValueError if a tool spec is invalid; `location` names its origin in the error."""
    name_problem = None if isinstance(spec.name, str) and spec.name else f"invalid name {spec.name!r}"
    problem = name_problem or _find_schema_problem(spec.parameters)
    if problem:
        origin = f"{location}: " if location else ""
        raise ValueError(
            f"{origin}tool {str(spec.name)[:64]}: {problem}; parameters must be a JSON schema of type object, "
            'for example {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
        )


def make_validator(schema: dict[str, Any]) -> Validator:
    """Return a validator for the JSON Schema draft that the schema names; by default the newest."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    return validator_for(schema, default=Draft202012Validator)(schema)


@IdentityCache  # every episode checks the same schemas
def _find_schema_problem(schema: Any) -> str | None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError as InvalidSchema
    from jsonschema.validators import validator_for

    if not isinstance(schema, dict):
        return f"its parameters are {_shorten(repr(schema))}"
    if schema.get("type", "object") != "object":
        return f"its parameters have the type {_shorten(repr(schema['type']))}"
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except InvalidSchema as error:
        path = ".".join(str(key) for key in error.absolute_path) or "its parameters"
        return f"{_shorten(path)} is not a valid JSON schema ({_shorten(error.message, 120)})"
    except RecursionError:
        return "its parameters are nested too deeply"
    reference = find_unknown_reference(schema)
    return f"its parameters refer to {_shorten(reference)}, which they do not define" if reference else None


def find_unknown_reference(schema: dict[str, Any]) -> str | None:
    """Return the first $ref that the schema does not define, because jsonschema would fetch it; None if all are."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
    for reference in _find_references(schema):
        try:
            resolver.lookup(reference)
        except (Unresolvable, ValueError):
            return reference
    return None


def _find_references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for key, value in schema.items():
            if key not in _DATA_KEYS:
                yield from _find_references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _find_references(item)


_TYPE_KEYWORDS = {"type", "description", "title", "default"}  # any other keyword is a further constraint
_PYTHON_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}


def _has_exact_types(schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Return whether the schema constrains only types and all arguments match (a fast path without jsonschema)."""
    for name, value in arguments.items():
        property_schema = schema.get("properties", {}).get(name)
        has_only_type = isinstance(property_schema, dict) and property_schema.keys() <= _TYPE_KEYWORDS
        if not has_only_type or _PYTHON_TYPES.get(str(property_schema.get("type"))) is not type(value):
            return False
    is_plain = schema.get("type") == "object" and schema.keys() <= _TYPE_KEYWORDS | {"properties", "required"}
    return is_plain and all(name in arguments for name in schema.get("required", ()))


def check_arguments(spec: ToolSpec, validator: Validator, arguments: Any) -> str | None:
    """Return a message for the model that lists the invalid arguments; None if all are valid."""
    if isinstance(arguments, dict) and _has_exact_types(spec.parameters, arguments):
        return None
    errors = sorted(validator.iter_errors(arguments), key=lambda error: len(error.absolute_path))
    return _format_problems(spec, [_describe_problem(error) for error in errors]) if errors else None


def describe_errors(spec: ToolSpec, error: ValidationError) -> str:
    """Return the message of `check_arguments` for pydantic's ValidationError."""
    problems = []
    for detail in error.errors(include_url=False, include_context=False):
        location = _shorten(".".join(str(key) for key in detail["loc"]) or "the arguments")
        is_unexpected = detail["type"] == "extra_forbidden"
        problems.append(
            f"there is no argument `{location}`" if is_unexpected else f"`{location}`: {detail['msg']}"
        )
    return _format_problems(spec, problems)


def _format_problems(spec: ToolSpec, problems: list[str]) -> str:
    omitted_text = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    required_names = spec.parameters.get("required", [])
    arguments = [
        f"{name} ({_describe_schema(schema)}{'' if name in required_names else ', optional'})"
        for name, schema in spec.parameters.get("properties", {}).items()
    ]
    argument_list = ", ".join(arguments) or "none"
    return f"{spec.name}: {'; '.join(problems[:MAX_PROBLEMS])}{omitted_text}. Arguments: {argument_list}."


def _describe_problem(error: SchemaError) -> str:
    location = ".".join(str(key) for key in error.absolute_path) or "the arguments"
    if error.validator == "required":
        return f"{_shorten(location)}: {error.message}" if error.absolute_path else error.message
    if error.validator in ("type", "enum", "const", "anyOf", "oneOf"):
        invalid_value = _shorten(json.dumps(error.instance, ensure_ascii=False, default=str))
        return f"`{_shorten(location)}` must be {_describe_schema(error.schema)}, not {invalid_value}"
    return f"`{_shorten(location)}`: {_shorten(error.message, 200)}"


def _describe_schema(schema: Any) -> str:
    """Return the values that a schema accepts, in a few words."""
    if not isinstance(schema, dict):
        return "any value"
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_describe_schema(choice) for choice in schema[key])
    type_name = schema.get("type", "object" if "$ref" in schema else "any value")
    if isinstance(type_name, list):
        return " or ".join(type_name)
    if type_name == "array" and isinstance(schema.get("items"), dict) and schema["items"]:
        return f"array of {_describe_schema(schema['items'])}"
    return type_name


def _shorten(text: str, max_chars: int = MAX_VALUE_CHARS) -> str:
    return text if len(text) <= max_chars else text[:max_chars] + "..."
