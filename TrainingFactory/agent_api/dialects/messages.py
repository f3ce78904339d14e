"""Anthropic's messages: `POST /v1/messages` and `/v1/messages/count_tokens`."""

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
    StopStrings,
    Temperature,
    TopK,
    TopP,
    make_message,
    merge_messages,
    unsupported_error,
    validate,
)
from TrainingFactory.agent_api.turns.requests import ParsedRequest, apply_settings, draw_call_id, load_body
from TrainingFactory.agent_api.turns.responses import EventWriter, SampledChoice
from TrainingFactory.common.http.api import ApiError, StreamEvent
from TrainingFactory.common.options import Count, Text
from TrainingFactory.types import Image, Message, SamplingParams, ToolCall, ToolSpec

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
BLOCKS_HINT = "Send text, thinking, tool_use and tool_result blocks"
BLOCK_SIGNATURE = "unsigned"  # of thinking blocks; clients send it back unread


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Block(LenientBody):
    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: Any = None
    source: Any = None
    id: Text | None = None
    name: Text | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Text | None = None
    is_error: bool = False  # not shown to the model: the content says what failed
    content: Annotated[list[_Block] | None, BeforeValidator(_as_blocks)] = None
    cache_control: Any = None


class _Message(LenientBody):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], BeforeValidator(_as_blocks)]


class _Tool(LenientBody):
    type: str = "custom"
    name: Text | None = None
    description: str = ""
    input_schema: dict[str, Any] | None = None
    strict: Any = None
    cache_control: Any = None


class _ToolChoice(LenientBody):
    type: str = "auto"
    disable_parallel_tool_use: bool = False


class _ThinkingConfig(LenientBody):
    type: str
    display: str | None = None
    budget_tokens: int | None = None


class _OutputConfig(LenientBody):
    format: Any = None


class MessagesBody(LenientBody):
    """The body of `POST /v1/messages`."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    model: str | None = None
    max_tokens: Count | None = None
    system: Annotated[list[_Block], BeforeValidator(_as_blocks)] = Field(default_factory=list)
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: _ToolChoice = Field(default_factory=_ToolChoice)
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig = Field(default_factory=_OutputConfig)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: StopStrings = Field(default_factory=list)
    stream: bool = False
    cache_control: Any = None
    metadata: Any = None
    service_tier: Any = None

    @property
    def shows_thinking(self) -> bool:
        thinking = self.thinking
        return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


class MessagesDialect(Dialect):
    name = "messages"

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
        request = validate(MessagesBody, load_body(body, "messages", max_length), ignored_fields)
        if request.max_tokens is None and stream is None:
            raise ApiError("max_tokens is missing", "max_tokens", code="missing_required_parameter")
        if request.output_config.format is not None:
            raise unsupported_error(
                "output_config.format", request.output_config.format, "Ask for the format in a message"
            )
        settings = request.model_dump(include={"temperature", "top_p", "top_k", "stream"}, exclude_unset=True)
        images = ImageParts(sees_images)
        system_text = make_message("system", _read_pieces(request.system, "system", images), "system").content
        messages = list(merge_messages(_read_messages(system_text, request.messages, images)))
        if messages[-1].role == "assistant":
            text = (
                "the last message has the role assistant, but this server cannot continue a prefilled answer"
            )
            raise ApiError(f"{text}. End with a user message", f"messages[{len(request.messages) - 1}].role")
        return ParsedRequest(
            messages, _read_tools(request, ignored_fields), apply_settings(defaults, settings), request, request.model,
            stop=request.stop_sequences, stream=request.stream, settings=settings, clamps_limits=True,
            token_limits={} if request.max_tokens is None else {"max_tokens": request.max_tokens},
            ignored_fields=ignored_fields, make_call_id=lambda number: draw_call_id(number).replace("call", "toolu"),
        )  # fmt: skip

    def make_response(
        self, request: ParsedRequest, head: ResponseHead, choices: Sequence[SampledChoice]
    ) -> dict[str, Any]:
        [choice] = choices
        message, blocks = choice.message, list[dict[str, Any]]()
        if message.reasoning and request.body.shows_thinking:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": BLOCK_SIGNATURE})
        if message.content:
            blocks.append({"type": "text", "text": message.content, "citations": None})
        blocks += [_make_tool_use(call, call.arguments) for call in message.tool_calls]
        return _make_head(head) | {"content": blocks} | _make_end_fields(request, head, choice)

    def make_writer(self, request: ParsedRequest, head: ResponseHead) -> EventWriter:
        return _MessagesEvents(self, request, head)

    def make_error_body(self, error: ApiError) -> dict[str, Any]:
        # Clients shorten their history if the error begins with these words.
        prefix = "prompt is too long: " if error.code == "context_length_exceeded" else ""
        category = ERROR_TYPES.get(error.status, "invalid_request_error")
        body = {"type": category, "message": prefix + error.message, "param": error.param, "code": error.code}
        return {"type": "error", "error": body}

    def make_error_event(self, error: ApiError) -> StreamEvent:
        return _encode(self.make_error_body(error))

    def make_token_count(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}


class _MessagesEvents(EventWriter):
    def __init__(self, dialect: MessagesDialect, request: ParsedRequest, head: ResponseHead) -> None:
        self._dialect, self._request, self._head = dialect, request, head
        self._sent_text = SentText()
        self._open_block_type: str | None = None  # kind of the open block
        self._block_index = -1  # of the last block

    def write_start(self) -> Iterable[StreamEvent]:
        usage = _make_usage(self._head, 0)
        message = _make_head(self._head) | {"content": [], "stop_reason": None, "stop_sequence": None}
        return [_encode({"type": "message_start", "message": message | {"usage": usage}})]

    def write_partial(self, choice_index: int, message: Message) -> Iterator[StreamEvent]:
        for field, text in self._sent_text.take_new_text(message):
            if field == "content":
                yield from self._write_text("text", text)
            elif self._request.body.shows_thinking:
                yield from self._write_text("thinking", text)

    def write_finish(self, choice_index: int, choice: SampledChoice) -> Iterator[StreamEvent]:
        yield from self.write_partial(0, choice.message)
        yield from self._close_block()
        for call in choice.message.tool_calls:
            yield self._start_block(_make_tool_use(call, {}))
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            yield self._make_delta({"type": "input_json_delta", "partial_json": arguments})
            yield self._stop_block()

    def write_end(self, choices: Sequence[SampledChoice]) -> Iterable[StreamEvent]:
        fields = _make_end_fields(self._request, self._head, choices[0])
        usage = fields.pop("usage")
        return [
            _encode({"type": "message_delta", "delta": fields, "usage": usage}),
            _encode({"type": "message_stop"}),
        ]

    def write_error(self, error: ApiError) -> Iterable[StreamEvent]:
        return [self._dialect.make_error_event(error)]

    def _write_text(self, block_type: str, text: str) -> Iterator[StreamEvent]:
        if self._open_block_type != block_type:
            yield from self._close_block()
            self._open_block_type = block_type
            signature = {"signature": ""} if block_type == "thinking" else {}
            yield self._start_block({"type": block_type, block_type: ""} | signature)
        yield self._make_delta({"type": f"{block_type}_delta", block_type: text})

    def _close_block(self) -> Iterator[StreamEvent]:
        if self._open_block_type == "thinking":
            yield self._make_delta({"type": "signature_delta", "signature": BLOCK_SIGNATURE})
        if self._open_block_type is not None:
            yield self._stop_block()
        self._open_block_type = None

    def _start_block(self, block: dict[str, Any]) -> StreamEvent:
        self._block_index += 1
        return _encode({"type": "content_block_start", "index": self._block_index, "content_block": block})

    def _make_delta(self, delta: dict[str, Any]) -> StreamEvent:
        return _encode({"type": "content_block_delta", "index": self._block_index, "delta": delta})

    def _stop_block(self) -> StreamEvent:
        return _encode({"type": "content_block_stop", "index": self._block_index})


def _encode(fields: dict[str, Any]) -> StreamEvent:
    return {"event": fields["type"], "data": json.dumps(fields)}


def _read_messages(system_text: str, rows: Sequence[_Message], images: ImageParts) -> Iterator[Message]:
    tool_names: dict[str, str] = {}  # id of a tool call -> name of the tool
    if system_text:
        yield Message("system", system_text)
    for row_index, row in enumerate(rows):
        param = f"messages[{row_index}]"
        if row.role == "assistant":
            message = _read_assistant_message(row.content, f"{param}.content")
            tool_names |= {call.id: call.name for call in message.tool_calls}
            yield message
            continue
        result_blocks = [block for block in row.content if block.type == "tool_result"]
        if result_blocks and row.role != "user":
            raise ApiError(f"{param} has tool results, but its role is not user", f"{param}.role")
        for index, block in enumerate(row.content):
            if block.type == "tool_result":
                yield _read_tool_result(block, tool_names, f"{param}.content[{index}]", images)
        pieces = list(_read_pieces(row.content, f"{param}.content", images, skipped_type="tool_result"))
        if pieces or not result_blocks:
            yield make_message(row.role, pieces, f"{param}.content")


def _read_assistant_message(blocks: Sequence[_Block], param: str) -> Message:
    message, thoughts = Message("assistant"), list[str]()
    for index, block in enumerate(blocks):
        block_param = f"{param}[{index}]"
        if block.type == "text":
            message.content += _get_field(block, "text", block_param)
        elif block.type == "thinking":
            thoughts.append(_get_field(block, "thinking", block_param))
        elif block.type == "tool_use":
            name, call_id = _get_field(block, "name", block_param), _get_field(block, "id", block_param)
            message.tool_calls.append(ToolCall(name, block.input or {}, call_id))
        elif block.type != "redacted_thinking":  # has no text
            raise _unknown_block_error(block, block_param)
    message.reasoning = "".join(thoughts) or None
    return message


def _read_tool_result(block: _Block, tool_names: dict[str, str], param: str, images: ImageParts) -> Message:
    call_id = _get_field(block, "tool_use_id", param)
    if call_id not in tool_names:
        raise ApiError(f"{param} has a tool_use_id that matches no tool_use block", f"{param}.tool_use_id")
    pieces = _read_pieces(block.content or (), f"{param}.content", images)
    return make_message("tool", pieces, f"{param}.content", tool_call_id=call_id, name=tool_names[call_id])


def _read_pieces(
    blocks: Iterable[_Block], param: str, images: ImageParts, skipped_type: str = ""
) -> Iterator[str | Image]:
    """Yield the texts and images of blocks; raise ApiError for any other block."""
    for index, block in enumerate(blocks):
        if block.type == "text":
            yield _get_field(block, "text", f"{param}[{index}]")
        elif block.type == "image":
            fields = {"type": "image", "source": block.source}
            yield images.read(fields, f"{param}[{index}].type", "image", BLOCKS_HINT)
        elif block.type != skipped_type:
            raise _unknown_block_error(block, f"{param}[{index}]")


def _get_field(block: _Block, field_name: str, param: str) -> str:
    value = getattr(block, field_name)
    if value is None:
        text = f"{param}.{field_name} is missing in a block of type {block.type}"
        raise ApiError(text, f"{param}.{field_name}", code="missing_required_parameter")
    return value


def _unknown_block_error(block: _Block, param: str) -> ApiError:
    return unsupported_error(f"{param}.type", block.type, BLOCKS_HINT)


def _read_tools(request: MessagesBody, ignored_fields: set[str]) -> list[ToolSpec]:
    """Return the tools that the client runs. Add names of tools that run at the provider to `ignored_fields`."""
    tool_choice = request.tool_choice
    if tool_choice.type not in ("auto", "none"):
        raise unsupported_error("tool_choice.type", tool_choice.type, "Use auto or none")
    if tool_choice.disable_parallel_tool_use:
        raise unsupported_error("tool_choice.disable_parallel_tool_use", True, "Leave it out")
    specs: list[ToolSpec] = []
    for index, tool in enumerate(request.tools):
        if tool.type != "custom":
            ignored_fields.add(f"tool {tool.type}")
            continue
        for field_name in ("name", "input_schema"):
            if getattr(tool, field_name) is None:
                param = f"tools[{index}].{field_name}"
                raise ApiError(f"{param} is missing", param, code="missing_required_parameter")
        specs.append(ToolSpec(tool.name or "", tool.description, tool.input_schema or {}))
    return specs if tool_choice.type == "auto" else []


def _make_tool_use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _make_head(head: ResponseHead) -> dict[str, Any]:
    fields = {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": head.model}
    return fields | head.extra_fields


def _make_end_fields(request: ParsedRequest, head: ResponseHead, choice: SampledChoice) -> dict[str, Any]:
    stop_reason = STOP_REASONS[choice.finish]
    if choice.stop_string is not None and stop_reason == "end_turn":
        stop_reason = "stop_sequence"
    if choice.finish == "length" and choice.num_tokens < request.token_limits["max_tokens"]:
        stop_reason = "model_context_window_exceeded"
    usage = _make_usage(head, choice.num_tokens)
    return {"stop_reason": stop_reason, "stop_sequence": choice.stop_string, "usage": usage}


def _make_usage(head: ResponseHead, num_sampled: int) -> dict[str, int]:
    cache_fields = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": head.prompt_tokens, "output_tokens": num_sampled} | cache_fields
