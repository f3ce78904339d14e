"""Make objects from options that a user wrote: `make_from(Numeric, {"tolerance": 0.01}, "rule numeric")`.

The object is its own schema: a pydantic dataclass with `config=STRICT`, or a function or `__init__` under
`@validate_call(config=STRICT)`. Every mistake becomes an OptionError that names all wrong options at once, with the
nearest right name and never with a secret.
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

# strict: no "8" for 8 and no true for 1. Inputs stay out of pydantic's own text, as they may be secrets.
STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, hide_input_in_errors=True
)

Count = Annotated[int, Field(ge=1)]
ZeroOrMore = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]

_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")

Key = tuple[str | int, ...]


@dataclass(slots=True, frozen=True)
class Wrong:
    """One option and what is wrong with it, as it goes on after its name; `value` is what was given."""

    option: str
    text: str
    value: Any = ...

    def __str__(self) -> str:
        got = "" if self.value is ... else f" (got {show(self.option, self.value)})"
        return f"{self.option} {self.text}{got}".strip()


class OptionError(ValueError):
    """Every option that is wrong, by its name. `option` is empty where the mistake is in several together."""

    def __init__(self, *wrong: Wrong) -> None:
        super().__init__("; ".join(map(str, wrong)))
        self.wrong = wrong

    def within(self, option: str) -> OptionError:
        """Return the same error for options that are the value of another one."""
        return OptionError(
            *(replace(each, option=f"{option}.{each.option}".strip(".")) for each in self.wrong)
        )


class Unknown(ValueError):
    """Says that a name leads nowhere, in the last place that was looked at."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


def make_from(target: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """Return `target` called with options that a user wrote; raise OptionError with all that is wrong."""
    if not isinstance(options, Mapping):
        raise OptionError(
            Wrong("", f"the options of {what} must be a mapping such as {{name: value}}", options)
        )
    options = {str(option): value for option, value in options.items()}
    known = list(inspect.signature(target).parameters)
    try:
        places = (target, getattr(target, "__init__", None))
        if not any(
            hasattr(each, mark) for each in places for mark in ("__pydantic_validator__", "raw_function")
        ):
            _bind(target, options, what)  # pydantic does not check its options
        return target(**options)
    except ValidationError as error:
        # `from None`: pydantic's own text may repeat the values, secrets among them.
        raise OptionError(*_explain(error, options, known, what)) from None


def make_named(
    kinds: Mapping[str, Callable[..., Any]], options: Mapping[str, Any] | str, key: str, what: str
) -> Any:
    """Return the object that `options[key]` names among `kinds`, made from the other options; a text names it alone."""
    if isinstance(options, str):
        options = {key: options}
    if not isinstance(options, Mapping):
        text = f"a {what} is its name or a mapping such as {{{key}: {next(iter(kinds))}}}"
        raise OptionError(Wrong("", text, options))
    name = options.get(key)
    if not isinstance(name, str) or name not in kinds:
        text = one_of(name, kinds)
        raise OptionError(Wrong(key, text, name) if key in options else Wrong(key, f"is missing; it {text}"))
    rest = {option: value for option, value in options.items() if option != key}
    return make_from(kinds[name], rest, f"{what} {name}")


def nested(target: Callable[..., Any], what: str) -> BeforeValidator:
    """Return an annotation that makes the object from a mapping; anything else is validated as it is."""

    def make(value: Any) -> Any:
        return make_from(target, value, what) if isinstance(value, Mapping) else value

    return BeforeValidator(make)


def one_of(value: Any, choices: Iterable[str]) -> str:
    """Return what to tell somebody whose value is none of the choices."""
    known = list(choices)
    near = nearest(value, known, cutoff=0.5) if isinstance(value, str) else None
    return f"must be one of {', '.join(known)}" + did_you_mean(near)


def explain_value(details: ErrorDetails) -> str:
    """Return one of pydantic's errors in our words, as it goes on after the name of what is wrong."""
    if details["type"] == "literal_error":
        return one_of(details["input"], re.findall(r"'([^']*)'", details["msg"]))
    if details["type"] == "bool_type":
        return "must be true or false"
    if details["type"] == "string_pattern_mismatch" and details.get("ctx", {}).get("pattern") == r"\S":
        return "must be a text"
    text = details["msg"].removeprefix("Value error, ")
    return re.sub(r"^(Input|String|List|Dictionary|Value) should (be|have)", r"must \2", text)


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the choice most like the word, letter case aside."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str | None) -> str:
    return f"; did you mean {name}?" if name else ""


def show(key: str, value: Any) -> str:
    """Return a value for an error text: short, on one line, and never a secret."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if is_secret(key.rsplit(".", 1)[-1], value):
        return "***"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | None) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _bind(target: Callable[..., Any], options: Mapping[str, Any], what: str) -> None:
    """Raise if the names of the options are not those of a plain function or class."""
    signature = inspect.signature(target)
    try:
        signature.bind(**options)
    except TypeError as error:
        text = f"{what} takes {', '.join(signature.parameters) or 'no options'}: {error}"
        raise OptionError(Wrong("", text)) from None


def _explain(
    error: ValidationError, options: Mapping[str, Any], known: Sequence[str], what: str
) -> list[Wrong]:
    errors = error.errors(include_url=False)
    misspelled = {nearest(str(each["loc"][-1]), known) for each in errors if each["type"] in _UNKNOWN}
    found: dict[Key, list[Wrong]] = {}
    for details in errors:
        if details["type"] in _MISSING and details["loc"][-1] in misspelled:
            continue  # it is there, under a wrong name
        key = _in_options(details, options)
        found.setdefault(key, []).extend(_explain_one(details, key, known, what))
    # Of a union each branch tells its own mistake: the ones further inside say more.
    deepest = [key for key in found if not any(other[: len(key)] == key != other for other in found)]
    return [wrong for key in deepest for wrong in _together(found[key])]


def _explain_one(details: ErrorDetails, key: Key, known: Sequence[str], what: str) -> list[Wrong]:
    option, kind = ".".join(map(str, key)), details["type"]
    if kind in _MISSING:
        return [Wrong(option, f"is missing; {what} needs it")]
    if kind in _UNKNOWN and len(key) == 1:
        has = f"it has {', '.join(known)}" if known else "it has none"
        return [Wrong(option, f"is no option of {what}{did_you_mean(nearest(option, known))} ({has})")]
    if kind in _UNKNOWN:
        return [Wrong(option, "is not known here")]
    inner = details.get("ctx", {}).get("error")
    if isinstance(inner, OptionError):
        return list((inner.within(option) if option else inner).wrong)
    return [Wrong(option, explain_value(details), details["input"] if key else ...)]


def _in_options(details: ErrorDetails, options: Mapping[str, Any]) -> Key:
    """Return where in the options an error is: pydantic's own place, without the labels of a union's branches."""
    key: list[str | int] = []
    value: Any = options
    for place, part in enumerate(details["loc"], 1):
        if (isinstance(value, Mapping) and part in value) or (
            isinstance(value, list) and isinstance(part, int)
        ):
            key.append(part)
            value = value[part]  # type: ignore[index]
        elif place == len(details["loc"]) and details["type"] in _MISSING:
            key.append(part)
    return tuple(key)


def _together(wrong: list[Wrong]) -> list[Wrong]:
    """Join what the branches of a union say of one option."""
    if len({each.option for each in wrong}) > 1 or len(wrong) == 1:
        return wrong
    first, *rest = dict.fromkeys(each.text for each in wrong)
    return [replace(wrong[0], text=" or ".join([first, *(text.removeprefix("must be ") for text in rest)]))]
