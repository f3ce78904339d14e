"""Where programs call the policy as an OpenAI-compatible client does: one address, and a key for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from TrainingFactory.agent_api.conversations import Conversations, Node
from TrainingFactory.agent_api.requests import Ask, check_size, read_ask
from TrainingFactory.agent_api.responses import Choice, Tell, complete, head_of, sample_choice, stream
from TrainingFactory.common.http import listen
from TrainingFactory.common.http.api import Answer, Api, ApiError, Handler
from TrainingFactory.protocols import Sampler, SamplingSession
from TrainingFactory.rollout.episode import EpisodeRules
from TrainingFactory.tools.threads import in_thread

ANEW = ("rewritten", "arguments", "tools", "cut", "template")  # why a history was written anew
SETTINGS = {"temperature", "top_p", "top_k", "min_p", "seed"}  # of a client that the config decides
REFUSED = ("max_turns", "context_length_exceeded")
COUNTS = ("turns", "rows", *ANEW, "aborted", "malformed", "refused", "ignored", "unknown_key")


class Given(BaseModel):
    """What a program says that its episode is worth; null: a reward of ours is to say it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    reward: float | None
    parts: dict[str, float] = Field(default_factory=dict)


class Calls:
    """The calls of one episode. The rules alone say how turns are sampled: what is trained is the full softmax at their
    temperature. `failed` gets what went wrong with the sampler, which is not the client's fault."""

    def __init__(
        self, rules: EpisodeRules, sampler: Sampler, first: SamplingSession, seed_of: Callable[[int], int],
        counts: Counter[str],
    ) -> None:  # fmt: skip
        self._rules, self._sampler, self._seed_of, self._counts = rules, sampler, seed_of, counts
        self._left, self._free = rules.max_turns, [first]
        self._opened: list[SamplingSession] = []
        self._asked: Counter[int] = Counter()  # times that a prompt was asked
        self._running: set[asyncio.Future[Any]] = set()
        self._over = False
        self._conversations = Conversations(rules.chat)
        self.limited = self.full = False  # a request came for which there was no turn left, or no room
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
            self._counts["refused" if error.body["error"]["code"] in REFUSED else "malformed"] += 1
            raise

        async def choose(_: int, tell: Tell | None) -> Choice:
            return await self._choice(ask, begun, tell)

        prompt, name = begun.turn.prompt_ids, ask.request.model or "policy"
        if ask.request.stream:
            return stream(head_of(name, True), ask, prompt, choose, contextlib.nullcontext())
        return await complete(head_of(name), ask, prompt, choose)

    async def reward(self, body: bytes) -> Answer:
        """Take the episode's reward; a later one takes its place."""
        try:
            self.given = Given.model_validate_json(body)
        except ValidationError as error:
            self._counts["malformed"] += 1
            text = 'a reward is {"reward": NUMBER}, and as wanted {"parts": {NAME: NUMBER}}: '
            raise ApiError(text + error.errors(include_url=False)[0]["msg"], "reward") from None
        self.rewarded.set()
        return {"reward": self.given.reward}

    async def close(self) -> list[Node]:
        """Answer nothing more; return all turns in the order of rows."""
        self._over, self._left = True, 0
        for each in self._running:
            each.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for session in self._opened:
            session.close()
        self.failed.cancel()
        order = self._conversations.ordered()
        self._counts["rows"] += int(order[-1].turn.signals["proxy/row"]) if order else 0
        return order

    def _read(self, body: bytes) -> tuple[Ask, Node]:
        """Do what may take long, on a thread."""
        ask = read_ask(body, self._rules.params, self._sampler.max_length)
        try:
            return ask, self._conversations.begin(ask.messages, ask.tools)
        except (ValueError, RecursionError) as error:
            text = f"the messages and tools cannot be written for this model: {error}"
            raise ApiError(text, "messages") from error

    def _admit(self, ask: Ask, begun: Node) -> None:
        """Refuse what there is no turn or no room left for; count what a client asks for and does not get."""
        request, limit, ours = ask.request, self._sampler.max_length, dataclasses.asdict(self._rules.params)
        room = limit - len(begun.turn.prompt_ids)
        if request.n > self._left:
            self.limited |= not self._over
            text = f"no turn is left of environment.max_turns={self._rules.max_turns}, where each of n counts"
            raise ApiError(text, status=403, code="max_turns")
        if room < 1:
            self.full = True
            text = f"the messages take {limit - room} tokens, and the context has {limit}; shorten them"
            raise ApiError(text, "messages", code="context_length_exceeded")
        self._left -= request.n
        most = min(ours["max_tokens"], room)
        given = request.model_dump(include=SETTINGS, exclude_unset=True)
        wanted = [each for each in (request.max_tokens, request.max_completion_tokens) if each is not None]
        ask.max_tokens = min([most, *wanted])
        other = any(name == "seed" or ours[name] != value for name, value in given.items())
        self._counts["ignored"] += other or any(each > most for each in wanted)

    async def _choice(self, ask: Ask, begun: Node, tell: Tell | None) -> Choice:
        """Sample a turn and keep it. One whose client hangs up is thrown away."""
        over = ApiError("the episode is over", status=403, code="episode_over")
        if self._over:
            raise over
        prompt, rules = begun.turn.prompt_ids, self._rules
        # By what is asked, not by who came first: calls side by side have the same seeds in every run.
        asked = [prompt, ask.request.model_dump(include=SETTINGS | {"stream"}, exclude_unset=True)]
        place = int.from_bytes(hashlib.blake2b(json.dumps(asked).encode(), digest_size=7).digest())
        self._asked[place] += 1
        params = dataclasses.replace(rules.params, seed=self._seed_of(place + self._asked[place]))
        session = self._session(begun.parent)
        sampling = asyncio.ensure_future(sample_choice(session, rules.chat, ask, prompt, params, tell))
        self._running.add(sampling)
        try:
            choice, completion = await sampling
        except asyncio.CancelledError:
            self._counts["aborted"] += 1
            if self._over:  # by `close`: the client is still there
                raise over from None
            raise
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        finally:
            self._running.discard(sampling)
        self._conversations.add(begun, completion, choice.message, session)
        self._counts.update((begun.why, "turns"))
        return choice

    def _session(self, parent: Node | None) -> SamplingSession:
        """Return the session that has the tokens of the turn before, or one that nobody uses."""
        if parent is not None and parent.session is not None:
            session, parent.session = parent.session, None
        elif self._free:
            session = self._free.pop()
        else:
            self._opened.append(session := self._sampler.session())
        return session


class Endpoint:
    """Knows the episodes that are open, by their keys. A request with any other key reaches nobody."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.open_calls: dict[str, Calls] = {}
        self.base_url = ""  # once it is open

    def api(self, token: str | None = None, local: bool = True) -> Api:
        """Make the pages that a client of an episode sees."""
        api = Api(token, local)
        api.post_by_key("/v1/chat/completions", lambda key: self._of(key, lambda calls: calls.chat))
        api.post_by_key("/v1/reward", lambda key: self._of(key, lambda calls: calls.reward))
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "trainingfactory"}
        api.get("/v1/models", lambda: {"object": "list", "data": [model]}, keyed=False)
        return api

    async def open(self) -> None:
        """Listen on a free port of this machine, on the running loop."""
        bound = listen.bind("127.0.0.1", 0)
        self.base_url = f"{listen.address_of(bound)}/v1"
        self._server = listen.make_server(self.api().app)
        # `serve` would take Ctrl-C from the run.
        self._serving = asyncio.create_task(self._server._serve([bound]))

    async def close(self) -> None:
        self._server.should_exit = True
        await self._serving

    @contextlib.contextmanager
    def admitted(self, key: str, calls: Calls) -> Iterator[None]:
        """Let who has the key reach the episode for as long."""
        self.open_calls[key] = calls
        try:
            yield
        finally:
            del self.open_calls[key]

    def metrics(self) -> dict[str, float]:
        """Return the counts since the last time. `extended` is the share of the turns with a history whose tokens go on
        from those that were sampled."""
        counts, share = self.counts.copy(), {}
        self.counts.clear()
        if history := counts["extended"] + sum(counts[why] for why in ANEW):
            share = {"proxy/extended": counts["extended"] / history}
        return share | {f"proxy/{name}": float(counts[name]) for name in COUNTS}

    def _of(self, key: str, handler: Callable[[Calls], Handler]) -> Handler | None:
        if (calls := self.open_calls.get(key)) is not None:
            return handler(calls)
        self.counts["unknown_key"] += 1
        return None


def new_key() -> str:
    return f"tf-{secrets.token_urlsafe(32)}"
