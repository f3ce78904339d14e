"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from TrainingFactory.agent_api.dialects.base import (
    Dialect,
    ImageParts,
    ResponseHead,
    Seed,
    SentText,
    StopStrings,
    StrictBody,
    Temperature,
    TopK,
    TopP,
    make_message,
    validate,
)
from TrainingFactory.agent_api.turns.requests import (
    SAMPLING_FIELDS,
    ParsedRequest,
    apply_settings,
    load_body,
)
from TrainingFactory.agent_api.turns.responses import EventWriter, SampledChoice
from TrainingFactory.common.http.api import ApiError, StreamEvent
from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.common.options import Count, Share, Text
from TrainingFactory.types import Image, Message, SamplingParams, ToolCall, ToolSpec

# Parameters that the engine does not support may have their neutral value, because some clients always send them.
Zero = Annotated[float, Field(ge=0, le=0)]
DELTA_FIELDS = {"reasoning": "reasoning_content", "content": "content"}


class _ChatRow(StrictBody):
    @classmethod
    def _is_set(cls, name: str, value: Any) -> bool:
        """Return whether to keep a field. Unknown fields with empty values are dropped too, because clients send many
        of them."""
        return bool(value) or (value is not None and name in cls.model_fields)


class _ContentPart(_ChatRow):
    type: Literal["text", "image_url"] = "text"
    text: str = ""
    image_url: dict[str, Any] | None = None
    cache_control: Any = None  # ignored: it affects only speed

    @model_validator(mode="after")
    def _check_image_url(self, info: ValidationInfo) -> _ContentPart:
        if (self.type == "image_url") != (self.image_url is not None):
            raise ValueError("a part of type image_url needs image_url, and no other has it")
        if self.type == "text" and "text" not in self.model_fields_set:
            raise ValueError("text is missing")
        if self.cache_control is not None and isinstance(info.context, set):
            info.context.add("cache_control")
        return self


def _as_parts(content: Any) -> Any:
    return [{"text": content}] if isinstance(content, str) else content


def _load_arguments(value: Any) -> Any:
    return json.loads(value) if value and isinstance(value, str) else value or {}


class _HistoryRow(_ChatRow):
    provider_specific_fields: Any = None  # LiteLLM's copy of fields of an earlier answer; ignored


class _FunctionCall(_HistoryRow):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_load_arguments)] = Field(default_factory=dict)


class _ToolCall(_HistoryRow):
    id: Text
    type: Literal["function"] = "function"
    function: _FunctionCall
    index: int | None = None


class _Message(_HistoryRow):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_ContentPart] | None, BeforeValidator(_as_parts)] = None
    name: str | None = None
    tool_calls: list[_ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Function(_ChatRow):
    name: Text
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Any = None


class _Tool(_ChatRow):
    type: Literal["function"] = "function"
    function: _Function


class _StreamOptions(StrictBody):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class _ResponseFormat(StrictBody):
    type: Literal["text"] = "text"


class ChatBody(StrictBody):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    model: str | None = None
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: Seed | None = None
    stop: Annotated[StopStrings, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = (
        Field(default_factory=list)
    )
    logprobs: bool = False
    stream: bool = False
    stream_options: _StreamOptions = Field(default_factory=_StreamOptions)
    parallel_tool_calls: Literal[True] = True
    top_logprobs: Zero = 0
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: dict[str, Any] = Field(default_factory=dict, max_length=0)
    response_format: _ResponseFormat = Field(default_factory=_ResponseFormat)
    # Accepted and ignored: these describe the client and do not change the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatDialect(Dialect):
    name = "chat completions"

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
        request = validate(ChatBody, load_body(body, "messages", max_length), ignored_fields)
        functions = [
            row.function.model_dump(exclude={"strict"}, exclude_defaults=True) for row in request.tools
        ]
        tools = [ToolSpec(**function) for function in functions] if request.tool_choice == "auto" else []
        settings = request.model_dump(include={*SAMPLING_FIELDS, "seed", "stream"}, exclude_unset=True)
        token_limits = request.model_dump(include={"max_tokens", "max_completion_tokens"}, exclude_unset=True)
        parsed_request = ParsedRequest(
            _read_messages(request.messages, ImageParts(sees_images)), tools, apply_settings(defaults, settings),
            request, request.model, request.n, stop=request.stop, logprobs=request.logprobs,
            stream=request.stream, settings=settings, token_limits=token_limits, ignored_fields=ignored_fields,
        )  # fmt: skip
        if request.seed is not None:
            parsed_request.seed = request.seed
        return parsed_request

    def make_response(
        self, request: ParsedRequest, head: ResponseHead, choices: Sequence[SampledChoice]
    ) -> dict[str, Any]:
        rows = [
            {
                "index": index,
                "message": _message_to_dict(choice.message),
                "finish_reason": choice.finish,
                "logprobs": choice.logprobs,
            }
            for index, choice in enumerate(choices)
        ]
        return _make_head(head, "chat.completion") | {"choices": rows, "usage": _make_usage(head, choices)}

    def make_writer(self, request: ParsedRequest, head: ResponseHead) -> EventWriter:
        return _ChatEvents(self, request, head)

    def make_error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body


class _ChatEvents(EventWriter):
    def __init__(self, dialect: ChatDialect, request: ParsedRequest, head: ResponseHead) -> None:
        self._dialect, self._head = dialect, head
        self._includes_usage = request.body.stream_options.include_usage
        self._chunk_fields = _make_head(head, "chat.completion.chunk")
        self._chunk_fields |= {"usage": None} if self._includes_usage else {}
        self._sent_texts = [SentText() for _ in range(request.n)]

    def write_start(self) -> Iterable[StreamEvent]:
        return [
            self._make_delta(index, {"role": "assistant", "content": ""})
            for index in range(len(self._sent_texts))
        ]

    def write_partial(self, choice_index: int, message: Message) -> Iterable[StreamEvent]:
        return [
            self._make_delta(choice_index, {DELTA_FIELDS[field]: text})
            for field, text in self._sent_texts[choice_index].take_new_text(message)
        ]

    def write_finish(self, choice_index: int, choice: SampledChoice) -> Iterator[StreamEvent]:
        yield from self.write_partial(choice_index, choice.message)
        for call_index, call in enumerate(_message_to_dict(choice.message).get("tool_calls", [])):
            yield self._make_delta(choice_index, {"tool_calls": [{"index": call_index} | call]})
        yield self._make_delta(choice_index, {}, choice.finish, choice.logprobs)

    def write_end(self, choices: Sequence[SampledChoice]) -> Iterator[StreamEvent]:
        if self._includes_usage:
            yield json.dumps(self._chunk_fields | {"choices": [], "usage": _make_usage(self._head, choices)})
        yield "[DONE]"

    def write_error(self, error: ApiError) -> Iterable[StreamEvent]:
        return [self._dialect.make_error_event(error), "[DONE]"]

    def _make_delta(
        self, choice_index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> StreamEvent:
        choice = {"index": choice_index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return json.dumps(self._chunk_fields | {"choices": [choice]})


def _make_head(head: ResponseHead, object_type: str) -> dict[str, Any]:
    """Return the common fields of a response, or of every chunk of a stream."""
    body = {"id": f"chatcmpl-{head.id}", "object": object_type, "created": head.created, "model": head.model}
    body |= {} if head.version is None else {"system_fingerprint": head.version}
    return body | head.extra_fields


def _read_messages(rows: list[_Message], images: ImageParts) -> list[Message]:
    messages: list[Message] = []
    tool_names: dict[str, str] = {}  # id of a tool call -> name of the tool
    for index, row in enumerate(rows):
        calls = [ToolCall(call.function.name, call.function.arguments, call.id) for call in row.tool_calls]
        tool_names |= {call.id: call.name for call in calls}
        reasoning = row.reasoning if row.reasoning_content is None else row.reasoning_content
        param = f"messages[{index}]"
        if calls and row.role != "assistant":
            raise ApiError(f"{param} has tool_calls, but its role is not assistant", f"{param}.tool_calls")
        if row.content is None and not calls and reasoning is None:
            raise ApiError(f"{param} has no content", f"{param}.content")
        if row.role == "tool" and row.tool_call_id not in tool_names:
            raise ApiError(f"{param} has a tool_call_id that matches no tool call", f"{param}.tool_call_id")
        role = "system" if row.role == "developer" else row.role
        pieces = _read_pieces(row.content or (), f"{param}.content", images)
        name = tool_names[row.tool_call_id or ""] if role == "tool" else row.name
        fields = {"tool_calls": calls, "tool_call_id": row.tool_call_id, "name": name, "reasoning": reasoning}
        messages.append(make_message(role, pieces, f"{param}.content", "", **fields))
    return messages


def _read_pieces(parts: Iterable[_ContentPart], param: str, images: ImageParts) -> Iterator[str | Image]:
    for index, part in enumerate(parts):
        if part.image_url is None:
            yield part.text
        else:
            fields = {"image_url": part.image_url}
            yield images.read(fields, f"{param}[{index}].type", part.type, "Send text only")


def _message_to_dict(message: Message) -> dict[str, Any]:
    message_dict = message_to_dict(message) | {"refusal": None}
    if not message.reasoning:
        message_dict.pop("reasoning_content", None)
    if message.tool_calls and not message.content:
        message_dict["content"] = None
    return message_dict


def _make_usage(head: ResponseHead, choices: Sequence[SampledChoice]) -> dict[str, int]:
    num_sampled = sum(choice.num_tokens for choice in choices)
    total = head.prompt_tokens + num_sampled
    return {"prompt_tokens": head.prompt_tokens, "completion_tokens": num_sampled, "total_tokens": total}
