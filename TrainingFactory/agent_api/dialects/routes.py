"""The addresses of the API dialects."""

from __future__ import annotations

from dataclasses import dataclass

from TrainingFactory.agent_api.dialects.base import Dialect
from TrainingFactory.agent_api.dialects.chat import ChatDialect
from TrainingFactory.agent_api.dialects.gemini import GeminiDialect
from TrainingFactory.agent_api.dialects.messages import MessagesDialect
from TrainingFactory.agent_api.dialects.responses import ResponsesDialect


@dataclass(frozen=True, slots=True)
class Route:
    """A URL path that takes requests of a dialect. `stream` is None if the body says whether the answer is a stream.
    With `counts_tokens`, the answer is the number of tokens of the prompt."""

    path: str
    dialect: Dialect
    stream: bool | None = None
    counts_tokens: bool = False


CHAT_DIALECT = ChatDialect()
MESSAGES_DIALECT = MessagesDialect()
RESPONSES_DIALECT = ResponsesDialect()
GEMINI_DIALECT = GeminiDialect()
GEMINI_METHODS: dict[str, dict[str, bool]] = {
    "generateContent": {"stream": False},
    "streamGenerateContent": {"stream": True},
    "countTokens": {"stream": False, "counts_tokens": True},
}
API_ROUTES = [
    Route("/v1/chat/completions", CHAT_DIALECT),
    Route("/v1/messages", MESSAGES_DIALECT),
    Route("/v1/messages/count_tokens", MESSAGES_DIALECT, stream=False, counts_tokens=True),
    Route("/v1/responses", RESPONSES_DIALECT),
    Route("/v1/responses/input_tokens", RESPONSES_DIALECT, stream=False, counts_tokens=True),
    *(
        Route(f"/{version}/models/{{model:path}}:{method}", GEMINI_DIALECT, **options)
        for version in ("v1", "v1beta")
        for method, options in GEMINI_METHODS.items()
    ),
]
