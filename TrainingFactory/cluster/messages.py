"""JSON encoding of engine calls and their results."""

from __future__ import annotations

import dataclasses
from typing import Any

from TrainingFactory.types import Completion, SamplingParams, Weights

TYPES = {kind.__name__: kind for kind in (Completion, SamplingParams, Weights)}
METHODS = ("start", "sample", "load", "score", "close")
MAX_MESSAGE_BYTES = 256 * 2**20  # bytes of one message


def to_json(value: Any) -> Any:
    name = type(value).__name__
    return {"type": name, "fields": dataclasses.asdict(value)} if name in TYPES else value


def from_json(value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {"type", "fields"}:
        return value
    kind, fields = TYPES[value["type"]], value["fields"]
    if kind is not Completion:  # the other types are frozen and hold tuples
        fields = {key: _tuple(field) for key, field in fields.items()}
    return kind(**fields)


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
