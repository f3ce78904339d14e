"""What a client asks of `tfactory serve`, read and checked. A mistake is an `ApiError` that names the field.

Everything that would change the answer is either done or refused; nothing of that kind is ignored in silence."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from TrainingFactory.http.errors import ApiError
from TrainingFactory.openai_form import message_from_dict, spec_from_dict
from TrainingFactory.types import Message, SamplingParams, ToolSpec

MAX_CHOICES = 128
LEAST_TEMPERATURE = 1e-3  # logits divided by less leave the range of their number format
LEAST_TOP_P = 1e-6
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
PART_FIELDS = ("type", "text", "cache_control")  # the last is about speed
CALL_FIELDS = ("id", "type", "function", "index", "name", "arguments", "error")
TOOL_FIELDS = ("type", "function", "name", "description", "parameters", "strict")
MAX_STOPS = 16
MAX_STOP_CHARS = 256
TOP_LOGPROBS = (
    "top_logprobs is refused: the engine gives the log-prob of the sampled token only; "
    "leave it out, or set it to 0, and read logprobs.content[].logprob"
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class ChatRequest(_Strict):
    """The body of `POST /v1/chat/completions`. Fields that must have one value are here so that clients which
    always send them are understood."""

    messages: Annotated[list[Any], Field(min_length=1)]
    model: str | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Any = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Only their neutral values can be honoured.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: Literal[True] | None = None
    # They say something about the client and change no answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


@dataclass(slots=True)
class Ask:
    """A request as the server works with it. `max_tokens` None: all the room that is left."""

    messages: list[Message]
    params: SamplingParams  # all but the seed and max_tokens, which belong to a choice
    seed: int
    model: str | None = None
    tools: list[ToolSpec] = field(default_factory=list)
    read_calls: bool = False
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False


def read_ask(body: bytes, defaults: SamplingParams) -> Ask:
    """`defaults` hold what a client leaves out."""
    request = _parsed(body)
    _refuse_what_is_not_done(request)
    tools = _tools(request.tools or [])
    calls = request.tool_choice != "none"

    def given(name: str) -> Any:
        value = getattr(request, name)
        return getattr(defaults, name) if value is None else value

    params = SamplingParams(
        temperature=given("temperature"),
        top_p=max(given("top_p"), LEAST_TOP_P),  # only the likeliest token is left either way
        top_k=given("top_k"),
        min_p=given("min_p"),
        stop_ids=defaults.stop_ids,
    )
    if request.max_tokens and request.max_completion_tokens not in (None, request.max_tokens):
        text = "max_tokens and max_completion_tokens differ; give one of them"
        raise ApiError(text, "max_completion_tokens")
    options = request.stream_options
    if options is not None and not request.stream:
        raise ApiError("stream_options is for stream: true", "stream_options")
    return Ask(
        messages=_messages(request.messages),
        params=params,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        model=request.model,
        tools=tools if calls else [],
        read_calls=calls and bool(tools),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        max_tokens_field="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
        n=request.n or 1,
        stop=_stops(request.stop),
        logprobs=bool(request.logprobs),
        stream=bool(request.stream),
        include_usage=options is not None and options.include_usage,
    )


def _parsed(body: bytes) -> ChatRequest:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"the body is not valid JSON: {reason}", "body", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(f"the body must be a JSON object, not {_kind(data)}", "body", code="invalid_type")
    try:
        return ChatRequest.model_validate(data)
    except ValidationError as error:
        raise _first_problem(error) from error


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False)[0]
    param = _path(problem["loc"])
    if problem["type"] == "extra_forbidden":
        text = f"{param} is not a field that this server knows; it is refused rather than ignored"
        return ApiError(text, param, code="unknown_parameter")
    if problem["type"] == "missing":
        return ApiError(f"{param} is missing", param, code="missing_required_parameter")
    text = f"{param} is {_shown(problem['input'])}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
    return ApiError(text, param)


def _path(places: tuple[int | str, ...]) -> str:
    text = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places)
    return text.removeprefix(".")


def _refuse_what_is_not_done(request: ChatRequest) -> None:
    if request.temperature and request.temperature < LEAST_TEMPERATURE:
        text = f"temperature is {request.temperature:g}; give 0 for greedy, or at least {LEAST_TEMPERATURE:g}"
        raise ApiError(text, "temperature")
    if request.top_logprobs:
        raise ApiError(TOP_LOGPROBS, "top_logprobs", code="unsupported_parameter")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs is for logprobs: true", "top_logprobs")
    for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
        if getattr(request, name):
            text = f"{name} is refused: the engine samples from the model's own distribution; leave it out"
            raise ApiError(text, name, code="unsupported_parameter")
    form = request.response_format
    if form is not None and form != {"type": "text"}:
        text = (
            'response_format is refused, but for {"type": "text"}: nothing forces the model into a form here'
        )
        raise ApiError(text, "response_format", code="unsupported_parameter")


def _messages(rows: list[Any]) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}  # of the tools that were called, by the id of the call
    for number, row in enumerate(rows):
        where = f"messages[{number}]"
        message = _message(row, where)
        for call in message.tool_calls:
            names[call.id] = call.name
        if message.role == "tool":
            if not message.tool_call_id:
                text = f"{where} answers no call: a tool message needs tool_call_id"
                raise ApiError(text, f"{where}.tool_call_id", code="missing_required_parameter")
            if message.tool_call_id not in names:
                text = f"{where} answers the call {_shown(message.tool_call_id)}, which no assistant message made"
                raise ApiError(text, f"{where}.tool_call_id")
            message.name = names[message.tool_call_id]
        messages.append(message)
    return messages


def _message(row: Any, where: str) -> Message:
    if not isinstance(row, dict):
        raise ApiError(f"{where} must be an object, not {_kind(row)}", where, code="invalid_type")
    for name in ("role", "name", "tool_call_id", "reasoning_content", "reasoning"):
        if row.get(name) is not None and not isinstance(row[name], str):
            text = f"{where}.{name} must be a text, not {_kind(row[name])}"
            raise ApiError(text, f"{where}.{name}", code="invalid_type")
    _refuse_others(row, MESSAGE_FIELDS, where)
    calls = row.get("tool_calls")
    if calls and row.get("role") != "assistant":
        raise ApiError(f"{where}.tool_calls: only the assistant makes calls", f"{where}.tool_calls")
    if row.get("content") is None and not calls and "reasoning_content" not in row:
        text = f"{where}.content is missing"
        raise ApiError(text, f"{where}.content", code="missing_required_parameter")
    try:
        message = message_from_dict(row)
    except ValueError as error:
        raise ApiError(f"{where}: {error}", _part(row, where)) from error
    for number, part in enumerate(row["content"] if isinstance(row.get("content"), list) else ()):
        place = f"{where}.content[{number}]"
        if part.get("type", "text") != "text":
            text = f"{place}.type is {_shown(part['type'])}: only text content is understood"
            raise ApiError(text, f"{place}.type")
        _refuse_others(part, PART_FIELDS, place)
    for number, call in enumerate(message.tool_calls):
        place = f"{where}.tool_calls[{number}]"
        _refuse_others(row["tool_calls"][number], CALL_FIELDS, place)
        if not isinstance(call.id, str) or not call.id:
            raise ApiError(f"{place}.id must be a text", f"{place}.id", code="invalid_type")
        if call.error is not None:
            raise ApiError(f"{place}.function: {call.error}", f"{place}.function.arguments")
    return message


def _refuse_others(row: Any, known: tuple[str, ...], where: str) -> None:
    """What is empty says nothing, and clients send much of that."""
    for name, value in row.items() if isinstance(row, dict) else ():
        if value and name not in known:
            text = f"{where}.{name} is not understood here; it is refused rather than ignored"
            raise ApiError(text, f"{where}.{name}", code="unknown_parameter")


def _part(row: dict[str, Any], where: str) -> str:
    """Which part of a message was wrong."""
    trials = {"role": {"role": row.get("role")}, "content": {"role": "user", "content": row.get("content")}}
    for name, trial in trials.items():
        try:
            message_from_dict(trial)
        except ValueError:
            return f"{where}.{name}"
    return f"{where}.tool_calls"


def _tools(rows: list[Any]) -> list[ToolSpec]:
    found: dict[str, ToolSpec] = {}
    for number, row in enumerate(rows):
        spec = _tool(row, f"tools[{number}]")
        if not spec.name.strip() or spec.name in found:
            place = f"tools[{number}].function.name"
            why = "is another tool's as well" if spec.name in found else "is empty"
            raise ApiError(f"{place} {why}; every tool needs a name of its own", place)
        found[spec.name] = spec
    return list(found.values())


def _tool(row: Any, where: str) -> ToolSpec:
    if not isinstance(row, dict) or row.get("type", "function") != "function":
        raise ApiError(f'{where} must be an object of type "function"', where)
    function = row.get("function")
    for part, place in ((row, where), (function, f"{where}.function")):
        _refuse_others(part, TOOL_FIELDS, place)
    try:
        spec = spec_from_dict(row)
    except ValueError as error:
        raise ApiError(f"{where}: {error}", f"{where}.function") from error
    if not isinstance(spec.description, str):
        place = f"{where}.function.description"
        raise ApiError(f"{place} must be a text", place, code="invalid_type")
    if not isinstance(spec.parameters, dict):
        place = f"{where}.function.parameters"
        raise ApiError(f"{place} must be a JSON schema, an object", place, code="invalid_type")
    return spec


def _stops(value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ApiError(f"stop must be a text or a list of texts, none empty, not {_shown(value)}", "stop")
    if len(texts) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in texts):
        raise ApiError(f"stop holds at most {MAX_STOPS} texts of {MAX_STOP_CHARS} characters", "stop")
    return tuple(texts)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
