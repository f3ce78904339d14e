"""Rules about answers that are JSON: the same value, or one of a schema."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, ClassVar

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.rules.answers import Extract, Extraction
from TrainingFactory.tools.schema import unknown_reference, validator_of
from TrainingFactory.types import Reward

MAX_JSON_CHARS = 200_000
NOTHING: Any = object()  # null is a value
_FENCED = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.S)


def last_fenced(text: str) -> str | None:
    """Return the last block between ``` lines."""
    blocks = _FENCED.findall(text)
    return blocks[-1].strip() if blocks else None


def read_json(text: str) -> Any:
    """Return the JSON value that a text is, or that its last fenced block is; NOTHING if there is none."""
    value = strict_json(text)
    return strict_json(last_fenced(text) or "") if value is NOTHING else value


def strict_json(text: str) -> Any:
    """Read all of the text as JSON, else NOTHING. A key that occurs twice and NaN are no JSON here."""
    try:
        if len(text) <= MAX_JSON_CHARS:
            return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    return NOTHING


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def same_json(given: Any, right: Any) -> bool:
    """Return whether it is the same JSON value; of numbers that are not whole, up to rounding. True is not 1."""
    if isinstance(given, bool) or isinstance(right, bool):
        return given is right
    if isinstance(given, int | float) and isinstance(right, int | float):
        whole = isinstance(given, int) and isinstance(right, int)
        try:
            return given == right or (not whole and math.isclose(given, right, abs_tol=1e-12))
        except OverflowError:  # a whole number that no float can hold
            return False
    if isinstance(given, dict) and isinstance(right, dict):
        return given.keys() == right.keys() and all(same_json(given[key], right[key]) for key in right)
    if isinstance(given, list) and isinstance(right, list):
        return len(given) == len(right) and all(map(same_json, given, right))
    return type(given) is type(right) and given == right


def checked_schema(schema: Any) -> dict[str, Any]:
    """Return the schema; raise ValueError for one that cannot be used."""
    try:
        validator_for(schema, default=type(validator_of({}))).check_schema(schema)
    except (SchemaError, TypeError, AttributeError) as error:
        said = getattr(error, "message", str(error))
        raise ValueError(f"is no JSON schema ({str(said)[:120]})") from error
    if unknown := unknown_reference(schema):
        raise ValueError(f"refers to {unknown}, which is not in it")
    return schema


@dataclass(config=STRICT, frozen=True, kw_only=True)
class JsonMatch(Extraction):
    """Reward the same JSON value as the task's answer, of which text that is JSON is read. `partial`: for objects the
    share of the right keys."""

    rule: ClassVar[str] = "json"
    extract: Extract = "whole"
    partial: bool = False

    def __call__(self, episode: Episode) -> Reward:
        right = episode.task.answer
        if isinstance(right, str):
            right = read_json(right)
        if right is None or right is NOTHING:
            raise ValueError(
                f"task {episode.task.id}: its answer is no JSON value, so the rule json cannot score it"
            )
        given = read_json(self.answer_of(episode.trajectory) or "")
        return self.rewarded(0.0 if given is NOTHING else self._share(given, right))

    def _share(self, given: Any, right: Any) -> float:
        if not self.partial or not isinstance(right, dict) or not isinstance(given, dict) or not right:
            return float(same_json(given, right))
        hits = sum(key in given and same_json(given[key], value) for key, value in right.items())
        return hits / len(right.keys() | given.keys())


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SchemaMatch(Extraction):
    """Reward JSON of the given schema."""

    rule: ClassVar[str] = "schema"
    extract: Extract = "whole"
    schema: Annotated[dict[str, Any], BeforeValidator(checked_schema)]

    def __call__(self, episode: Episode) -> Reward:
        given = read_json(self.answer_of(episode.trajectory) or "")
        try:
            return self.rewarded(given is not NOTHING and validator_of(self.schema).is_valid(given))
        except (OverflowError, RecursionError):  # a number or a depth that cannot be checked
            return self.rewarded(0.0)
