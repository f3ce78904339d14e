"""HTTP endpoint through which agent programs call the policy in any API dialect, with one API key per episode."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from TrainingFactory.agent_api.conversations import Conversations, RequestNode
from TrainingFactory.agent_api.dialects.base import ResponseHead
from TrainingFactory.agent_api.dialects.routes import API_ROUTES, Route
from TrainingFactory.agent_api.turns.requests import ParsedRequest, check_body_size
from TrainingFactory.agent_api.turns.responses import (
    OnPartial,
    SampledChoice,
    sample_choice,
    sample_choices,
    stream_choices,
)
from TrainingFactory.common.http import listen
from TrainingFactory.common.http.api import Api, ApiError, Handler, HandlerResult
from TrainingFactory.common.image_tokens import to_disk_ids
from TrainingFactory.protocols import Sampler, SamplingSession
from TrainingFactory.rollout.episode import EpisodeSettings
from TrainingFactory.tools.threads import in_thread

# Reasons to render a history from scratch.
RERENDER_REASONS = ("rewritten", "arguments", "tools", "cut", "template")
REFUSAL_CODES = ("max_turns", "context_length_exceeded")
COUNTER_NAMES = (
    "turns", "rows", *RERENDER_REASONS, "side", "aborted", "malformed", "refused", "ignored", "unknown_key"
)  # fmt: skip


class ReportedReward(BaseModel):
    """The reward that a program reports for its episode. null: the config's reward scores it instead."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    reward: float | None
    parts: dict[str, float] = Field(default_factory=dict)


class EpisodeRequests:
    """The requests of one episode. Only the episode's settings (`rules`) determine how turns are sampled, because
    training assumes the full softmax at their temperature. If `model` is set, requests for another model are side
    requests: they are answered and not trained. The future `failure` receives an exception of the sampler, which must
    stop the run."""

    def __init__(
        self, rules: EpisodeSettings, sampler: Sampler, first_session: SamplingSession, seed_of: Callable[[int], int],
        event_counts: Counter[str], model: str | None = None,
    ) -> None:  # fmt: skip
        self._rules, self._sampler, self._seed_of, self._event_counts = rules, sampler, seed_of, event_counts
        self._model, self._turns_left, self._free_sessions = model, rules.max_turns, [first_session]
        self._opened_sessions: list[SamplingSession] = []
        self._request_counts: Counter[int] = Counter()  # request hash -> number of such requests
        self._running: set[asyncio.Future[Any]] = set()
        self._is_closed = False
        self._conversations = Conversations(rules.chat)
        self.turns_exceeded = self.is_context_full = False  # a request was refused for this reason
        self.reported_reward: ReportedReward | None = None
        self.reward_reported = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer_request(self, route: Route, body: bytes, model: str | None = None) -> HandlerResult:
        """Answer a request, as one response or as a stream."""
        dialect = route.dialect
        try:
            check_body_size(body, self._sampler.max_length, self._rules.chat.sees_images)
            request, node = await in_thread(self._parse, route, body, model)
            if route.counts_tokens:
                return dialect.make_token_count(len(node.turn.prompt_ids))
            self._check_limits(request, node)
        except ApiError as error:
            self._event_counts["refused" if error.code in REFUSAL_CODES else "malformed"] += 1
            raise

        async def choose(_: int, on_partial: OnPartial | None) -> SampledChoice:
            return await self._sample_choice(request, node, on_partial)

        head = ResponseHead(request.model or "policy", len(node.turn.prompt_ids))
        if request.stream:
            writer = dialect.make_writer(request, head)
            return stream_choices(request.n, choose, writer, contextlib.nullcontext())
        return dialect.make_response(request, head, await sample_choices(request.n, choose))

    async def set_reward(self, body: bytes) -> HandlerResult:
        """Set the episode's reward; a later request replaces it."""
        try:
            self.reported_reward = ReportedReward.model_validate_json(body)
        except ValidationError as error:
            self._event_counts["malformed"] += 1
            text = 'the body must be {"reward": NUMBER}, optionally with "parts": {NAME: NUMBER}: '
            raise ApiError(text + error.errors(include_url=False)[0]["msg"], "reward") from None
        self.reward_reported.set()
        return {"reward": self.reported_reward.reward}

    async def close(self) -> list[RequestNode]:
        """Cancel running requests and refuse new ones; return all turns in the order of training rows."""
        self._is_closed, self._turns_left = True, 0
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for session in self._opened_sessions:
            session.close()
        self.failure.cancel()
        nodes = self._conversations.number_rows()
        self._event_counts["rows"] += int(nodes[-1].turn.signals["proxy/row"]) if nodes else 0
        return nodes

    def _parse(self, route: Route, body: bytes, model: str | None) -> tuple[ParsedRequest, RequestNode]:
        """Parse the request and render its prompt; called in a thread, because both can take long."""
        max_length = self._sampler.max_length
        sees_images = self._rules.chat.sees_images
        request = route.dialect.parse(body, self._rules.params, max_length, model, route.stream, sees_images)
        conversations = Conversations(self._rules.chat) if self._is_side(request) else self._conversations
        try:
            return request, conversations.make_node(request.messages, request.tools)
        except (ValueError, RecursionError) as error:
            text = f"the chat template of this model cannot render the messages and tools: {error}"
            raise ApiError(text, "messages") from error

    def _check_limits(self, request: ParsedRequest, node: RequestNode) -> None:
        """Raise ApiError if the episode has no turn or no context left. Count the request as `ignored` if one of its
        sampling parameters or fields is not applied."""
        max_length = self._sampler.max_length
        params = dataclasses.asdict(self._rules.params)
        length = len(node.turn.prompt_ids)
        tokens_left = max_length - length
        if not self._is_side(request) and request.n > self._turns_left:
            self.turns_exceeded |= not self._is_closed
            text = f"environment.max_turns={self._rules.max_turns} is reached; with n > 1 each choice counts"
            raise ApiError(text, status=403, code="max_turns")
        if tokens_left < 1:
            self.is_context_full = True
            text = f"the messages have {length} tokens, the context has {max_length}. Shorten the messages"
            raise ApiError(text, "messages", code="context_length_exceeded")
        if not self._is_side(request):
            self._turns_left -= request.n
        max_tokens = min(params["max_tokens"], tokens_left)
        request.max_tokens = min([max_tokens, *request.token_limits.values()])
        changes_params = any(
            name == "seed" or params[name] != value
            for name, value in request.settings.items()
            if name != "stream"
        )
        lowers_max_tokens = any(limit > max_tokens for limit in request.token_limits.values())
        self._event_counts["ignored"] += changes_params or lowers_max_tokens or bool(request.ignored_fields)

    async def _sample_choice(
        self, request: ParsedRequest, node: RequestNode, on_partial: OnPartial | None
    ) -> SampledChoice:
        """Sample a turn and add it to the episode. The turn is discarded if the client disconnects."""
        closed_error = ApiError("the episode is over", status=403, code="episode_over")
        if self._is_closed:
            raise closed_error
        prompt_ids, rules = node.turn.prompt_ids, self._rules
        # Seeds depend on the request, not on the order of arrival: concurrent calls get the same seeds in every run.
        token_ids, images = to_disk_ids(prompt_ids)
        request_text = json.dumps([token_ids, request.settings, *([images] if images else [])])
        digest = int.from_bytes(hashlib.blake2b(request_text.encode(), digest_size=7).digest())
        self._request_counts[digest] += 1
        params = dataclasses.replace(rules.params, seed=self._seed_of(digest + self._request_counts[digest]))
        is_side = self._is_side(request)
        session = self._sampler.session() if is_side else self._take_session(node.parent)
        sampling_task = asyncio.ensure_future(
            sample_choice(session, rules.chat, request, prompt_ids, params, on_partial)
        )
        self._running.add(sampling_task)
        try:
            choice, completion = await sampling_task
        except asyncio.CancelledError:
            self._event_counts["aborted"] += 1
            if self._is_closed:  # cancelled by `close`: the client is still connected and gets an answer
                raise closed_error from None
            raise
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise
        finally:
            self._running.discard(sampling_task)
            if is_side:
                session.close()
        if is_side:
            self._event_counts["side"] += 1
        else:
            self._conversations.add_answer(node, completion, choice.message, session)
            self._event_counts.update((node.prompt_reason, "turns"))
        return choice

    def _is_side(self, request: ParsedRequest) -> bool:
        return self._model is not None and request.model not in (None, self._model)

    def _take_session(self, parent: RequestNode | None) -> SamplingSession:
        """Return the sampling session whose KV cache holds the tokens of the previous turn; else an unused session."""
        if parent is not None and parent.session is not None:
            session, parent.session = parent.session, None
        elif self._free_sessions:
            session = self._free_sessions.pop()
        else:
            self._opened_sessions.append(session := self._sampler.session())
        return session


class AgentEndpoint:
    """HTTP server that routes requests to open episodes by API key and rejects unknown keys."""

    def __init__(self, model: str | None = None) -> None:
        self.model = model  # name of the trained model; None: any name
        self.event_counts: Counter[str] = Counter()
        self.open_episodes: dict[str, EpisodeRequests] = {}
        self.base_url = ""  # set by `open`

    def make_api(self, token: str | None = None, is_local: bool = True) -> Api:
        """Return the HTTP API that agent programs call: the sampling routes of all dialects, the reward and the list of
        models."""
        api = Api(token, is_local)
        for route in API_ROUTES:
            api.post_by_key(route.path, partial(self._find_handler, route), route.dialect)
        api.post_by_key("/v1/reward", partial(self._find_handler, None))
        model = {"id": self.model or "policy", "object": "model", "created": 0, "owned_by": "trainingfactory"}
        api.get("/v1/models", lambda: {"object": "list", "data": [model]}, needs_key=False)
        return api

    async def open(self) -> None:
        """Listen on a free local port, on the running event loop."""
        sock = listen.bind("127.0.0.1", 0)
        self.base_url = f"{listen.format_url(sock)}/v1"
        self._server = listen.make_server(self.make_api().app)
        # Not `serve`, because it would replace the run's handler for Ctrl-C.
        self._serve_task = asyncio.create_task(self._server._serve([sock]))

    async def close(self) -> None:
        self._server.should_exit = True
        await self._serve_task

    @contextlib.contextmanager
    def accept_requests(self, episode_key: str, requests: EpisodeRequests) -> Iterator[None]:
        """Accept requests with this key for the episode while the context is open."""
        self.open_episodes[episode_key] = requests
        try:
            yield
        finally:
            del self.open_episodes[episode_key]

    def pop_metrics(self) -> dict[str, float]:
        """Return the request counts since the last call. `proxy/extended` is the share of turns with a history whose
        prompt extends the sampled tokens of the previous turn."""
        counts, metrics = self.event_counts.copy(), {}
        self.event_counts.clear()
        if num_continuations := counts["extended"] + sum(counts[reason] for reason in RERENDER_REASONS):
            metrics = {"proxy/extended": counts["extended"] / num_continuations}
        return metrics | {f"proxy/{name}": float(counts[name]) for name in COUNTER_NAMES}

    def _find_handler(self, route: Route | None, episode_key: str) -> Handler | None:
        """Return the handler of requests under an episode's API key, or of its reward if `route` is None; None if no
        open episode has the key."""
        if (requests := self.open_episodes.get(episode_key)) is not None:
            return requests.set_reward if route is None else partial(requests.answer_request, route)
        self.event_counts["unknown_key"] += 1
        return None


def make_key() -> str:
    return f"tf-{secrets.token_urlsafe(32)}"
