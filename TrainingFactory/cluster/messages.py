"""Calls of an engine, and their answers, as JSON: what `Engine` takes and returns and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

from TrainingFactory.types import Completion, SamplingParams, Weights

TYPES = {each.__name__: each for each in (Completion, SamplingParams, Weights)}
METHODS = ("start", "sample", "load", "score", "close")
LARGEST = 256 * 2**20  # bytes of one message


def to_json(value: Any) -> Any:
    if type(value).__name__ in TYPES:
        return {"type": type(value).__name__, "fields": dataclasses.asdict(value)}
    return value


def from_json(value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {"type", "fields"}:
        return value
    kind, fields = TYPES[value["type"]], value["fields"]
    if kind is SamplingParams:
        fields["stop_ids"] = tuple(fields["stop_ids"])
    if kind is Weights:
        fields["canary"] = tuple(tuple(each) for each in fields["canary"])
    return kind(**fields)
