"""Client of a judge model: verdicts from replies, with the limits, retries, cache and budget of `EndpointClient`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from TrainingFactory.common.endpoints.messages import ModelReply, ModelRequest
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.tools.endpoints.client import EndpointClient, ModelFailure
from TrainingFactory.types import Message

T = TypeVar("T")
MessageFactory = Callable[[], Sequence[Message]]
FAULT_TEXTS = {
    "refused": "the judge refused to answer",
    "cut": "the judge's answer was truncated; raise max_tokens",
}


@dataclass(kw_only=True, eq=False)
class JudgeClient(EndpointClient):
    MODEL_ROLE = "the judge"

    async def ask(
        self, cache_key: Sequence[str], render: MessageFactory, sample_index: int, parse: Callable[[str], T]
    ) -> T:
        """Send a prompt and return its parsed reply; raise JudgeFailure without a valid one. `cache_key` excludes the
        messages, because their fences differ between requests."""

        def parse_verdict(reply: ModelReply) -> T:
            if reply.fault is not None:
                raise JudgeFailure(FAULT_TEXTS[reply.fault], reply.fault)
            return parse(reply.text)

        async def send() -> ModelReply:
            return await self.model.ask(ModelRequest(render(), sample_index=sample_index))

        try:
            request_key = ("judge", self.model.identity, f"{sample_index}", *cache_key)
            return parse_verdict(await self.request(request_key, send, parse_verdict))
        except ModelFailure as failure:
            self.usage.failures[failure.kind] += 1
            raise JudgeFailure(str(failure), failure.kind) from failure
