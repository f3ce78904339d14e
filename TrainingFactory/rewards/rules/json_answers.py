"""Rules for JSON answers: equal to the reference, or valid for a schema."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.rules.answers import ExtractionRule, ExtractMode
from TrainingFactory.tools.schema import find_unknown_reference, make_validator
from TrainingFactory.types import Reward

MAX_JSON_CHARS = 200_000
NO_JSON: Any = object()  # no JSON value; None is JSON's null
_FENCED_BLOCK = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.S)


def find_last_fenced_block(text: str) -> str | None:
    """Return the content of the last block between ``` lines; None if there is none."""
    blocks = _FENCED_BLOCK.findall(text)
    return blocks[-1].strip() if blocks else None


def read_json(text: str) -> Any:
    """Parse the text, or else its last fenced block, as JSON; return NO_JSON if neither is JSON."""
    value = parse_strict_json(text)
    return parse_strict_json(find_last_fenced_block(text) or "") if value is NO_JSON else value


def parse_strict_json(text: str) -> Any:
    """Parse the whole text as JSON; return NO_JSON if it is not, or has duplicate keys or NaN."""
    try:
        if len(text) <= MAX_JSON_CHARS:
            return json.loads(text, object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        pass
    return NO_JSON


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed_object = dict(pairs)
    if len(parsed_object) != len(pairs):
        raise ValueError("duplicate key")
    return parsed_object


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def same_json(value: Any, reference: Any) -> bool:
    """Return whether two JSON values are equal, floats up to rounding; true is not 1."""
    if isinstance(value, bool) or isinstance(reference, bool):
        return value is reference
    if isinstance(value, int | float) and isinstance(reference, int | float):
        are_integers = isinstance(value, int) and isinstance(reference, int)
        try:
            return value == reference or (not are_integers and math.isclose(value, reference, abs_tol=1e-12))
        except OverflowError:  # an integer that does not fit into a float
            return False
    if isinstance(value, dict) and isinstance(reference, dict):
        has_same_keys = value.keys() == reference.keys()
        return has_same_keys and all(same_json(value[key], reference[key]) for key in reference)
    if isinstance(value, list) and isinstance(reference, list):
        return len(value) == len(reference) and all(map(same_json, value, reference))
    return type(value) is type(reference) and value == reference


def validate_schema(schema: Any) -> dict[str, Any]:
    """Return the schema; raise ValueError if it is invalid."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema, default=type(make_validator({}))).check_schema(schema)
    except (SchemaError, TypeError, AttributeError) as error:
        message = getattr(error, "message", str(error))
        raise ValueError(f"is not a valid JSON schema ({str(message)[:120]})") from error
    if unknown_reference := find_unknown_reference(schema):
        raise ValueError(f"has the reference {unknown_reference}, which the schema does not define")
    return schema


@dataclass(config=STRICT, frozen=True, kw_only=True)
class JsonRule(ExtractionRule):
    """Reward a JSON value equal to the task's answer; an answer that is a string is parsed as JSON. `partial`: for
    objects, reward the share of correct keys."""

    rule: ClassVar[str] = "json"
    extract: ExtractMode = "whole"
    partial: bool = False

    def __call__(self, episode: Episode) -> Reward:
        reference = episode.task.answer
        if isinstance(reference, str):
            reference = read_json(reference)
        if reference is None or reference is NO_JSON:
            raise ValueError(f"task {episode.task.id}: its answer is not JSON, which the rule json needs")
        answer = read_json(self.extract_final_answer(episode.trajectory) or "")
        return self.make_reward(0.0 if answer is NO_JSON else self._compute_correct_share(answer, reference))

    def _compute_correct_share(self, answer: Any, reference: Any) -> float:
        if not (self.partial and reference and isinstance(reference, dict) and isinstance(answer, dict)):
            return float(same_json(answer, reference))
        num_correct = sum(key in answer and same_json(answer[key], value) for key, value in reference.items())
        return num_correct / len(reference.keys() | answer.keys())


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SchemaRule(ExtractionRule):
    """Reward JSON that is valid for `schema`."""

    rule: ClassVar[str] = "schema"
    extract: ExtractMode = "whole"
    schema: Annotated[dict[str, Any], BeforeValidator(validate_schema)]

    def __call__(self, episode: Episode) -> Reward:
        answer = read_json(self.extract_final_answer(episode.trajectory) or "")
        try:
            return self.make_reward(answer is not NO_JSON and make_validator(self.schema).is_valid(answer))
        except (OverflowError, RecursionError):  # too large or too deep to validate
            return self.make_reward(0.0)
