"""Construction of objects from a user's options: `make_from(Numeric, {"tolerance": 0.01}, "rule numeric")`.

The class or function is its own schema: a pydantic dataclass with `config=STRICT`, or a function or `__init__` with
`@validate_call(config=STRICT)`. All invalid options are reported together in one OptionError, with the closest valid
name and without secrets.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from TrainingFactory.common.texts import is_secret

# strict: "8" is not 8 and true is not 1. Inputs are hidden in pydantic's messages, because they may be secrets.
STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, hide_input_in_errors=True
)

Count = Annotated[int, Field(ge=1)]
ZeroOrMore = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]

_MISSING_ERROR_TYPES = ("missing", "missing_argument", "missing_keyword_only_argument")
_UNKNOWN_ERROR_TYPES = ("extra_forbidden", "unexpected_keyword_argument")

Key = tuple[str | int, ...]


@dataclass(slots=True, frozen=True)
class InvalidOption:
    """An invalid option: its name, the problem (`text`, which follows the name), and the invalid value."""

    option: str
    text: str
    value: Any = ...

    def __str__(self) -> str:
        shown_value = "" if self.value is ... else f" (got {show_value(self.option, self.value)})"
        return f"{self.option} {self.text}{shown_value}".strip()


class OptionError(ValueError):
    """All invalid options of an object. `option` is empty if the problem concerns several options together."""

    def __init__(self, *invalid_options: InvalidOption) -> None:
        super().__init__("; ".join(map(str, invalid_options)))
        self.invalid_options = invalid_options

    def with_prefix(self, option: str) -> OptionError:
        """Return a copy of the error with `option` as a prefix of each invalid option's name."""
        return OptionError(
            *(replace(error, option=f"{option}.{error.option}".strip(".")) for error in self.invalid_options)
        )


class UnknownNameError(ValueError):
    """Unknown name, which callers may look up elsewhere before they report it."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


def make_from(factory: Callable[..., Any], options: Mapping[str, Any], subject: str) -> Any:
    """Call `factory` with a user's options. Raise OptionError with all invalid options."""
    if not isinstance(options, Mapping):
        raise OptionError(
            InvalidOption("", f"the options of {subject} must be a mapping such as {{name: value}}", options)
        )
    options = {str(option): value for option, value in options.items()}
    valid_names = list(inspect.signature(factory).parameters)
    try:
        functions = (factory, getattr(factory, "__init__", None))
        markers = ("__pydantic_validator__", "raw_function")
        if not any(hasattr(function, marker) for function in functions for marker in markers):
            _check_signature(factory, options, subject)  # pydantic does not validate its options
        return factory(**options)
    except ValidationError as error:
        # `from None`: pydantic's message may repeat the values, which may be secrets.
        raise OptionError(*_explain_errors(error, options, valid_names, subject)) from None


def make_named(
    factories: Mapping[str, Callable[..., Any]], options: Mapping[str, Any] | str, key: str, subject: str
) -> Any:
    """Create an object of the kind named by `options[key]`, with the other options; a string is the name alone."""
    if isinstance(options, str):
        options = {key: options}
    if not isinstance(options, Mapping):
        text = f"a {subject} must be a name or a mapping such as {{{key}: {next(iter(factories))}}}"
        raise OptionError(InvalidOption("", text, options))
    name = options.get(key)
    if not isinstance(name, str) or name not in factories:
        text = show_choices(name, factories)
        raise OptionError(
            InvalidOption(key, text, name) if key in options else InvalidOption(key, f"is missing; it {text}")
        )
    other_options = {option: value for option, value in options.items() if option != key}
    return make_from(factories[name], other_options, f"{subject} {name}")


def from_mapping(factory: Callable[..., Any], subject: str) -> BeforeValidator:
    """Return a pydantic validator that calls `factory` with a mapping and keeps other values unchanged."""

    def make_value(value: Any) -> Any:
        return make_from(factory, value, subject) if isinstance(value, Mapping) else value

    return BeforeValidator(make_value)


def show_choices(value: Any, choices: Iterable[str]) -> str:
    """Return the error text for a value outside the choices, with the closest choice."""
    valid_names = list(choices)
    closest_name = nearest(value, valid_names, cutoff=0.5) if isinstance(value, str) else None
    return f"must be one of {', '.join(valid_names)}" + did_you_mean(closest_name)


def explain_value(details: ErrorDetails) -> str:
    """Rephrase a pydantic error as the words after an option's name, such as "must be true or false"."""
    if details["type"] == "literal_error":
        return show_choices(details["input"], re.findall(r"'([^']*)'", details["msg"]))
    if details["type"] == "bool_type":
        return "must be true or false"
    if details["type"] == "string_pattern_mismatch" and details.get("ctx", {}).get("pattern") == r"\S":
        return "must be a text"
    text = details["msg"].removeprefix("Value error, ")
    return re.sub(r"^(Input|String|List|Dictionary|Value) should (be|have)", r"must \2", text)


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the choice most similar to the word, ignoring case. None: no choice is similar enough."""
    choices_by_lowercase = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(word.lower(), choices_by_lowercase, n=1, cutoff=cutoff)
    return choices_by_lowercase[matches[0]] if matches else None


def did_you_mean(name: str | None) -> str:
    return f"; did you mean {name}?" if name else ""


def show_value(key: str, value: Any) -> str:
    """Format a value for an error message: short, on one line, with secrets hidden."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if is_secret(key.rsplit(".", 1)[-1], value):
        return "***"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | None) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_signature(factory: Callable[..., Any], options: Mapping[str, Any], subject: str) -> None:
    """Raise OptionError if the options do not match the signature of a function or class without validation."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        text = f"{subject} takes {', '.join(signature.parameters) or 'no options'}: {error}"
        raise OptionError(InvalidOption("", text)) from None


def _explain_errors(
    error: ValidationError, options: Mapping[str, Any], valid_names: Sequence[str], subject: str
) -> list[InvalidOption]:
    errors = error.errors(include_url=False)
    unknown_names = [str(details["loc"][-1]) for details in errors if details["type"] in _UNKNOWN_ERROR_TYPES]
    intended_names = {nearest(name, valid_names) for name in unknown_names}
    by_key: dict[Key, list[InvalidOption]] = {}
    for details in errors:
        if details["type"] in _MISSING_ERROR_TYPES and details["loc"][-1] in intended_names:
            continue  # it is set, under a misspelled name
        key = _find_key(details, options)
        by_key.setdefault(key, []).extend(_explain_error(details, key, valid_names, subject))
    # Every branch of a union reports its own error: the most deeply nested ones are the most specific.
    leaf_keys = [
        key for key in by_key if not any(longer_key[: len(key)] == key != longer_key for longer_key in by_key)
    ]
    return [invalid_option for key in leaf_keys for invalid_option in _merge_branches(by_key[key])]


def _explain_error(
    details: ErrorDetails, key: Key, valid_names: Sequence[str], subject: str
) -> list[InvalidOption]:
    option, error_type = ".".join(map(str, key)), details["type"]
    if error_type in _MISSING_ERROR_TYPES:
        return [InvalidOption(option, f"is missing; {subject} needs it")]
    if error_type in _UNKNOWN_ERROR_TYPES and len(key) == 1:
        hint = did_you_mean(nearest(option, valid_names))
        return [
            InvalidOption(
                option, f"is not an option of {subject}{hint} (options: {', '.join(valid_names) or 'none'})"
            )
        ]
    if error_type in _UNKNOWN_ERROR_TYPES:
        return [InvalidOption(option, "is an unknown key")]
    inner_error = details.get("ctx", {}).get("error")
    if isinstance(inner_error, OptionError):
        return list((inner_error.with_prefix(option) if option else inner_error).invalid_options)
    return [InvalidOption(option, explain_value(details), details["input"] if key else ...)]


def _find_key(details: ErrorDetails, options: Mapping[str, Any]) -> Key:
    """Return the key of the invalid option: pydantic's error location without the labels of union branches."""
    key: list[str | int] = []
    nested_options: Any = options
    for depth, key_part in enumerate(details["loc"], 1):
        if (isinstance(nested_options, Mapping) and key_part in nested_options) or (
            isinstance(nested_options, list) and isinstance(key_part, int)
        ):
            key.append(key_part)
            nested_options = nested_options[key_part]  # type: ignore[index]
        elif depth == len(details["loc"]) and details["type"] in _MISSING_ERROR_TYPES:
            key.append(key_part)
    return tuple(key)


def _merge_branches(errors: list[InvalidOption]) -> list[InvalidOption]:
    """Merge the errors of several union branches about the same option."""
    if len({error.option for error in errors}) > 1 or len(errors) == 1:
        return errors
    head, *tail = dict.fromkeys(error.text for error in errors)
    return [replace(errors[0], text=" or ".join([head, *(text.removeprefix("must be ") for text in tail)]))]
