"""What a client asks of `tfactory serve`, read and checked. A mistake is an `ApiError` that names the field.

Everything that would change the answer is either done or refused; nothing of that kind is ignored in silence."""

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
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from TrainingFactory.http.errors import ApiError
from TrainingFactory.options import Count, Share, Text
from TrainingFactory.types import Message, SamplingParams, ToolCall, ToolSpec

MAX_CHOICES = 128
LEAST_TEMPERATURE = 1e-3  # logits divided by less leave the range of their number format
LEAST_TOP_P = 1e-6
OWN_DISTRIBUTION = "refused: the engine samples from the model's own distribution; leave it out"
NOT_DONE = {  # but for neutral values, so that clients which always send them are understood
    "top_logprobs": "refused: the engine gives the log-prob of the sampled token only; read logprobs",
    "frequency_penalty": OWN_DISTRIBUTION,
    "presence_penalty": OWN_DISTRIBUTION,
    "logit_bias": OWN_DISTRIBUTION,
    "response_format": 'refused, but for {"type": "text"}: nothing forces the model into a form here',
}
CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported_parameter": "unsupported_parameter",
}
TEXTS = {
    "extra_forbidden": "is not known to this server; it is refused rather than ignored",
    "missing": "is missing",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Row(_Strict):
    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, row: Any) -> Any:
        """Leave out unknown fields that are empty: they say nothing, and clients send many."""
        if not isinstance(row, dict):
            return row
        return {name: value for name, value in row.items() if value or name in cls.model_fields}


class _Part(_Row):
    type: Literal["text"] = "text"
    text: str
    cache_control: Any = None  # about speed


def _parts(content: Any) -> Any:
    return [{"text": content}] if isinstance(content, str) else content


def _arguments(given: Any) -> Any:
    return json.loads(given) if given and isinstance(given, str) else given or {}


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
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Function(_Row):
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = None


class _Tool(_Row):
    type: Literal["function"] = "function"
    function: _Function


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class ChatRequest(_Strict):
    """The body of `POST /v1/chat/completions`; null is as if a field were left out."""

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
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
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
    # Only their neutral values can be honoured.
    top_logprobs: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, Any] = Field(default_factory=dict)
    response_format: dict[str, Any] = Field(default_factory=dict)
    # They say something about the client and change no answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, body: Any) -> Any:
        return (
            {name: value for name, value in body.items() if value is not None}
            if isinstance(body, dict)
            else body
        )

    @field_validator(*NOT_DONE)
    @classmethod
    def _neutral(cls, value: Any, info: ValidationInfo) -> Any:
        if value and value != {"type": "text"}:
            raise PydanticCustomError("unsupported_parameter", NOT_DONE[str(info.field_name)])  # type: ignore[arg-type]
        return value

    @field_validator("temperature")
    @classmethod
    def _hot_enough(cls, value: float) -> float:
        if 0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"give 0 for greedy, or at least {LEAST_TEMPERATURE:g}")
        return value


@dataclass(slots=True)
class Ask:
    """A request as the server works with it."""

    request: ChatRequest
    messages: list[Message]
    tools: list[ToolSpec]
    params: SamplingParams  # all but the seed and max_tokens, which belong to a choice
    max_tokens: int = 0  # known with the prompt


def read_ask(body: bytes, defaults: SamplingParams) -> Ask:
    """Return what is asked for; `defaults` hold what a client leaves out."""
    request = _parsed(body)
    tools = [_spec(row.function) for row in request.tools] if request.tool_choice == "auto" else []
    given = request.model_dump(include={"temperature", "top_p", "top_k", "min_p"}, exclude_unset=True)
    least = max(
        given.get("top_p", defaults.top_p), LEAST_TOP_P
    )  # only the likeliest token is left either way
    params = replace(defaults, **given | {"top_p": least})
    return Ask(request, _messages(request.messages), tools, params)


def _parsed(body: bytes) -> ChatRequest:
    try:
        return ChatRequest.model_validate(json.loads(body))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", "body", code="invalid_json") from error
    kind = problem["type"]
    places = (f"[{place}]" if isinstance(place, int) else f".{place}" for place in problem["loc"])
    param = "".join(places).removeprefix(".") or "body"
    text = f"{param} is {problem['input']!r:.60}: {problem['msg']}"
    if kind in TEXTS:
        text = f"{param} {TEXTS[kind]}"
    raise ApiError(text, param, code=CODES.get(kind, "invalid_value"))


def _messages(rows: list[_Message]) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}  # of the tools that were called, by the id of the call
    for number, row in enumerate(rows):
        calls = [
            ToolCall(each.function.name, each.function.arguments, each.id) for each in row.tool_calls or ()
        ]
        names |= {call.id: call.name for call in calls}
        reasoning = row.reasoning if row.reasoning_content is None else row.reasoning_content
        wrong = None
        if calls and row.role != "assistant":
            wrong = "tool_calls", "is set, but only the assistant makes calls"
        elif row.content is None and not calls and reasoning is None:
            wrong = "content", "is missing"
        elif row.role == "tool" and row.tool_call_id not in names:
            wrong = "tool_call_id", "is that of no call which an assistant message made"
        if wrong:
            place = f"messages[{number}].{wrong[0]}"
            raise ApiError(f"{place} {wrong[1]}", place)
        message = Message(
            "system" if row.role == "developer" else row.role,
            "".join(part.text for part in row.content or ()),
            calls,
            row.tool_call_id,
            names[row.tool_call_id or ""] if row.role == "tool" else row.name,
            reasoning,
        )
        messages.append(message)
    return messages


def _spec(function: _Function) -> ToolSpec:
    spec = ToolSpec(function.name, function.description or "")
    spec.parameters = function.parameters or spec.parameters
    return spec
