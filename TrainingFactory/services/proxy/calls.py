"""The calls of one episode: an OpenAI-compatible client asks, the policy answers, and every token is kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.http.api import Answer, ApiError
from TrainingFactory.options import STRICT
from TrainingFactory.protocols import Sampler, SamplingSession
from TrainingFactory.services.proxy.conversations import Answered, Begun, Conversations
from TrainingFactory.services.serving.answers import Choice, Tell, complete, head_of, sample_choice, stream
from TrainingFactory.services.serving.request import Ask, check_size, read_ask
from TrainingFactory.services.serving.text import TurnReader
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, SamplingParams, Turn


@checked_dataclass(config=STRICT, frozen=True)
class Given:
    """What a program says that its episode is worth; none: a reward of ours is to say it."""

    reward: float | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)

    def as_reward(self) -> Reward | None:
        return None if self.reward is None else Reward(self.reward, parts=dict(self.parts))


GIVEN = TypeAdapter(Given)


class Calls:
    """Answers at most `most` turns, by `params` alone: what is trained is the full softmax at their temperature.
    `counts` adds up over episodes. `failed` gets what went wrong with the sampler, which is not the client's fault."""

    def __init__(
        self,
        chat: Any,  # a TemplateChatFormat
        sampler: Sampler,
        first: SamplingSession,
        params: SamplingParams,
        seed_of: Callable[[int], int],
        most: int,
        counts: Counter[str],
    ) -> None:
        self._chat, self._sampler, self._params, self._seed_of = chat, sampler, params, seed_of
        self._left, self._most, self.counts = most, most, counts
        self._free: SamplingSession | None = first
        self._opened: list[SamplingSession] = []
        self._asked: Counter[int] = Counter()  # times that a prompt was asked
        self._running: set[asyncio.Future[Any]] = set()
        self.conversations = Conversations(chat)
        self.limited = self.full = self.over = False  # no turn was left, or no room; the episode has ended
        self.given: Given | None = None
        self.rewarded = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def chat(self, body: bytes) -> Answer:
        """Answer one request, in one piece or as a stream."""
        try:
            check_size(body, self._sampler.max_length)
            ask, begun = await in_thread(self._read, body)
            self._admit(ask, begun)
        except ApiError as error:
            refused = error.body["error"]["code"] in ("max_turns", "episode_over", "context_length_exceeded")
            self.counts["refused" if refused else "malformed"] += 1
            raise

        async def choose(_: int, tell: Tell | None) -> Choice:
            return await self._choice(ask, begun, tell)

        kind = "chat.completion.chunk" if ask.request.stream else "chat.completion"
        head = head_of(kind, ask.request.model or "policy")
        if ask.request.stream:
            return stream(head, ask, begun.prompt, choose, contextlib.nullcontext())
        return await complete(head, ask, begun.prompt, choose)

    async def reward(self, body: bytes) -> Answer:
        """Take the episode's reward; a later one takes its place."""
        try:
            self.given = GIVEN.validate_json(body)
        except ValidationError as error:
            self.counts["malformed"] += 1
            text = 'a reward is {"reward": NUMBER}, and as wanted {"parts": {NAME: NUMBER}}: '
            raise ApiError(text + error.errors(include_url=False)[0]["msg"], "reward") from None
        self.rewarded.set()
        return {"reward": self.given.reward}

    async def close(self) -> list[Turn]:
        """Answer nothing more; return all turns."""
        self.over = True
        for each in self._running:
            each.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for session in self._opened:
            session.close()
        self.failed.cancel()
        turns = self.conversations.turns()
        self.counts["rows"] += int(turns[-1].signals["row"]) if turns else 0
        return turns

    def _read(self, body: bytes) -> tuple[Ask, Begun]:
        """Do what may take long, on a thread."""
        ask = read_ask(body, self._params, self._sampler.max_length)
        try:
            return ask, self.conversations.begin(ask.messages, ask.tools)
        except (ValueError, RecursionError) as error:
            text = f"the messages and tools cannot be written for this model: {error}"
            raise ApiError(text, "messages") from error

    def _admit(self, ask: Ask, begun: Begun) -> None:
        """Refuse what there is no turn or no room left for; count what a client asks for and does not get."""
        room, n = self._sampler.max_length - len(begun.prompt), ask.request.n
        if self.over:
            raise ApiError("the episode is over", status=403, code="episode_over")
        if n > self._left:
            self.limited = True
            text = f"no turn is left: environment.max_turns is {self._most}, and a choice of n counts as one"
            raise ApiError(text, "messages", status=403, code="max_turns")
        if room < 1:
            self.full = True
            text = f"the messages take {len(begun.prompt)} tokens, the context has {self._sampler.max_length}"
            raise ApiError(text, "messages", code="context_length_exceeded")
        self._left -= n
        asked = ask.request.model_dump(
            include={"temperature", "top_p", "top_k", "min_p", "seed"}, exclude_unset=True
        )
        wanted = [ask.request.max_tokens, ask.request.max_completion_tokens]
        most = min(self._params.max_tokens, room)
        ask.max_tokens = min([most, *(each for each in wanted if each is not None)])
        ours = dataclasses.asdict(self._params)
        other = any(name == "seed" or ours[name] != value for name, value in asked.items())
        self.counts["ignored"] += other or any(each is not None and each > most for each in wanted)

    async def _choice(self, ask: Ask, begun: Begun, tell: Tell | None) -> Choice:
        """Sample a turn and keep it. One whose client hangs up is thrown away."""
        # By what is asked, not by who came first: calls side by side have the same seeds in every run.
        place = int.from_bytes(hashlib.blake2b(json.dumps(begun.prompt).encode(), digest_size=7).digest())
        self._asked[place] += 1
        params = dataclasses.replace(self._params, seed=self._seed_of(place + self._asked[place]))
        session, reader = self._session(begun.parent), TurnReader(self._chat, begun.prompt, ask.tools)
        sampling = asyncio.ensure_future(sample_choice(session, ask, begun.prompt, params, reader, tell))
        self._running.add(sampling)
        try:
            choice, completion = await sampling
        except asyncio.CancelledError:
            self.counts["aborted"] += 1
            if self.over:  # by `close`: the client is still there
                raise ApiError("the episode is over", status=403, code="episode_over") from None
            raise
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        finally:
            self._running.discard(sampling)
        self.conversations.add(begun, completion, choice.message, session)
        self.counts.update((begun.why, "turns"))
        return choice

    def _session(self, parent: Answered | None) -> SamplingSession:
        """Return the session that has the tokens of the turn before, or one that nobody uses."""
        if parent is not None and parent.session is not None:
            session, parent.session = parent.session, None
        elif self._free is not None:
            session, self._free = self._free, None
        else:
            session = self._sampler.session()
            self._opened.append(session)
        return session
