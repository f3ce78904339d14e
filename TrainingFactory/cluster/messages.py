"""JSON encoding of engine calls and their results."""

from __future__ import annotations

import dataclasses
from typing import Any

from TrainingFactory.types import Completion, SamplingParams, Weights

MESSAGE_TYPES = {cls.__name__: cls for cls in (Completion, SamplingParams, Weights)}
ENGINE_METHODS = ("start", "sample", "load", "score", "close")
MAX_MESSAGE_BYTES = 256 * 2**20  # bytes of one message


def to_json(value: Any) -> Any:
    type_name = type(value).__name__
    return {"type": type_name, "fields": dataclasses.asdict(value)} if type_name in MESSAGE_TYPES else value


def from_json(value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {"type", "fields"}:
        return value
    message_type, fields = MESSAGE_TYPES[value["type"]], value["fields"]
    if message_type is not Completion:  # the other types are frozen and hold tuples
        fields = {key: _lists_to_tuples(field) for key, field in fields.items()}
    return message_type(**fields)


def _lists_to_tuples(value: Any) -> Any:
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list) else value
