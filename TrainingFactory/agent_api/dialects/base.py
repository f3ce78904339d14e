"""The interface of an API dialect, and the code that all dialects share: validation of bodies, roles, streamed text.

A dialect converts a request body to a `ParsedRequest`, and sampled choices to a response or to the events of a stream.
If a client sends its answers back as history, they convert to the same messages, so that sampling continues from the
sampled tokens.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from TrainingFactory.agent_api.turns.requests import MIN_TEMPERATURE, ParsedRequest
from TrainingFactory.agent_api.turns.responses import EventWriter, SampledChoice
from TrainingFactory.common.http.api import ApiError, StreamEvent
from TrainingFactory.common.image_parts import decode_image_part
from TrainingFactory.common.images import LIMITS, join_pieces
from TrainingFactory.types import Image, Message, Role, SamplingParams

FIELD_PROBLEMS = {  # pydantic error type -> code, text
    "extra_forbidden": ("unknown_parameter", "is not supported by this server"),
    "missing": ("missing_required_parameter", "is missing"),
}
MAX_IMAGES = 64  # of a request
Body = TypeVar("Body", bound=BaseModel)


def _check_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"use 0 for greedy decoding, or at least {MIN_TEMPERATURE:g}")
    return value


Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_check_temperature)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopStrings = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)]


@dataclass(slots=True)
class ResponseHead:
    """The fields of a response that do not depend on the sampled tokens."""

    model: str
    prompt_tokens: int
    version: str | None = None  # of a registered model, such as agent:3
    folded: str | None = None  # how the conversation was shortened; a field of our own in every dialect
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def extra_fields(self) -> dict[str, str]:
        return {} if self.folded is None else {"folded": self.folded}


class Dialect(ABC):
    """One wire format of requests, responses, streams and errors."""

    name: str

    @abstractmethod
    def parse(
        self,
        body: bytes,
        defaults: SamplingParams,
        max_length: int = 2**63,
        model: str | None = None,
        stream: bool | None = None,
        sees_images: bool = False,
    ) -> ParsedRequest:
        """Convert a body; raise ApiError that names an invalid field. `defaults` are the sampling parameters that a
        client may omit. `model` and `stream` come from the address, if the dialect has them there. Without
        `sees_images`, a body with images raises ApiError."""

    @abstractmethod
    def make_response(
        self, request: ParsedRequest, head: ResponseHead, choices: Sequence[SampledChoice]
    ) -> dict[str, Any]: ...

    @abstractmethod
    def make_writer(self, request: ParsedRequest, head: ResponseHead) -> EventWriter: ...

    @abstractmethod
    def make_error_body(self, error: ApiError) -> dict[str, Any]: ...

    def make_error_event(self, error: ApiError) -> StreamEvent:
        """Return the event that ends a stream when the server stops."""
        return json.dumps(self.make_error_body(error))

    def make_token_count(self, num_tokens: int) -> dict[str, Any]:
        """Return the response to a request that only counts the tokens of its prompt."""
        raise NotImplementedError


class StrictBody(BaseModel):
    """Request body that rejects unknown fields and treats null as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unset_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if cls._is_set(name, value)}

    @classmethod
    def _is_set(cls, name: str, value: Any) -> bool:
        return value is not None


class LenientBody(BaseModel):
    """Request body that ignores unknown fields and treats null as a missing field. It adds the names of unknown fields
    with a value to the validation context, which is a set."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _collect_unknown_fields(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        fields, ignored_fields = cls.__pydantic_fields__, info.context
        field_values: dict[str, Any] = {}
        for key, value in body.items():
            if value is not None:
                field_name = cls._to_field_name(key)
                field_values[field_name] = value
                is_ignored = field_name not in fields or field_name == "cache_control"
                if is_ignored and isinstance(ignored_fields, set) and value not in ([], {}, ""):
                    ignored_fields.add(field_name)
        return field_values

    @classmethod
    def _to_field_name(cls, key: str) -> str:
        """Return the name of the model's field for the key `key` in a client's JSON."""
        return key


def validate(body_type: type[Body], body: Any, ignored_fields: set[str] | None = None) -> Body:
    """Validate a body; raise ApiError for its first problem."""
    try:
        return body_type.model_validate(body, context=ignored_fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    except RecursionError as error:
        raise ApiError(f"the body is nested too deeply: {error}", "body", code="invalid_json") from error
    path_parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in problem["loc"])
    param = "".join(path_parts).removeprefix(".") or "body"
    invalid_text = f"is {problem['input']!r:.60}: {problem['msg']}"
    code, text = FIELD_PROBLEMS.get(problem["type"], ("invalid_value", invalid_text))
    raise ApiError(f"{param} {text}", param, code=code)


def unsupported_error(param: str, value: Any, hint: str) -> ApiError:
    return ApiError(f"{param} is {value!r:.60}, which this server does not support. {hint}", param)


class ImageParts:
    """Reader of the images of one request, which limits their number."""

    def __init__(self, sees_images: bool) -> None:
        self._sees_images, self._num_images = sees_images, 0

    def read(self, part: Mapping[str, Any], param: str, part_type: str, hint: str) -> Image:
        """Return the image of a part; raise ApiError if it is invalid, or if the model sees no images."""
        if not self._sees_images:
            raise unsupported_error(param, part_type, f"{hint}; the model of this server sees no images")
        self._num_images += 1
        if self._num_images > MAX_IMAGES:
            raise ApiError(f"there are more than {MAX_IMAGES} images; shorten the messages", param)
        try:
            return decode_image_part(part)
        except ValueError as error:
            raise ApiError(f"{param}: {error}", param, code="invalid_image") from None


def make_message(
    role: Role, pieces: Iterable[str | Image], param: str, separator: str = "\n\n", **fields: Any
) -> Message:
    """Return a message of texts and images."""
    content, images = join_pieces(pieces, separator)
    if len(images) > LIMITS.max_per_turn:
        raise ApiError(f"{param} has {len(images)} images; at most {LIMITS.max_per_turn} are allowed", param)
    if images and role in ("system", "assistant"):
        raise unsupported_error(param, "an image", f"Messages of the {role} have text only")
    return Message(role, content, images=images, **fields)


def join_texts(texts: Iterable[str]) -> str:
    """Join the text parts of a system, user or tool message."""
    return "\n\n".join(text for text in texts if text)


def merge_messages(messages: Iterable[Message]) -> Iterator[Message]:
    """Merge consecutive messages of the model, because one turn may arrive in several pieces; and the system messages
    at the beginning, because chat templates take one."""
    previous: Message | None = None
    is_only_system = True
    for message in messages:
        is_only_system &= message.role == "system"
        if previous is None:
            previous = message
        elif message.role == previous.role == "assistant":
            reasoning = (previous.reasoning or "") + (message.reasoning or "")
            calls = previous.tool_calls + message.tool_calls
            content = previous.content + message.content
            previous = Message("assistant", content, calls, reasoning=reasoning or None)
        elif is_only_system:
            previous = Message("system", join_texts((previous.content, message.content)))
        else:
            yield previous
            previous = message
    if previous is not None:
        yield previous


class SentText:
    """The reasoning and content of a choice that a stream has already sent."""

    def __init__(self) -> None:
        self._sent_texts = {"reasoning": "", "content": ""}

    def take_new_text(self, message: Message) -> Iterator[tuple[str, str]]:
        """Yield "reasoning" or "content", with the part of that text that has not been sent yet."""
        for field_name, text in (("reasoning", message.reasoning or ""), ("content", message.content)):
            if len(text) > len(self._sent_texts[field_name]):
                yield field_name, text[len(self._sent_texts[field_name]) :]
                self._sent_texts[field_name] = text
