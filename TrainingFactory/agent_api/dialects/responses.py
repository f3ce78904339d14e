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
    make_message,
    merge_messages,
    unsupported_error,
    validate,
)
from TrainingFactory.agent_api.turns.requests import ParsedRequest, apply_settings, load_body
from TrainingFactory.agent_api.turns.responses import EventWriter, SampledChoice
from TrainingFactory.common.http.api import ApiError, StreamEvent
from TrainingFactory.common.options import Count, Text
from TrainingFactory.types import Image, Message, SamplingParams, ToolCall, ToolSpec

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text")
INCLUDE_LOGPROBS = "message.output_text.logprobs"  # value of `include`
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


class _ContentPart(LenientBody):
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


Parts = Annotated[list[_ContentPart] | None, BeforeValidator(_as_parts)]


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


class _TextFormat(LenientBody):
    type: str = "text"


class _TextOptions(LenientBody):
    format: _TextFormat = Field(default_factory=_TextFormat)


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
        max_length: int = 2**63,
        model: str | None = None,
        stream: bool | None = None,
        sees_images: bool = False,
    ) -> ParsedRequest:
        ignored_fields: set[str] = set()
        request = validate(ResponsesBody, load_body(body, "input", max_length), ignored_fields)
        for field, (neutral_value, hint) in NEUTRAL_VALUES.items():
            if getattr(request, field) != neutral_value:
                raise unsupported_error(field, getattr(request, field), hint)
        text_format = request.text.format.type
        if text_format != "text":
            raise unsupported_error("text.format.type", text_format, "Ask for the format in a message")
        settings = request.model_dump(include={"temperature", "top_p", "stream"}, exclude_unset=True)
        messages = list(
            merge_messages(_read_messages(request.instructions, request.input, ImageParts(sees_images)))
        )
        max_tokens = request.max_output_tokens
        return ParsedRequest(
            messages, _read_tools(request, ignored_fields), apply_settings(defaults, settings), request, request.model,
            logprobs=INCLUDE_LOGPROBS in request.include, stream=request.stream, settings=settings,
            token_limits={} if max_tokens is None else {"max_output_tokens": max_tokens}, ignored_fields=ignored_fields,
        )  # fmt: skip

    def make_response(
        self, request: ParsedRequest, head: ResponseHead, choices: Sequence[SampledChoice]
    ) -> dict[str, Any]:
        [choice] = choices
        items = [item | {"status": "completed"} for item in _make_output_items(head, choice)]
        return _make_response(request, head, items, choice)

    def make_writer(self, request: ParsedRequest, head: ResponseHead) -> EventWriter:
        return _ResponsesEvents(self, request, head)

    def make_error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body

    def make_error_event(self, error: ApiError, sequence_number: int = 0) -> StreamEvent:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return _encode_event({"type": "error", "sequence_number": sequence_number} | fields)

    def make_token_count(self, num_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}


class _ResponsesEvents(EventWriter):
    def __init__(self, dialect: ResponsesDialect, request: ParsedRequest, head: ResponseHead) -> None:
        self._dialect, self._request, self._head = dialect, request, head
        self._sent_text = SentText()
        self._sequence_number = -1  # of the last event
        self._item_index = -1  # of the last output item
        self._open_item_field: str | None = None  # kind of the open item: reasoning or content
        self._open_item_text = ""  # of the open item

    def write_start(self) -> Iterable[StreamEvent]:
        response = _make_response(self._request, self._head, [], None)
        return [self._emit(f"response.{status}", response=response) for status in ("created", "in_progress")]

    def write_partial(self, choice_index: int, message: Message) -> Iterator[StreamEvent]:
        for field, text in self._sent_text.take_new_text(message):
            if self._open_item_field != field:
                yield from self._close_item(None)
                yield from self._open_item(field)
            self._open_item_text += text
            part_type = "reasoning_text" if field == "reasoning" else "output_text"
            yield self._emit_part(f"response.{part_type}.delta", delta=text, **_make_logprobs(field, None))

    def write_finish(self, choice_index: int, choice: SampledChoice) -> Iterator[StreamEvent]:
        yield from self.write_partial(0, choice.message)
        if self._open_item_field != "content" and not choice.message.tool_calls:  # an empty message
            yield from self._close_item(None)
            yield from self._open_item("content")
        yield from self._close_item(choice)
        for call in choice.message.tool_calls:
            item = _make_call_item(call)
            arguments = item["arguments"]
            yield self._emit_item_added(item | {"arguments": "", "status": "in_progress"})
            item_fields = {"item_id": item["id"], "output_index": self._item_index}
            event_type = "response.function_call_arguments"
            yield self._emit(f"{event_type}.delta", delta=arguments, **item_fields)
            yield self._emit(f"{event_type}.done", arguments=arguments, name=call.name, **item_fields)
            yield self._emit_item_done(item | {"status": "completed"})

    def write_end(self, choices: Sequence[SampledChoice]) -> Iterable[StreamEvent]:
        response = self._dialect.make_response(self._request, self._head, choices)
        return [self._emit(f"response.{response['status']}", response=response)]

    def write_error(self, error: ApiError) -> Iterator[StreamEvent]:
        self._sequence_number += 1
        yield self._dialect.make_error_event(error, self._sequence_number)
        response = _make_response(self._request, self._head, [], None) | {"status": "failed"}
        response["error"] = {"code": error.code, "message": error.message}
        yield self._emit("response.failed", response=response)

    def _open_item(self, field: str) -> Iterator[StreamEvent]:
        self._open_item_field, self._open_item_text = field, ""
        item = _make_text_item(self._head, field, "") | {"content": [], "status": "in_progress"}
        yield self._emit_item_added(item)
        yield self._emit_part("response.content_part.added", part=_make_text_part(field, ""))

    def _close_item(self, choice: SampledChoice | None) -> Iterator[StreamEvent]:
        """Return the events that end the open item; `choice` has the log-probs of its content."""
        if self._open_item_field is None:
            return
        field, text = self._open_item_field, self._open_item_text
        part_type = "reasoning_text" if field == "reasoning" else "output_text"
        yield self._emit_part(f"response.{part_type}.done", text=text, **_make_logprobs(field, choice))
        item = _make_text_item(self._head, field, text, choice)
        yield self._emit_part("response.content_part.done", part=item["content"][0])
        yield self._emit_item_done(item | {"status": "completed"})
        self._open_item_field = None

    def _emit_item_added(self, item: dict[str, Any]) -> StreamEvent:
        self._item_index += 1
        return self._emit("response.output_item.added", item=item, output_index=self._item_index)

    def _emit_item_done(self, item: dict[str, Any]) -> StreamEvent:
        return self._emit("response.output_item.done", item=item, output_index=self._item_index)

    def _emit_part(self, event_type: str, /, **fields: Any) -> StreamEvent:
        item_id = _make_item_id(self._head, self._open_item_field or "")
        return self._emit(
            event_type, item_id=item_id, output_index=self._item_index, content_index=0, **fields
        )

    def _emit(self, event_type: str, /, **fields: Any) -> StreamEvent:
        self._sequence_number += 1
        return _encode_event({"type": event_type, "sequence_number": self._sequence_number} | fields)


def _encode_event(fields: dict[str, Any]) -> StreamEvent:
    return {"event": fields["type"], "data": json.dumps(fields)}


def _make_logprobs(field: str, choice: SampledChoice | None) -> dict[str, Any]:
    """Return the field `logprobs` for the parts and events of a message; empty for reasoning, which has no such
    field."""
    if field == "reasoning":
        return {}
    rows = [] if choice is None or choice.logprobs is None else choice.logprobs["content"]
    return {"logprobs": rows}


def _make_item_id(head: ResponseHead, field: str) -> str:
    return f"rs_{head.id}" if field == "reasoning" else f"msg_{head.id}"


def _make_text_part(field: str, text: str, choice: SampledChoice | None = None) -> dict[str, Any]:
    if field == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []} | _make_logprobs(field, choice)


def _make_text_item(
    head: ResponseHead, field: str, text: str, choice: SampledChoice | None = None
) -> dict[str, Any]:
    fields = {"type": "reasoning", "summary": []} if field == "reasoning" else {"type": "message"}
    fields |= {} if field == "reasoning" else {"role": "assistant"}
    return fields | {"id": _make_item_id(head, field), "content": [_make_text_part(field, text, choice)]}


def _make_call_item(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    fields = {"type": "function_call", "id": call.id.replace("call", "fc"), "call_id": call.id}
    return fields | {"name": call.name, "arguments": arguments}


def _make_output_items(head: ResponseHead, choice: SampledChoice) -> Iterator[dict[str, Any]]:
    message = choice.message
    if message.reasoning:
        yield _make_text_item(head, "reasoning", message.reasoning)
    if message.content or not message.tool_calls:
        yield _make_text_item(head, "content", message.content, choice)
    yield from map(_make_call_item, message.tool_calls)


def _make_response(
    request: ParsedRequest, head: ResponseHead, items: list[dict[str, Any]], choice: SampledChoice | None
) -> dict[str, Any]:
    """Return the response object, with the status `in_progress` if there is no choice."""
    body: ResponsesBody = request.body
    status = "in_progress" if choice is None else "incomplete" if choice.finish == "length" else "completed"
    usage = None if choice is None else _make_usage(head.prompt_tokens, choice.num_tokens)
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
    tool_names: dict[str, str] = {}  # id of a tool call -> name of the tool
    if instructions:
        yield Message("system", instructions)
    for index, item in enumerate(items):
        param = f"input[{index}]"
        if item.type == "message":
            yield _read_message(item, param, images)
        elif item.type == "reasoning":
            pieces = _read_pieces(item.content or (), f"{param}.content", images)
            text = make_message("assistant", pieces, f"{param}.content", "").content
            yield Message("assistant", reasoning=text or None)
        elif item.type == "function_call":
            call = ToolCall(
                _get_field(item, "name", param),
                _load_arguments(item, param),
                _get_field(item, "call_id", param),
            )
            tool_names[call.id] = call.name
            yield Message("assistant", tool_calls=[call])
        elif item.type == "function_call_output":
            call_id = _get_field(item, "call_id", param)
            if call_id not in tool_names:
                raise ApiError(f"{param} has a call_id that matches no function_call", f"{param}.call_id")
            pieces = _read_pieces(_get_field(item, "output", param), f"{param}.output", images)
            fields = {"tool_call_id": call_id, "name": tool_names[call_id]}
            yield make_message("tool", pieces, f"{param}.output", **fields)
        else:
            hint = "Send items of type message, reasoning, function_call and function_call_output"
            raise unsupported_error(f"{param}.type", item.type, hint)


def _read_message(item: _Item, param: str, images: ImageParts) -> Message:
    role = _get_field(item, "role", param)
    pieces = _read_pieces(_get_field(item, "content", param), f"{param}.content", images)
    separator = "" if role == "assistant" else "\n\n"
    return make_message("system" if role == "developer" else role, pieces, f"{param}.content", separator)


def _read_pieces(parts: Iterable[_ContentPart], param: str, images: ImageParts) -> Iterator[str | Image]:
    for index, part in enumerate(parts):
        if part.type == "input_image":
            fields = {"type": "input_image", "image_url": part.image_url}
            yield images.read(fields, f"{param}[{index}].type", "input_image", "Send text only")
            continue
        if part.type not in TEXT_PARTS:
            raise unsupported_error(f"{param}[{index}].type", part.type, "Send text only")
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            text_param = f"{param}[{index}].text"
            raise ApiError(f"{text_param} is missing", text_param, code="missing_required_parameter")
        yield text


def _get_field(item: _Item, field_name: str, param: str) -> Any:
    value = getattr(item, field_name)
    if value is None:
        text = f"{param}.{field_name} is missing in an item of type {item.type}"
        raise ApiError(text, f"{param}.{field_name}", code="missing_required_parameter")
    return value


def _load_arguments(item: _Item, param: str) -> dict[str, Any]:
    try:
        arguments = json.loads(item.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{param}.arguments is not valid JSON: {error}", f"{param}.arguments") from None
    if not isinstance(arguments, dict):
        raise ApiError(f"{param}.arguments must be a JSON object", f"{param}.arguments")
    return arguments


def _read_tools(request: ResponsesBody, ignored_fields: set[str]) -> list[ToolSpec]:
    """Return the functions that the client runs. Add names of tools that run at the provider to `ignored_fields`."""
    if request.tool_choice not in ("auto", "none"):
        raise unsupported_error("tool_choice", request.tool_choice, "Use auto or none")
    specs: list[ToolSpec] = []
    for index, tool in enumerate(request.tools):
        if tool.type != "function":
            ignored_fields.add(f"tool {tool.type}")
        elif tool.name is None:
            param = f"tools[{index}].name"
            raise ApiError(f"{param} is missing", param, code="missing_required_parameter")
        else:
            spec = ToolSpec(tool.name, tool.description)
            spec.parameters = tool.parameters or spec.parameters
            specs.append(spec)
    return specs if request.tool_choice == "auto" else []
