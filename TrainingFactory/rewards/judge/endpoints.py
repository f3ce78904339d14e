"""Models that judge: behind an OpenAI-compatible or an Anthropic-style endpoint, or sampled in this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from TrainingFactory.common.endpoint import Endpoint, first_message
from TrainingFactory.protocols import ChatFormat, Sampler
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Message, SamplingParams

CHARS_PER_TOKEN = 4  # where an endpoint does not say what it has counted
DEFAULT_MAX_TOKENS = 1024  # Anthropic's endpoint wants to be told
ANTHROPIC_VERSION = "2023-06-01"
Kind = Literal["unavailable", "refused", "cut", "unreadable", "out_of_range", "budget", "error"]


class JudgeFailure(Exception):
    """Say that there is no verdict, so that what was to be judged cannot be scored. Never a zero."""

    def __init__(self, text: str, kind: Kind) -> None:
        super().__init__(text)
        self.kind: Kind = kind


@dataclass(slots=True, frozen=True)
class Reply:
    """Hold what a judge wrote and the tokens that it took."""

    text: str
    input_tokens: int
    output_tokens: int
    estimated: bool = False  # the endpoint did not count them
    fault: Kind | None = None  # it cost something, but is no verdict


@runtime_checkable
class JudgeModel(Protocol):
    """Answer, or raise ModelError. `number` tells samples of one prompt apart, `identity` models in the cache."""

    @property
    def identity(self) -> str: ...
    async def ask(self, messages: Sequence[Message], number: int) -> Reply: ...
    async def close(self) -> None: ...


class OpenAIEndpoint(Endpoint):
    """Ask any `/chat/completions`: vLLM, SGLang, hosted models. `options` go into the request (temperature, ...)."""

    @property
    def identity(self) -> str:
        return digest(self.url, self.model, json.dumps(self.options, sort_keys=True, default=str))

    async def ask(self, messages: Sequence[Message], number: int) -> Reply:
        body = self.body(messages)
        if isinstance(body.get("seed"), int):  # or all samples of a prompt would be the same
            body["seed"] += number
        return self.read(await self.exchange(body), lambda answer: self.reply(answer, messages))

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        listed = [{"role": message.role, "content": message.content} for message in messages]
        return self.options | {"model": self.model, "messages": listed}

    def reply(self, answer: Any, messages: Sequence[Message]) -> Reply:
        [choice, *_] = answer["choices"]
        fault = fault_of(choice.get("finish_reason"), "content_filter", "length")
        if choice["message"].get("refusal"):
            fault = "refused"
        usage = answer.get("usage") or {}
        text = first_message(answer).content
        return counted(text, messages, usage.get("prompt_tokens"), usage.get("completion_tokens"), fault)


class AnthropicEndpoint(OpenAIEndpoint):
    """Ask Anthropic's `/messages`, such as `https://api.anthropic.com/v1`."""

    PATH = "/messages"

    def headers(self, key: str | None) -> dict[str, str]:
        return {"anthropic-version": ANTHROPIC_VERSION} | ({"x-api-key": key} if key else {})

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        said = [each for each in messages if each.role != "system"]
        system = "\n\n".join(each.content for each in messages if each.role == "system")
        options = {"max_tokens": DEFAULT_MAX_TOKENS} | self.options
        listed = [{"role": each.role, "content": each.content} for each in said]
        return options | {"model": self.model, "system": system, "messages": listed}

    def reply(self, answer: Any, messages: Sequence[Message]) -> Reply:
        fault = fault_of(answer.get("stop_reason"), "refusal", "max_tokens")
        text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
        usage = answer.get("usage") or {}
        return counted(text, messages, usage.get("input_tokens"), usage.get("output_tokens"), fault)


class SampledJudge:
    """Ask weights in this process. `name` stands for them in the cache: give another one to other weights."""

    def __init__(self, sampler: Sampler, chat: ChatFormat, params: SamplingParams, name: str) -> None:
        self.sampler, self.chat, self.name = sampler, chat, name
        self.params = dataclasses.replace(params, stop_ids=params.stop_ids or chat.stop_ids)

    @property
    def identity(self) -> str:
        return digest(self.name, repr(self.params), f"{self.sampler.policy_version}")

    async def ask(self, messages: Sequence[Message], number: int) -> Reply:
        prompt = self.chat.render(messages)
        room = self.sampler.max_length - len(prompt)
        if room < 1:
            text = f"the judge's prompt has {len(prompt)} tokens, its model takes {self.sampler.max_length}"
            raise JudgeFailure(text, "error")
        params = dataclasses.replace(
            self.params, seed=self.params.seed + number, max_tokens=min(room, self.params.max_tokens)
        )
        completion = await self.sampler.sample(prompt, params)
        text = self.chat.parse(completion.token_ids, prompt).content
        fault = fault_of(completion.finish, "", "length")
        return Reply(text, len(prompt), len(completion.token_ids), fault=fault)

    async def close(self) -> None:
        """Leave the sampler open: it was handed in."""


def fault_of(finish: Any, refused: str, cut: str) -> Kind | None:
    """Return what is wrong with an answer that ended so: one that was cut off may read as another, `10` as `1`."""
    return "refused" if finish == refused else "cut" if finish == cut else None


def counted(text: str, messages: Sequence[Message], given: Any, written: Any, fault: Kind | None) -> Reply:
    """Return the reply with the endpoint's own counts of tokens, or with estimates where it gives none."""
    if isinstance(given, int) and isinstance(written, int):
        return Reply(text, given, written, fault=fault)
    asked = sum(len(message.content) for message in messages)
    tokens = asked // CHARS_PER_TOKEN + 1, len(text) // CHARS_PER_TOKEN + 1
    return Reply(text, *tokens, estimated=True, fault=fault)
