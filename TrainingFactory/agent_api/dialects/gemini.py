"""Gemini's generateContent: `POST /v1beta/models/NAME:generateContent`, `:streamGenerateContent` and `:countTokens`,
also under `/v1`. Streams are server-sent events (`alt=sse`).

Gemini's calls need no ids. Sampled calls are numbered in their conversation, so that a history without ids gives the
same messages as one with the server's ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.alias_generators import to_camel

from TrainingFactory.agent_api.dialects.base import (
    Dialect,
    ImageParts,
    LenientBody,
    ResponseHead,
    Seed,
    SentText,
    StopStrings,
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

ERROR_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
FINISH_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
PARTS_HINT = "Send text, function_call and function_response parts"
RESULT_FIELDS = {"result", "output", "error"}  # a function response with one of these, a text, is that text
# Fields of the generation config whose other values would need what this server does not have.
NEUTRAL_VALUES = {
    "response_mime_type": ("text/plain", "Ask for the format in the contents"),
    "response_schema": (None, "Ask for the format in the contents"),
    "response_json_schema": (None, "Ask for the format in the contents"),
    "response_modalities": (["TEXT"], "Use TEXT"),
    "presence_penalty": (0, "Leave it out"),
    "frequency_penalty": (0, "Leave it out"),
    "logprobs": (0, "The engine computes only the sampled token's log-prob"),
}


# Clients send maxOutputTokens or max_output_tokens.
SNAKE_CASE = {
    to_camel(name): name
    for name in (
        "function_call", "function_response", "thought_signature", "inline_data", "file_data", "executable_code",
        "code_execution_result", "parameters_json_schema", "response_json_schema", "function_declarations",
        "allowed_function_names", "function_calling_config", "include_thoughts", "top_p", "top_k",
        "max_output_tokens", "stop_sequences", "candidate_count", "response_logprobs", "thinking_config",
        "response_mime_type", "response_schema", "response_modalities", "presence_penalty", "frequency_penalty",
        "system_instruction", "tool_config", "generation_config", "cached_content", "safety_settings",
    )
}  # fmt: skip


class _CamelCaseBody(LenientBody):
    @classmethod
    def _to_field_name(cls, key: str) -> str:
        return SNAKE_CASE.get(key, key)


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _FunctionCall(_CamelCaseBody):
    id: Text | None = None
    name: Text
    args: dict[str, Any] = Field(default_factory=dict)


class _FunctionResponse(_CamelCaseBody):
    id: Text | None = None
    name: Text
    response: dict[str, Any] = Field(default_factory=dict)
    parts: list[dict[str, Any]] = Field(default_factory=list)


class _ContentPart(_CamelCaseBody):
    text: str | None = None
    thought: bool = False
    thought_signature: Any = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None
    inline_data: Any = None
    file_data: Any = None
    executable_code: Any = None
    code_execution_result: Any = None


def _as_parts(parts: Any) -> Any:
    return [{"text": parts}] if isinstance(parts, str) else [parts] if isinstance(parts, dict) else parts


class _Content(_CamelCaseBody):
    role: Literal["user", "model", "function", "system"] = "user"
    parts: Annotated[list[_ContentPart], BeforeValidator(_as_parts)] = Field(default_factory=list)


def _as_content(content: Any) -> Any:
    return {"parts": content} if isinstance(content, str) else content


def _as_contents(contents: Any) -> Any:
    return contents if isinstance(contents, list) else [_as_content(contents)]


class _FunctionDeclaration(_CamelCaseBody):
    name: Text
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    parameters_json_schema: dict[str, Any] = Field(default_factory=dict)
    response: Any = None
    response_json_schema: Any = None
    behavior: Any = None


class _Tool(_CamelCaseBody):
    function_declarations: list[_FunctionDeclaration] = Field(default_factory=list)


class _FunctionCallingConfig(_CamelCaseBody):
    mode: str = "AUTO"
    allowed_function_names: list[str] = Field(default_factory=list, max_length=0)


class _ToolConfig(_CamelCaseBody):
    function_calling_config: _FunctionCallingConfig = Field(default_factory=_FunctionCallingConfig)


class _ThinkingConfig(_CamelCaseBody):
    include_thoughts: bool = False


class _GenerationConfig(_CamelCaseBody):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(_as_integer)] | None = None
    seed: Seed | None = None
    max_output_tokens: Annotated[Count, BeforeValidator(_as_integer)] | None = None
    stop_sequences: StopStrings = Field(default_factory=list)
    candidate_count: Annotated[int, Field(ge=1)] = 1
    response_logprobs: bool = False
    thinking_config: _ThinkingConfig = Field(default_factory=_ThinkingConfig)
    response_mime_type: Any = "text/plain"
    response_schema: Any = None
    response_json_schema: Any = None
    response_modalities: Any = Field(default_factory=lambda: ["TEXT"])
    presence_penalty: Any = 0
    frequency_penalty: Any = 0
    logprobs: Any = 0


class GeminiBody(_CamelCaseBody):
    """The body of `POST /v1beta/models/NAME:generateContent`."""

    contents: Annotated[list[_Content], Field(min_length=1), BeforeValidator(_as_contents)]
    model: str | None = None
    system_instruction: Annotated[_Content | None, BeforeValidator(_as_content)] = None
    tools: list[_Tool] = Field(default_factory=list)
    tool_config: _ToolConfig = Field(default_factory=_ToolConfig)
    generation_config: _GenerationConfig = Field(default_factory=_GenerationConfig)
    cached_content: Any = None
    safety_settings: Any = None  # accepted and ignored: there is no filter


class GeminiDialect(Dialect):
    name = "generateContent"

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
        request_json = load_body(body, "contents", max_length)
        if isinstance(request_json, dict) and "generateContentRequest" in request_json:  # of countTokens
            request_json = request_json["generateContentRequest"]
        request = validate(GeminiBody, request_json, ignored_fields)
        generation_config = request.generation_config
        for field, (neutral_value, hint) in NEUTRAL_VALUES.items():
            if getattr(generation_config, field) != neutral_value:
                raise unsupported_error(f"generation_config.{field}", getattr(generation_config, field), hint)
        if request.cached_content is not None:
            raise unsupported_error("cached_content", request.cached_content, "Send the whole contents")
        included_fields = {"temperature", "top_p", "top_k", "seed"}
        settings = generation_config.model_dump(include=included_fields, exclude_unset=True) | (
            {"stream": True} if stream else {}
        )
        messages = list(merge_messages(_read_messages(request, ImageParts(sees_images))))
        num_calls = sum(len(message.tool_calls) for message in messages)
        max_tokens = generation_config.max_output_tokens
        parsed_request = ParsedRequest(
            messages, _read_tools(request), apply_settings(defaults, settings), request,
            model.removeprefix("models/") if model else None, generation_config.candidate_count,
            stop=generation_config.stop_sequences, logprobs=generation_config.response_logprobs, stream=bool(stream),
            settings=settings, token_limits={} if max_tokens is None else {"max_output_tokens": max_tokens},
            clamps_limits=True, make_call_id=lambda number: f"call_{num_calls + number}", ignored_fields=ignored_fields,
        )  # fmt: skip
        if generation_config.seed is not None:
            parsed_request.seed = generation_config.seed
        return parsed_request

    def make_response(
        self, request: ParsedRequest, head: ResponseHead, choices: Sequence[SampledChoice]
    ) -> dict[str, Any]:
        candidates = [
            _make_candidate(index, _make_message_parts(request, choice.message), choice)
            for index, choice in enumerate(choices)
        ]
        return _make_chunk(head, candidates, sum(choice.num_tokens for choice in choices))

    def make_writer(self, request: ParsedRequest, head: ResponseHead) -> EventWriter:
        return _GeminiEvents(self, request, head)

    def make_error_body(self, error: ApiError) -> dict[str, Any]:
        status = ERROR_STATUS.get(error.status, "INVALID_ARGUMENT")
        error_info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": error.code.upper()}
        error_info |= {} if error.param is None else {"metadata": {"field": error.param}}
        body = {"code": error.status, "message": error.message, "status": status, "details": [error_info]}
        return {"error": body}

    def make_token_count(self, num_tokens: int) -> dict[str, Any]:
        return {"totalTokens": num_tokens}


class _GeminiEvents(EventWriter):
    def __init__(self, dialect: GeminiDialect, request: ParsedRequest, head: ResponseHead) -> None:
        self._dialect, self._request, self._head = dialect, request, head
        self._sent_texts = [SentText() for _ in range(request.n)]
        self._num_tokens = 0  # of finished choices

    def write_partial(self, choice_index: int, message: Message) -> Iterator[StreamEvent]:
        if parts := self._make_new_parts(choice_index, message):
            yield self._make_event(_make_candidate(choice_index, parts, None))

    def write_finish(self, choice_index: int, choice: SampledChoice) -> Iterator[StreamEvent]:
        self._num_tokens += choice.num_tokens
        parts = self._make_new_parts(choice_index, choice.message) + _make_call_parts(choice.message)
        yield self._make_event(_make_candidate(choice_index, parts, choice))

    def write_end(self, choices: Sequence[SampledChoice]) -> Iterable[StreamEvent]:
        return ()

    def write_error(self, error: ApiError) -> Iterable[StreamEvent]:
        return [self._dialect.make_error_event(error)]

    def _make_new_parts(self, choice_index: int, message: Message) -> list[dict[str, Any]]:
        new_texts = self._sent_texts[choice_index].take_new_text(message)
        return [part for field, text in new_texts for part in _make_text_parts(self._request, field, text)]

    def _make_event(self, candidate: dict[str, Any]) -> StreamEvent:
        return json.dumps(_make_chunk(self._head, [candidate], self._num_tokens))


def _make_chunk(head: ResponseHead, candidates: list[dict[str, Any]], num_sampled: int) -> dict[str, Any]:
    usage = {"promptTokenCount": head.prompt_tokens, "candidatesTokenCount": num_sampled}
    usage["totalTokenCount"] = head.prompt_tokens + num_sampled
    head_fields = {"modelVersion": head.version or head.model, "responseId": head.id}
    return {"candidates": candidates, "usageMetadata": usage} | head_fields | head.extra_fields


def _make_candidate(index: int, parts: list[dict[str, Any]], choice: SampledChoice | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {
        "content": {"role": "model", "parts": parts or [{"text": ""}]},
        "index": index,
    }
    if choice is None:
        return candidate
    candidate["finishReason"] = FINISH_REASONS[choice.finish]
    if choice.logprobs is not None and (rows := choice.logprobs["content"]):
        logprob_rows = [{"token": row["token"], "logProbability": row["logprob"]} for row in rows]
        candidate["avgLogprobs"] = sum(row["logprob"] for row in rows) / len(rows)
        candidate["logprobsResult"] = {"chosenCandidates": logprob_rows, "topCandidates": []}
    return candidate


def _make_text_parts(request: ParsedRequest, field: str, text: str) -> list[dict[str, Any]]:
    if field == "content":
        return [{"text": text}]
    include_thoughts = request.body.generation_config.thinking_config.include_thoughts
    return [{"text": text, "thought": True}] if include_thoughts else []


def _make_message_parts(request: ParsedRequest, message: Message) -> list[dict[str, Any]]:
    thought_parts = _make_text_parts(request, "reasoning", message.reasoning) if message.reasoning else []
    text_parts = _make_text_parts(request, "content", message.content) if message.content else []
    return thought_parts + text_parts + _make_call_parts(message)


def _make_call_parts(message: Message) -> list[dict[str, Any]]:
    return [
        {"functionCall": {"id": call.id, "name": call.name, "args": call.arguments}}
        for call in message.tool_calls
    ]


def _read_messages(request: GeminiBody, images: ImageParts) -> Iterator[Message]:
    if request.system_instruction is not None:
        pieces = _read_pieces(request.system_instruction, "system_instruction", images)
        yield make_message("system", pieces, "system_instruction")
    num_calls, open_calls = 0, list[ToolCall]()  # calls without a result
    for content_index, content in enumerate(request.contents):
        param = f"contents[{content_index}]"
        if content.role == "model":
            message = _read_model_message(content, param, num_calls)
            num_calls += len(message.tool_calls)
            open_calls += message.tool_calls
            yield message
            continue
        num_results = 0
        for index, part in enumerate(content.parts):
            if part.function_response is not None:
                num_results += 1
                yield _read_result(part.function_response, open_calls, f"{param}.parts[{index}]", images)
        pieces = list(_read_pieces(content, param, images))
        if pieces or not num_results:
            yield make_message("system" if content.role == "system" else "user", pieces, param)


def _read_model_message(content: _Content, param: str, num_calls: int) -> Message:
    message, thoughts = Message("assistant"), list[str]()
    for index, part in enumerate(content.parts):
        if part.function_call is not None:
            call = part.function_call
            call_id = call.id or f"call_{num_calls + len(message.tool_calls)}"
            message.tool_calls.append(ToolCall(call.name, call.args, call_id))
        elif part.text is not None and part.thought:
            thoughts.append(part.text)
        elif part.text is not None:
            message.content += part.text
        else:
            _check_supported(part, f"{param}.parts[{index}]")
    message.reasoning = "".join(thoughts) or None
    return message


def _read_result(
    response: _FunctionResponse, open_calls: list[ToolCall], param: str, images: ImageParts
) -> Message:
    """Return the result of the first open call with the response's id, or with its name if it has no id."""
    image_param = f"{param}.function_response.parts"
    result_images = [images.read(part, image_param, str(part), "Send text only") for part in response.parts]
    for call in open_calls:
        if response.id == call.id or (response.id is None and response.name == call.name):
            open_calls.remove(call)
            break
    else:
        text = f"{param}.function_response matches no function call without a response"
        raise ApiError(f"{text}: name {response.name!r:.60}, id {response.id!r:.60}", param)
    [(name, value)] = response.response.items() if len(response.response) == 1 else [("", None)]
    is_text = name in RESULT_FIELDS and isinstance(value, str)
    text = str(value) if is_text else json.dumps(response.response, ensure_ascii=False)
    return make_message("tool", [text, *result_images], image_param, tool_call_id=call.id, name=call.name)


def _read_pieces(content: _Content, param: str, images: ImageParts) -> Iterator[str | Image]:
    for index, part in enumerate(content.parts):
        if part.text is not None:
            yield part.text
        elif isinstance(part.inline_data, dict) and _is_image(part.inline_data):
            fields = {"inline_data": part.inline_data}
            yield images.read(fields, f"{param}.parts[{index}]", "inline_data", PARTS_HINT)
        elif part.function_response is None:
            _check_supported(part, f"{param}.parts[{index}]")


def _is_image(inline_data: dict[str, Any]) -> bool:
    mime_type = inline_data.get("mimeType", inline_data.get("mime_type"))
    return str(mime_type).startswith("image/")


def _check_supported(part: _ContentPart, param: str) -> None:
    """Raise ApiError for a part of an unsupported kind. A part with only a thought's signature is accepted."""
    unsupported_field = next((name for name in part.model_fields_set if name != "thought_signature"), None)
    if unsupported_field is not None or part.thought_signature is None:
        raise unsupported_error(param, unsupported_field or "an empty part", PARTS_HINT)


def _read_tools(request: GeminiBody) -> list[ToolSpec]:
    """Return the functions that the client runs. Tools that run at the provider count as unknown fields."""
    mode = request.tool_config.function_calling_config.mode.upper()
    if mode not in ("AUTO", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise unsupported_error("tool_config.function_calling_config.mode", mode, "Use AUTO or NONE")
    specs: list[ToolSpec] = []
    for row in (row for tool in request.tools for row in tool.function_declarations):
        spec = ToolSpec(row.name, row.description)
        spec.parameters = row.parameters_json_schema or _to_json_schema(row.parameters) or spec.parameters
        specs.append(spec)
    return [] if mode == "NONE" else specs


def _to_json_schema(schema: Any) -> Any:
    """Convert Gemini's schema, whose types are upper-case, to a JSON schema."""
    if isinstance(schema, list):
        return [_to_json_schema(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    json_schema = {name: _to_json_schema(value) for name, value in schema.items()}
    if isinstance(schema_type := schema.get("type"), str):
        json_schema["type"] = schema_type.lower()
    return json_schema
