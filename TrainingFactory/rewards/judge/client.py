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
    WHO = "the judge"

    async def ask(
        self, name: Sequence[str], messages: MessageFactory, number: int, read: Callable[[str], T]
    ) -> T:
        """Return the reply, parsed by `read`; raise JudgeFailure without a valid one. `name` is the prompt's cache key;
        the messages are not part of it, because their fences differ between requests. `number` is the index of the
        sample."""

        def verdict(reply: ModelReply) -> T:
            if reply.fault is not None:
                raise JudgeFailure(FAULT_TEXTS[reply.fault], reply.fault)
            return read(reply.text)

        async def send() -> ModelReply:
            return await self.model.ask(ModelRequest(messages(), number=number))

        try:
            key = ("judge", self.model.identity, f"{number}", *name)
            return verdict(await self.request(key, send, verdict))
        except ModelFailure as failure:
            self.usage.failures[failure.kind] += 1
            raise JudgeFailure(str(failure), failure.kind) from failure
