"""OpenAI's responses: `POST /v1/responses` and `/v1/responses/input_tokens`. The server stores no conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from TrainingFactory.agent_api.dialects.base import (
    Dialect,
    ImageParts,
    LenientBody,
    ResponseHead,
    SentText,
    Temperature,
    TopP,
    merge_messages,
    message_of_pieces,
    unsupported,
    validate,
)
from TrainingFactory.agent_api.turns.requests import ParsedRequest, load_body, sampling_params
from TrainingFactory.agent_api.turns.responses import EventWriter, SampledChoice
from TrainingFactory.common.http.api import ApiError, StreamEvent
from TrainingFactory.common.options import Count, Text
from TrainingFactory.types import Image, Message, SamplingParams, ToolCall, ToolSpec

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text")
LOGPROBS = "message.output_text.logprobs"  # value of `include`
# Fields whose other values would need what this server does not have.
NEUTRAL_VALUES = {
    "previous_response_id": (None, "Send the whole conversation as input"),
    "conversation": (None, "Send the whole conversation as input"),
    "prompt": (None, "Send instructions and input"),
    "background": (False, "Wait for the response, or use stream"),
    "truncation": ("disabled", "Shorten the input"),
    "top_logprobs": (0, "The engine computes only the sampled token's log-prob"),
    "parallel_tool_calls": (True, "Leave it out"),
}


class _Part(LenientBody):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    annotations: Any = None
    logprobs: Any = None


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[list[_Part] | None, BeforeValidator(_as_parts)]


class _Item(LenientBody):
    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: str | None = None
    output: Parts = None
    # Of the server's own items, which clients send back.
    id: Any = None
    status: Any = None
    summary: Any = None
    encrypted_content: Any = None
    phase: Any = None


class _Tool(LenientBody):
    type: str = "function"
    name: Text | None = None
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Any = None


class _Format(LenientBody):
    type: str = "text"


class _TextOptions(LenientBody):
    format: _Format = Field(default_factory=_Format)


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(LenientBody):
    """The body of `POST /v1/responses`."""

    input: Annotated[list[_Item], Field(min_length=1), BeforeValidator(_as_items)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: Any = "auto"
    temperature: Temperature | None = None
    top_p: TopP | None = None
    text: _TextOptions = Field(default_factory=_TextOptions)
    include: list[str] = Field(default_factory=list)
    stream: bool = False
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = False
    truncation: Any = "disabled"
    top_logprobs: Any = 0
    parallel_tool_calls: Any = True
    # Accepted and ignored: these do not change the answer.
    store: Any = None
    metadata: Any = None
    user: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    stream_options: Any = None


class ResponsesDialect(Dialect):
    name = "responses"

    def parse(
        self,
        body: bytes,
        defaults: SamplingParams,
        context: int = 2**63,
        model: str | None = None,
        stream: bool | None = None,
        sees_images: bool = False,
    ) -> ParsedRequest:
        ignored: set[str] = set()
        request = validate(ResponsesBody, load_body(body, "input", context), ignored)
        for field, (neutral, hint) in NEUTRAL_VALUES.items():
            if getattr(request, field) != neutral:
                raise unsupported(field, getattr(request, field), hint)
        if request.text.format.type != "text":
            raise unsupported("text.format.type", request.text.format.type, "Ask for the format in a message")
        settings = request.model_dump(include={"temperature", "top_p", "stream"}, exclude_unset=True)
        messages = list(
            merge_messages(_read_messages(request.instructions, request.input, ImageParts(sees_images)))
        )
        limit = request.max_output_tokens
        return ParsedRequest(
            messages, _read_tools(request, ignored), sampling_params(defaults, settings), request, request.model,
            logprobs=LOGPROBS in request.include, stream=request.stream, settings=settings, ignored=ignored,
            limits={} if limit is None else {"max_output_tokens": limit},
        )  # fmt: skip

    def response(
        self, request: ParsedRequest, head: ResponseHead, choices: Sequence[SampledChoice]
    ) -> dict[str, Any]:
        [choice] = choices
        items = [item | {"status": "completed"} for item in _output_items(head, choice)]
        return _make_response(request, head, items, choice)

    def events(self, request: ParsedRequest, head: ResponseHead) -> EventWriter:
        return _ResponsesEvents(self, request, head)

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.body

    def error_event(self, error: ApiError, sequence_number: int = 0) -> StreamEvent:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return _encode_event({"type": "error", "sequence_number": sequence_number} | fields)

    def token_count(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}


class _ResponsesEvents(EventWriter):
    def __init__(self, dialect: ResponsesDialect, request: ParsedRequest, head: ResponseHead) -> None:
        self._dialect, self._request, self._head = dialect, request, head
        self._sent_text = SentText()
        self._sequence_number = -1  # of the last event
        self._index = -1  # of the last output item
        self._open_kind: str | None = None  # kind of the open item: reasoning or content
        self._text = ""  # of the open item

    def begin(self) -> Iterable[StreamEvent]:
        response = _make_response(self._request, self._head, [], None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def partial(self, index: int, message: Message) -> Iterator[StreamEvent]:
        for kind, text in self._sent_text.new_text(message):
            if self._open_kind != kind:
                yield from self._close(None)
                yield from self._begin_text(kind)
            self._text += text
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            yield self._part_event(f"response.{name}.delta", delta=text, **_logprob_fields(kind, None))

    def finish(self, index: int, choice: SampledChoice) -> Iterator[StreamEvent]:
        yield from self.partial(0, choice.message)
        if self._open_kind != "content" and not choice.message.tool_calls:  # an empty message
            yield from self._close(None)
            yield from self._begin_text("content")
        yield from self._close(choice)
        for call in choice.message.tool_calls:
            item = _call_item(call)
            arguments = item["arguments"]
            yield self._added_event(item | {"arguments": "", "status": "in_progress"})
            item_fields = {"item_id": item["id"], "output_index": self._index}
            name = "response.function_call_arguments"
            yield self._event(f"{name}.delta", delta=arguments, **item_fields)
            yield self._event(f"{name}.done", arguments=arguments, name=call.name, **item_fields)
            yield self._done_event(item | {"status": "completed"})

    def end(self, choices: Sequence[SampledChoice]) -> Iterable[StreamEvent]:
        response = self._dialect.response(self._request, self._head, choices)
        return [self._event(f"response.{response['status']}", response=response)]

    def error(self, error: ApiError) -> Iterator[StreamEvent]:
        self._sequence_number += 1
        yield self._dialect.error_event(error, self._sequence_number)
        response = _make_response(self._request, self._head, [], None) | {"status": "failed"}
        response["error"] = {"code": error.code, "message": error.message}
        yield self._event("response.failed", response=response)

    def _begin_text(self, kind: str) -> Iterator[StreamEvent]:
        self._open_kind, self._text = kind, ""
        item = _text_item(self._head, kind, "") | {"content": [], "status": "in_progress"}
        yield self._added_event(item)
        yield self._part_event("response.content_part.added", part=_text_part(kind, ""))

    def _close(self, choice: SampledChoice | None) -> Iterator[StreamEvent]:
        """Return the events that end the open item; `choice` has the log-probs of its content."""
        if self._open_kind is None:
            return
        kind, text = self._open_kind, self._text
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        yield self._part_event(f"response.{name}.done", text=text, **_logprob_fields(kind, choice))
        item = _text_item(self._head, kind, text, choice)
        yield self._part_event("response.content_part.done", part=item["content"][0])
        yield self._done_event(item | {"status": "completed"})
        self._open_kind = None

    def _added_event(self, item: dict[str, Any]) -> StreamEvent:
        self._index += 1
        return self._event("response.output_item.added", item=item, output_index=self._index)

    def _done_event(self, item: dict[str, Any]) -> StreamEvent:
        return self._event("response.output_item.done", item=item, output_index=self._index)

    def _part_event(self, kind: str, /, **fields: Any) -> StreamEvent:
        item_id = _item_id(self._head, self._open_kind or "")
        return self._event(kind, item_id=item_id, output_index=self._index, content_index=0, **fields)

    def _event(self, kind: str, /, **fields: Any) -> StreamEvent:
        self._sequence_number += 1
        return _encode_event({"type": kind, "sequence_number": self._sequence_number} | fields)


def _encode_event(fields: dict[str, Any]) -> StreamEvent:
    return {"event": fields["type"], "data": json.dumps(fields)}


def _logprob_fields(kind: str, choice: SampledChoice | None) -> dict[str, Any]:
    """Return the field `logprobs` for the parts and events of a message; empty for reasoning, which has no such
    field."""
    if kind == "reasoning":
        return {}
    rows = [] if choice is None or choice.logprobs is None else choice.logprobs["content"]
    return {"logprobs": rows}


def _item_id(head: ResponseHead, kind: str) -> str:
    return f"rs_{head.id}" if kind == "reasoning" else f"msg_{head.id}"


def _text_part(kind: str, text: str, choice: SampledChoice | None = None) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []} | _logprob_fields(kind, choice)


def _text_item(
    head: ResponseHead, kind: str, text: str, choice: SampledChoice | None = None
) -> dict[str, Any]:
    fields = {"type": "reasoning", "summary": []} if kind == "reasoning" else {"type": "message"}
    fields |= {} if kind == "reasoning" else {"role": "assistant"}
    return fields | {"id": _item_id(head, kind), "content": [_text_part(kind, text, choice)]}


def _call_item(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    fields = {"type": "function_call", "id": call.id.replace("call", "fc"), "call_id": call.id}
    return fields | {"name": call.name, "arguments": arguments}


def _output_items(head: ResponseHead, choice: SampledChoice) -> Iterator[dict[str, Any]]:
    message = choice.message
    if message.reasoning:
        yield _text_item(head, "reasoning", message.reasoning)
    if message.content or not message.tool_calls:
        yield _text_item(head, "content", message.content, choice)
    yield from map(_call_item, message.tool_calls)


def _make_response(
    request: ParsedRequest, head: ResponseHead, items: list[dict[str, Any]], choice: SampledChoice | None
) -> dict[str, Any]:
    """Return the response object, with the status `in_progress` if there is no choice."""
    body: ResponsesBody = request.body
    status = "in_progress" if choice is None else "incomplete" if choice.finish == "length" else "completed"
    usage = None if choice is None else _make_usage(head.prompt_tokens, choice.tokens)
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": head.model,
        "output": items,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": request.params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": [tool.model_dump() for tool in body.tools if tool.type == "function"],
        "top_p": request.params.top_p,
        "truncation": "disabled",
        "usage": usage,
    } | head.extra_fields


def _make_usage(prompt_tokens: int, num_sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + num_sampled,
    }


def _read_messages(instructions: str | None, items: Sequence[_Item], images: ImageParts) -> Iterator[Message]:
    names: dict[str, str] = {}  # id of a tool call -> name of the tool
    if instructions:
        yield Message("system", instructions)
    for index, item in enumerate(items):
        param = f"input[{index}]"
        if item.type == "message":
            yield _read_message(item, param, images)
        elif item.type == "reasoning":
            pieces = _read_pieces(item.content or (), f"{param}.content", images)
            text = message_of_pieces("assistant", pieces, f"{param}.content", "").content
            yield Message("assistant", reasoning=text or None)
        elif item.type == "function_call":
            call = ToolCall(
                _get_field(item, "name", param), _arguments(item, param), _get_field(item, "call_id", param)
            )
            names[call.id] = call.name
            yield Message("assistant", tool_calls=[call])
        elif item.type == "function_call_output":
            call_id = _get_field(item, "call_id", param)
            if call_id not in names:
                raise ApiError(f"{param} has a call_id that matches no function_call", f"{param}.call_id")
            pieces = _read_pieces(_get_field(item, "output", param), f"{param}.output", images)
            fields = {"tool_call_id": call_id, "name": names[call_id]}
            yield message_of_pieces("tool", pieces, f"{param}.output", **fields)
        else:
            hint = "Send items of type message, reasoning, function_call and function_call_output"
            raise unsupported(f"{param}.type", item.type, hint)


def _read_message(item: _Item, param: str, images: ImageParts) -> Message:
    role = _get_field(item, "role", param)
    pieces = _read_pieces(_get_field(item, "content", param), f"{param}.content", images)
    separator = "" if role == "assistant" else "\n\n"
    return message_of_pieces("system" if role == "developer" else role, pieces, f"{param}.content", separator)


def _read_pieces(parts: Iterable[_Part], param: str, images: ImageParts) -> Iterator[str | Image]:
    for index, part in enumerate(parts):
        if part.type == "input_image":
            fields = {"type": "input_image", "image_url": part.image_url}
            yield images.read(fields, f"{param}[{index}].type", "input_image", "Send text only")
            continue
        if part.type not in TEXT_PARTS:
            raise unsupported(f"{param}[{index}].type", part.type, "Send text only")
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            name = f"{param}[{index}].text"
            raise ApiError(f"{name} is missing", name, code="missing_required_parameter")
        yield text


def _get_field(item: _Item, name: str, param: str) -> Any:
    value = getattr(item, name)
    if value is None:
        text = f"{param}.{name} is missing in an item of type {item.type}"
        raise ApiError(text, f"{param}.{name}", code="missing_required_parameter")
    return value


def _arguments(item: _Item, param: str) -> dict[str, Any]:
    try:
        arguments = json.loads(item.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{param}.arguments is not valid JSON: {error}", f"{param}.arguments") from None
    if not isinstance(arguments, dict):
        raise ApiError(f"{param}.arguments must be a JSON object", f"{param}.arguments")
    return arguments


def _read_tools(request: ResponsesBody, ignored: set[str]) -> list[ToolSpec]:
    """Return the functions that the client runs. Add the names of tools that run at the provider to `ignored`."""
    if request.tool_choice not in ("auto", "none"):
        raise unsupported("tool_choice", request.tool_choice, "Use auto or none")
    specs: list[ToolSpec] = []
    for index, tool in enumerate(request.tools):
        if tool.type != "function":
            ignored.add(f"tool {tool.type}")
        elif tool.name is None:
            param = f"tools[{index}].name"
            raise ApiError(f"{param} is missing", param, code="missing_required_parameter")
        else:
            spec = ToolSpec(tool.name, tool.description)
            spec.parameters = tool.parameters or spec.parameters
            specs.append(spec)
    return specs if request.tool_choice == "auto" else []
