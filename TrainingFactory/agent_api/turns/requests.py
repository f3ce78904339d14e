"""A client's request for a sampled turn in types of this package, which are the same for all API dialects."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from TrainingFactory.common.http.api import ApiError
from TrainingFactory.types import Message, SamplingParams, ToolSpec

MIN_TEMPERATURE = 1e-3  # a lower one can make the logits overflow
MIN_TOP_P = 1e-6
MIN_MESSAGE_TOKENS = 2  # of a message: its content and its end token
MAX_BYTES_PER_TOKEN = 16  # of a body per token of context; plain text has 3 to 5, an escaped emoji 12
SMALL_BODY_BYTES = 64 * 1024  # bytes; a body up to this size is always parsed
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")


def draw_call_id(_: int) -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class ParsedRequest:
    """A validated request. A parameter that would change the answer is either applied or rejected; `ignored_fields`
    names the other fields that this server does not use."""

    messages: list[Message]
    tools: list[ToolSpec]
    params: SamplingParams  # without the seed and max_tokens, which differ between choices
    body: Any = None  # the dialect's own form of the request, from which it writes the response
    model: str | None = None
    n: int = 1
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    stop: list[str] = field(default_factory=list)
    logprobs: bool = False
    stream: bool = False
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # sampling fields, seed and stream, where the client set them
    token_limits: dict[str, int] = field(default_factory=dict)  # field -> maximum sampled tokens
    clamps_limits: bool = False  # reduce a limit that exceeds the context, instead of rejecting the request
    make_call_id: Callable[[int], str] = draw_call_id  # index of a sampled tool call -> its id
    ignored_fields: set[str] = field(default_factory=set)
    max_tokens: int = 0  # set when the length of the prompt is known
    folded: str | None = None  # how the conversation was shortened to fit `environment.context.limit`


def check_body_size(body: bytes, max_length: int, sees_images: bool = False) -> None:
    """Raise ApiError if the body is too large for a context of `max_length` tokens, before the body is parsed. Images
    take few tokens, so with `sees_images` only the server limits the body."""
    if not sees_images and len(body) > max(SMALL_BODY_BYTES, max_length * MAX_BYTES_PER_TOKEN):
        raise _too_long_error(f"the body has {len(body)} bytes", max_length)


def load_body(body: bytes, messages_field: str, max_length: int) -> Any:
    """Return the JSON of a body. Raise ApiError if it is invalid or has more messages than the context can hold."""
    try:
        request_json = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", "body", code="invalid_json") from error
    rows = request_json.get(messages_field) if isinstance(request_json, dict) else None
    if isinstance(rows, list) and len(rows) > max_length // MIN_MESSAGE_TOKENS:
        raise _too_long_error(f"there are {len(rows)} messages", max_length)
    return request_json


def apply_settings(defaults: SamplingParams, settings: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a request; `defaults` apply to parameters that the client omits."""
    overrides = {name: settings[name] for name in SAMPLING_FIELDS if name in settings}
    # Below the minimum, only the most likely token remains in any case.
    overrides["top_p"] = max(overrides.get("top_p", defaults.top_p), MIN_TOP_P)
    return replace(defaults, **overrides)


def _too_long_error(problem: str, max_length: int) -> ApiError:
    text = f"{problem}, too many for the model's context of {max_length} tokens. Shorten the messages"
    return ApiError(text, "messages", code="context_length_exceeded")
