"""The model server on the native engine: its routes in all API dialects. The HTTP layer is in `http/`.

One engine samples the requests of all clients, each choice in its own session. A stream samples its turn in pieces: the
session keeps its KV cache, and random numbers depend only on the seed and the token's position, so the pieces give the
same tokens as one call. Each request keeps the model that it started with, so that the model can be swapped between two
requests; the last request that uses a model releases it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

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
from TrainingFactory.apps.serving.served import Notify, ServedModel, load_served_model
from TrainingFactory.common.http.api import Api, ApiError, HandlerResult
from TrainingFactory.common.seeds import derive_seed
from TrainingFactory.common.texts import describe
from TrainingFactory.common.user_code import locate_error
from TrainingFactory.config import TrainingConfig
from TrainingFactory.rollout.folding import KEY as FOLD_KEY
from TrainingFactory.rollout.folding import Context, FoldError, Folding, fold, with_summary, with_user_text
from TrainingFactory.types import Message


class ChatServer:
    """Server of chat requests on one event loop. The engine samples `slots` choices concurrently; at most `queue` more
    may wait."""

    def __init__(self, name: str, model: ServedModel, *, queue: int = 256) -> None:
        self.name, self.model, self.queue = name, model, queue
        self.num_pending = 0  # requests being parsed, plus choices being sampled or waiting
        self.num_refused = 0  # rejected requests since the start
        self.num_folded = 0  # requests since the start whose conversation was folded
        self.num_ignored = 0  # requests since the start with fields that the server ignored
        self.follows: dict[str, str | None] | None = None  # the followed alias and its problem, for /health
        self._finishing_models: list[weakref.ref[ServedModel]] = []
        self._thread = ThreadPoolExecutor(1, "chat-template")  # a long prompt must not stop the event loop
        self._start_time = int(time.time())

    def switch_model(self, model: ServedModel) -> None:
        """Serve new requests with another model; thread-safe."""
        self._finishing_models = [
            *(ref for ref in self._finishing_models if ref() is not None),
            weakref.ref(self.model),
        ]
        self.model = model

    def list_finishing(self) -> list[str | None]:
        """Return the replaced model versions that still serve requests."""
        return [model.version for ref in self._finishing_models if (model := ref()) is not None]

    def make_api(self, key: str | None = None, is_local: bool = True) -> Api:
        api = Api(key, is_local)
        for route in API_ROUTES:
            api.post(route.path, partial(self.answer, route), route.dialect)
        api.get("/v1/models", self.list_models)
        api.get("/health", self.report_health, needs_key=False)
        return api

    async def answer(self, route: Route, body: bytes, model: str | None = None) -> HandlerResult:
        """Answer one request, in one piece or as a stream."""
        served_model, dialect = self.model, route.dialect
        try:
            with self.admit():
                request, prompt = await self.read_request(served_model, route, body, model)
                self.num_ignored += bool(request.ignored_fields)
                if route.counts_tokens:
                    return dialect.make_token_count(len(prompt))
                if served_model.folding is not None and len(prompt) > served_model.folding.limit:
                    prompt = await self._fold_prompt(served_model, served_model.folding, request, prompt)
                self._set_max_tokens(served_model, request, len(prompt))
            with self.admit(request.n):  # rejects a stream here, while it can still send a status code
                sample = partial(self._sample_choice, served_model, request, prompt)
                head = ResponseHead(self.name, len(prompt), served_model.version, request.folded)
                if request.stream:
                    writer = dialect.make_writer(request, head)
                    return stream_choices(request.n, sample, writer, self.admit(request.n))
                return dialect.make_response(request, head, await sample_choices(request.n, sample))
        except ApiError:
            self.num_refused += 1
            raise

    def list_models(self) -> dict[str, Any]:
        model = self.model
        row = {"id": self.name, "object": "model", "created": self._start_time, "owned_by": "trainingfactory"}
        row |= {"max_model_len": model.sampler.max_length} | _make_version_field("version", model)
        return {"object": "list", "data": [row]}

    def report_health(self) -> dict[str, Any]:
        num_running = min(self.num_pending, self.model.slots)
        counts = {"running": num_running, "waiting": self.num_pending - num_running}
        counts |= {"refused": self.num_refused, "ignored": self.num_ignored}
        counts |= {} if self.model.folding is None else {"folded": self.num_folded}
        status = {"status": "ok", "model": self.name} | _make_version_field("version", self.model) | counts
        return status | ({} if self.follows is None else self.follows | {"finishing": self.list_finishing()})

    async def read_request(
        self, served_model: ServedModel, route: Route, body: bytes, model: str | None
    ) -> tuple[ParsedRequest, list[int]]:
        """Return the validated request and its prompt tokens."""
        check_body_size(body, served_model.sampler.max_length, served_model.chat.sees_images)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._parse_request, served_model, route, body, model)

    def _parse_request(
        self, served: ServedModel, route: Route, body: bytes, model: str | None
    ) -> tuple[ParsedRequest, list[int]]:
        """Parse the request and render its prompt; slow, so it runs on the writer thread."""
        max_length, sees_images = served.sampler.max_length, served.chat.sees_images
        request = route.dialect.parse(body, served.defaults, max_length, model, route.stream, sees_images)
        if request.model not in (None, self.name):
            problem = f"this server has no model {request.model:.60}; it serves {self.name}"
            raise ApiError(problem, "model", status=404, code="model_not_found")
        try:
            return request, served.chat.render(request.messages, request.tools)
        except (ValueError, RecursionError) as error:
            problem = f"the chat template cannot render these messages and tools: {error}"
            raise ApiError(problem, "messages") from error

    def _set_max_tokens(self, served_model: ServedModel, request: ParsedRequest, prompt_tokens: int) -> None:
        """Set the maximum number of sampled tokens; raise ApiError if they do not fit into the context."""
        max_length = served_model.sampler.max_length
        tokens_left = max_length - prompt_tokens
        limits = {"messages": tokens_left} | request.token_limits
        param = max(limits, key=lambda name: limits[name])
        if tokens_left < 1 or (limits[param] > tokens_left and not request.clamps_limits):
            text = f"the messages take {prompt_tokens} of the {max_length} tokens of the model's context; shorten them"
            text += f", or set {param} to at most {tokens_left}" if tokens_left > 0 else ""
            raise ApiError(text, "messages" if tokens_left < 1 else param, code="context_length_exceeded")
        request.max_tokens = min(limits.values())

    async def _fold_prompt(
        self, model: ServedModel, folding: Folding, request: ParsedRequest, prompt: list[int]
    ) -> list[int]:
        """Fold the conversation of a request and return its new prompt; note the kind of folding in the request. Return
        `prompt` if no turn can be folded."""
        context = Context.from_messages(request.messages)
        if not context.turns:
            return prompt
        try:
            if folding.fold == "summary":
                folded_context = with_summary(context, await self._summarize(model, folding, request))
            else:
                folded_context = await fold(context, folding)
        except FoldError as error:
            raise ApiError(str(error), "messages", status=500) from error
        except ApiError:
            raise
        except Exception as error:  # the fold function is user code
            problem = f"{FOLD_KEY}.function{locate_error(error)} raised {describe(error)}"
            raise ApiError(problem, "messages", status=500) from error
        if folded_context is context:
            return prompt
        request.folded = folding.fold
        self.num_folded += 1
        return await self._render(model, folded_context.messages, request)

    async def _summarize(self, model: ServedModel, folding: Folding, request: ParsedRequest) -> str:
        prompt_ids = await self._render(model, with_user_text(request.messages, folding.template), request)
        if (max_tokens := model.sampler.max_length - len(prompt_ids)) < 1:
            text = f"the messages and the request for a summary take {len(prompt_ids)} tokens; shorten them"
            raise ApiError(text, "messages", code="context_length_exceeded")
        seed = derive_seed(request.seed, 0, "summary", 0, 0)
        params = dataclasses.replace(
            request.params, seed=seed, max_tokens=min(folding.summary_tokens, max_tokens)
        )
        async with model.semaphore:
            with contextlib.closing(model.sampler.session()) as session:
                completion = await session.sample(prompt_ids, params)
        return model.chat.parse(completion.token_ids, prompt_ids, request.tools).content

    async def _render(self, model: ServedModel, messages: list[Message], request: ParsedRequest) -> list[int]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, model.chat.render, messages, request.tools)
        except (ValueError, RecursionError) as error:
            problem = f"the chat template cannot render the folded conversation: {error}"
            raise ApiError(problem, "messages") from error

    @contextlib.contextmanager
    def admit(self, num_choices: int = 1) -> Iterator[None]:
        """Count `num_choices` choices as pending while the block runs; raise ApiError if the queue is full."""
        max_requests = self.model.slots + self.queue
        if num_choices > max_requests:
            raise ApiError(f"n is {num_choices}, but this server accepts at most {max_requests}", "n")
        if self.num_pending + num_choices > max_requests:
            text = f"the queue is full: {self.num_pending} of {max_requests} choices are pending; try again later"
            raise ApiError(text, status=429, code="queue_full")
        self.num_pending += num_choices
        try:
            yield
        finally:
            self.num_pending -= num_choices

    def close(self) -> None:
        self._thread.shutdown()

    async def _sample_choice(
        self,
        model: ServedModel,
        request: ParsedRequest,
        prompt: list[int],
        choice_index: int,
        on_partial: OnPartial | None,
    ) -> SampledChoice:
        seed = request.seed if choice_index == 0 else derive_seed(request.seed, 0, "choice", choice_index, 0)
        params = dataclasses.replace(request.params, seed=seed)
        async with model.semaphore:
            with contextlib.closing(model.sampler.session()) as session:
                return (await sample_choice(session, model.chat, request, prompt, params, on_partial))[0]


def make_server(
    config: TrainingConfig,
    name: str,
    queue: int = 256,
    version: str | None = None,
    notify: Notify = lambda _: None,
) -> ChatServer:
    """Load the model of the config into a server; its sampling section gives the defaults of requests."""
    return ChatServer(name, load_served_model(config, version, notify), queue=queue)


def _make_version_field(key: str, model: ServedModel) -> dict[str, str]:
    """Return {key: version} of a registered model; empty for other models."""
    return {} if model.version is None else {key: model.version}
