"""Parsing and validation of chat completion requests. An invalid field raises an `ApiError` that names it.

A parameter that would change the answer is either applied or rejected, never silently ignored."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.options import Count, Share, Text
from TrainingFactory.types import Message, SamplingParams, ToolCall, ToolSpec

MIN_TEMPERATURE = 1e-3  # a lower one can make the logits overflow
MIN_TOP_P = 1e-6
MIN_MESSAGE_TOKENS = 2  # of a message: its content and its end token
MAX_BYTES_PER_TOKEN = 16  # of a body per token of context; plain text has 3 to 5, an escaped emoji 12
SMALL_BODY = 64 * 1024  # bytes; a body up to this size is always parsed
# Parameters that the engine does not support may have their neutral value, because some clients always send them.
Zero = Annotated[float, Field(ge=0, le=0)]
PROBLEMS = {  # pydantic error type -> code, text
    "extra_forbidden": ("unknown_parameter", "is not supported by this server"),
    "missing": ("missing_required_parameter", "is missing"),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, row: Any) -> Any:
        """Drop fields that are null, which means the same as a missing field."""
        if not isinstance(row, dict):
            return row
        return {name: value for name, value in row.items() if cls._is_set(name, value)}

    @classmethod
    def _is_set(cls, name: str, value: Any) -> bool:
        return value is not None


class _Row(_Strict):
    @classmethod
    def _is_set(cls, name: str, value: Any) -> bool:
        """Also drop unknown fields with empty values, because clients send many of them."""
        return bool(value) or (value is not None and name in cls.model_fields)


class _Part(_Row):
    type: Literal["text"] = "text"
    text: str
    cache_control: Any = None  # ignored: it affects only speed


def _parts(content: Any) -> Any:
    return [{"text": content}] if isinstance(content, str) else content


def _arguments(value: Any) -> Any:
    return json.loads(value) if value and isinstance(value, str) else value or {}


class _Called(_Row):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)] = Field(default_factory=dict)


class _Call(_Row):
    id: Text
    type: Literal["function"] = "function"
    function: _Called
    index: int | None = None


class _Message(_Row):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_Part] | None, BeforeValidator(_parts)] = None
    name: str | None = None
    tool_calls: list[_Call] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Function(_Row):
    name: Text
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Any = None


class _Tool(_Row):
    type: Literal["function"] = "function"
    function: _Function


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class _Format(_Strict):
    type: Literal["text"] = "text"


class ChatRequest(_Strict):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    model: str | None = None
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Share | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = Field(default_factory=lambda: secrets.randbits(63))
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]],
        Field(max_length=16),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = Field(default_factory=list)
    logprobs: bool = False
    stream: bool = False
    stream_options: _StreamOptions = Field(default_factory=_StreamOptions)
    parallel_tool_calls: Literal[True] = True
    top_logprobs: Zero = 0
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: dict[str, Any] = Field(default_factory=dict, max_length=0)
    response_format: _Format = Field(default_factory=_Format)
    # Accepted and ignored: these describe the client and do not change the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"use 0 for greedy decoding, or at least {MIN_TEMPERATURE:g}")
        return value


@dataclass(slots=True)
class ParsedRequest:
    """A validated request, converted to the package's own types."""

    request: ChatRequest
    messages: list[Message]
    tools: list[ToolSpec]
    params: SamplingParams  # without the seed and max_tokens, which differ between choices
    max_tokens: int = 0  # set when the length of the prompt is known
    folded: str | None = None  # how the conversation was shortened to fit `environment.context.limit`


def check_size(body: bytes, context: int) -> None:
    """Raise ApiError if the body is too large for a context of `context` tokens, before the body is parsed."""
    if len(body) > max(SMALL_BODY, context * MAX_BYTES_PER_TOKEN):
        raise _too_long(f"the body has {len(body)} bytes", context)


def parse_request(body: bytes, defaults: SamplingParams, context: int = 2**63) -> ParsedRequest:
    """Parse and validate a request; `defaults` are the sampling parameters that a client may omit."""
    request = _parse(body, context)
    functions = [row.function.model_dump(exclude={"strict"}, exclude_defaults=True) for row in request.tools]
    tools = [ToolSpec(**function) for function in functions] if request.tool_choice == "auto" else []
    settings = request.model_dump(include={"temperature", "top_p", "top_k", "min_p"}, exclude_unset=True)
    # Below the minimum, only the most likely token remains in any case.
    settings["top_p"] = max(settings.get("top_p", defaults.top_p), MIN_TOP_P)
    params = replace(defaults, **settings)
    return ParsedRequest(request, _messages(request.messages), tools, params)


def _too_long(size: str, context: int) -> ApiError:
    text = f"{size}, too many for the model's context of {context} tokens. Shorten the messages"
    return ApiError(text, "messages", code="context_length_exceeded")


def _parse(body: bytes, context: int) -> ChatRequest:
    try:
        data = json.loads(body)
        rows = data.get("messages") if isinstance(data, dict) else None
        if isinstance(rows, list) and len(rows) > context // MIN_MESSAGE_TOKENS:
            raise _too_long(f"there are {len(rows)} messages", context)
        return ChatRequest.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", "body", code="invalid_json") from error
    keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in problem["loc"])
    param = "".join(keys).removeprefix(".") or "body"
    invalid = f"is {problem['input']!r:.60}: {problem['msg']}"
    code, text = PROBLEMS.get(problem["type"], ("invalid_value", invalid))
    raise ApiError(f"{param} {text}", param, code=code)


def _messages(rows: list[_Message]) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}  # id of a tool call -> name of the tool
    for number, row in enumerate(rows):
        calls = [ToolCall(**dict(call.function), id=call.id) for call in row.tool_calls]
        names |= {call.id: call.name for call in calls}
        reasoning = row.reasoning if row.reasoning_content is None else row.reasoning_content
        param = f"messages[{number}]"
        if calls and row.role != "assistant":
            raise ApiError(f"{param} has tool_calls, but its role is not assistant", f"{param}.tool_calls")
        if row.content is None and not calls and reasoning is None:
            raise ApiError(f"{param} has no content", f"{param}.content")
        if row.role == "tool" and row.tool_call_id not in names:
            raise ApiError(f"{param} has a tool_call_id that matches no tool call", f"{param}.tool_call_id")
        role = "system" if row.role == "developer" else row.role
        text = "".join(part.text for part in row.content or ())
        name = names[row.tool_call_id or ""] if role == "tool" else row.name
        messages.append(Message(role, text, calls, row.tool_call_id, name, reasoning))
    return messages
