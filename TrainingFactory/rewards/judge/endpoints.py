"""Judge models: behind an endpoint, or sampled in this process."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

from TrainingFactory.common.endpoints.messages import ModelReply, ModelRequest
from TrainingFactory.protocols import ChatFormat, Sampler
from TrainingFactory.tools.endpoints.client import ModelFailure
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Message, SamplingParams


class JudgeFailure(ModelFailure):
    """Raised when there is no valid verdict. The episode is then unscored, never rewarded with zero."""


@runtime_checkable
class JudgeModel(Protocol):
    """Model that replies or raises ModelError. `identity` is part of the cache key."""

    @property
    def identity(self) -> str: ...
    async def ask(self, request: ModelRequest) -> ModelReply: ...
    async def close(self) -> None: ...


class SampledJudge:
    """Judge model sampled in this process. `name` identifies its weights in the cache: use one name per model."""

    def __init__(self, sampler: Sampler, chat_format: ChatFormat, params: SamplingParams, name: str) -> None:
        self.sampler, self.chat, self.name = sampler, chat_format, name
        self.params = dataclasses.replace(params, stop_ids=params.stop_ids or chat_format.stop_ids)

    @property
    def identity(self) -> str:
        return digest(self.name, repr(self.params), f"{self.sampler.policy_version}")

    async def ask(self, request: ModelRequest) -> ModelReply:
        prompt = self.chat.render(request.messages)
        tokens_left = self.sampler.max_length - len(prompt)
        if tokens_left < 1:
            limit = self.sampler.max_length
            raise JudgeFailure(f"the judge's prompt has {len(prompt)} tokens; max_length is {limit}", "error")
        max_tokens = min(tokens_left, self.params.max_tokens)
        seed = self.params.seed + request.sample_index
        params = dataclasses.replace(self.params, seed=seed, max_tokens=max_tokens)
        completion = await self.sampler.sample(prompt, params)
        text = self.chat.parse(completion.token_ids, prompt).content
        # A truncated answer is a fault, because `10` may be cut to `1`.
        fault = "cut" if completion.finish == "length" else None
        message = Message("assistant", text)
        return ModelReply(message, len(prompt), len(completion.token_ids), fault=fault)

    async def close(self) -> None:
        """Leave the sampler open, because the caller owns it."""
