"""The addresses of the API dialects."""

from __future__ import annotations

from dataclasses import dataclass

from TrainingFactory.agent_api.dialects.base import Dialect
from TrainingFactory.agent_api.dialects.chat import ChatDialect
from TrainingFactory.agent_api.dialects.messages import MessagesDialect


@dataclass(frozen=True, slots=True)
class Route:
    """An address that takes requests of a dialect. `stream` is None if the body says whether the answer is a stream.
    With `counts`, the answer is the number of tokens of the prompt."""

    path: str
    dialect: Dialect
    stream: bool | None = None
    counts: bool = False


CHAT = ChatDialect()
MESSAGES = MessagesDialect()
ROUTES = [
    Route("/v1/chat/completions", CHAT),
    Route("/v1/messages", MESSAGES),
    Route("/v1/messages/count_tokens", MESSAGES, stream=False, counts=True),
]
