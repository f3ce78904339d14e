"""Judge models: behind an OpenAI-compatible or an Anthropic-style endpoint, or sampled in this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from TrainingFactory.common.endpoint import Endpoint, message_of_response
from TrainingFactory.protocols import ChatFormat, Sampler
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Message, SamplingParams

CHARS_PER_TOKEN = 4  # estimate for endpoints that do not report token counts
DEFAULT_MAX_TOKENS = 1024  # Anthropic's endpoint requires max_tokens
ANTHROPIC_VERSION = "2023-06-01"
FailureKind = Literal["unavailable", "refused", "cut", "unreadable", "out_of_range", "budget", "error"]


class JudgeFailure(Exception):
    """Raised when there is no valid verdict: the episode is unscored, never rewarded with zero."""

    def __init__(self, text: str, kind: FailureKind) -> None:
        super().__init__(text)
        self.kind: FailureKind = kind


@dataclass(slots=True, frozen=True)
class JudgeReply:
    """Reply of a judge model, with its token counts."""

    text: str
    input_tokens: int
    output_tokens: int
    estimated: bool = False  # token counts are estimates
    fault: FailureKind | None = None  # why a billed reply is not a verdict


@runtime_checkable
class JudgeModel(Protocol):
    """Model that replies or raises ModelError. `number` is the sample's index; `identity` is part of the cache key."""

    @property
    def identity(self) -> str: ...
    async def ask(self, messages: Sequence[Message], number: int) -> JudgeReply: ...
    async def close(self) -> None: ...


class OpenAIEndpoint(Endpoint):
    """Client of any `/chat/completions`: vLLM, SGLang, hosted models. `options` are request fields (temperature)."""

    @property
    def identity(self) -> str:
        return digest(self.url, self.model, json.dumps(self.options, sort_keys=True, default=str))

    async def ask(self, messages: Sequence[Message], number: int) -> JudgeReply:
        body = self.body(messages)
        if isinstance(body.get("seed"), int):  # a fixed seed would make all samples of a prompt equal
            body["seed"] += number
        return self.read(await self.exchange(body), lambda answer: self.reply(answer, messages))

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        dialogue = [{"role": message.role, "content": message.content} for message in messages]
        return self.options | {"model": self.model, "messages": dialogue}

    def reply(self, answer: Any, messages: Sequence[Message]) -> JudgeReply:
        [choice, *_] = answer["choices"]
        fault = fault_of(choice.get("finish_reason"), "content_filter", "length")
        if choice["message"].get("refusal"):
            fault = "refused"
        usage = answer.get("usage") or {}
        text = message_of_response(answer).content
        return reply_with_usage(
            text, messages, usage.get("prompt_tokens"), usage.get("completion_tokens"), fault
        )


class AnthropicEndpoint(OpenAIEndpoint):
    """Client of Anthropic's `/messages`, such as `https://api.anthropic.com/v1`."""

    PATH = "/messages"

    def headers(self, key: str | None) -> dict[str, str]:
        return {"anthropic-version": ANTHROPIC_VERSION} | ({"x-api-key": key} if key else {})

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        others = [message for message in messages if message.role != "system"]
        system = "\n\n".join(message.content for message in messages if message.role == "system")
        options = {"max_tokens": DEFAULT_MAX_TOKENS} | self.options
        dialogue = [{"role": message.role, "content": message.content} for message in others]
        return options | {"model": self.model, "system": system, "messages": dialogue}

    def reply(self, answer: Any, messages: Sequence[Message]) -> JudgeReply:
        fault = fault_of(answer.get("stop_reason"), "refusal", "max_tokens")
        text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
        usage = answer.get("usage") or {}
        return reply_with_usage(text, messages, usage.get("input_tokens"), usage.get("output_tokens"), fault)


class SampledJudge:
    """Judge model sampled in this process. `name` identifies its weights in the cache: use one name per model."""

    def __init__(self, sampler: Sampler, chat: ChatFormat, params: SamplingParams, name: str) -> None:
        self.sampler, self.chat, self.name = sampler, chat, name
        self.params = dataclasses.replace(params, stop_ids=params.stop_ids or chat.stop_ids)

    @property
    def identity(self) -> str:
        return digest(self.name, repr(self.params), f"{self.sampler.policy_version}")

    async def ask(self, messages: Sequence[Message], number: int) -> JudgeReply:
        prompt = self.chat.render(messages)
        tokens_left = self.sampler.max_length - len(prompt)
        if tokens_left < 1:
            limit = self.sampler.max_length
            raise JudgeFailure(f"the judge's prompt has {len(prompt)} tokens; max_length is {limit}", "error")
        max_tokens = min(tokens_left, self.params.max_tokens)
        params = dataclasses.replace(self.params, seed=self.params.seed + number, max_tokens=max_tokens)
        completion = await self.sampler.sample(prompt, params)
        text = self.chat.parse(completion.token_ids, prompt).content
        fault = fault_of(completion.finish, "", "length")
        return JudgeReply(text, len(prompt), len(completion.token_ids), fault=fault)

    async def close(self) -> None:
        """Leave the sampler open, because the caller owns it."""


def fault_of(finish: Any, refused: str, truncated: str) -> FailureKind | None:
    """Return the fault that a finish reason means. A truncated answer is a fault, because `10` may be cut to `1`."""
    if finish == refused:
        return "refused"
    return "cut" if finish == truncated else None


def reply_with_usage(
    text: str, messages: Sequence[Message], prompt: Any, output: Any, fault: FailureKind | None
) -> JudgeReply:
    """Return the reply with the endpoint's token counts, or with estimates if it reports none."""
    if isinstance(prompt, int) and isinstance(output, int):
        return JudgeReply(text, prompt, output, fault=fault)
    characters = sum(len(message.content) for message in messages)
    tokens = characters // CHARS_PER_TOKEN + 1, len(text) // CHARS_PER_TOKEN + 1
    return JudgeReply(text, *tokens, estimated=True, fault=fault)
