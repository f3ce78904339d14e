"""An OpenAI-compatible chat server on the native engine: what it answers. How it is reached is in `http/`.

Requests of all clients are sampled in one engine, each choice in a session of its own. A stream samples its turn in
pieces: the session keeps what was computed, and a random number depends on the seed and the token's place only, so
that pieces give the tokens of the whole."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.http.api import Answer, Api, ApiError, failure
from TrainingFactory.openai_form import message_to_dict
from TrainingFactory.protocols import Sampler
from TrainingFactory.seeds import turn_seed
from TrainingFactory.services.build.factories import by_file
from TrainingFactory.services.build.model_names import find_model
from TrainingFactory.services.build.sampler import load, make_chat, make_engine
from TrainingFactory.services.evaluation.evaluation import sections_of
from TrainingFactory.services.serving.request import Ask, check_size, read_ask
from TrainingFactory.services.serving.text import Cut, TurnReader
from TrainingFactory.types import Completion, Message, SamplingParams

if TYPE_CHECKING:
    from TrainingFactory.models import TemplateChatFormat

PIECE = 8  # tokens between two looks at a turn that is streamed or may meet a stop string


@dataclass(slots=True)
class Choice:
    """One finished answer."""

    message: Message
    finish: str
    tokens: int
    logprobs: dict[str, Any] | None


class ChatServer:
    """Answers requests on one event loop. `slots` choices are sampled at a time, and `queue` more may wait."""

    def __init__(
        self,
        name: str,
        chat: TemplateChatFormat,
        sampler: Sampler,
        *,
        slots: int,
        queue: int = 256,
        defaults: SamplingParams | None = None,
    ) -> None:
        self.name, self.slots, self.queue = name, slots, queue
        self.pending = 0  # requests that are being read, choices that are being sampled or wait
        self.refused = 0  # requests since the start
        self._chat, self._sampler = chat, sampler
        self._defaults = dataclasses.replace(defaults or SamplingParams(), stop_ids=chat.stop_ids)
        self._gate = asyncio.Semaphore(slots)
        self._writer = ThreadPoolExecutor(1, "chat-template")  # a long prompt must not stop the event loop
        self._started = int(time.time())

    def api(self, key: str | None = None, local: bool = True) -> Api:
        """Make the pages of this server."""
        api = Api(key, local)
        api.post("/v1/chat/completions", self.chat)
        api.get("/v1/models", self.models)
        api.get("/health", self.health, keyed=False)
        return api

    async def chat(self, body: bytes) -> Answer:
        """Answer one request, in one piece or as a stream."""
        try:
            with self.admitted():
                ask, prompt = await self.read(body)
            with self.admitted(ask.request.n):  # a stream is refused here, while a status can still be told
                return self.stream(ask, prompt) if ask.request.stream else await self.complete(ask, prompt)
        except ApiError:
            self.refused += 1
            raise

    def models(self) -> dict[str, Any]:
        row = {"id": self.name, "object": "model", "created": self._started, "owned_by": "trainingfactory"}
        return {"object": "list", "data": [row | {"max_model_len": self._sampler.max_length}]}

    def health(self) -> dict[str, Any]:
        running = min(self.pending, self.slots)
        counts = {"running": running, "waiting": self.pending - running, "refused": self.refused}
        return {"status": "ok", "model": self.name} | counts

    async def read(self, body: bytes) -> tuple[Ask, list[int]]:
        """Return the request and its prompt, all checked."""
        limit = self._sampler.max_length
        check_size(body, limit)
        ask, prompt = await asyncio.get_running_loop().run_in_executor(self._writer, self._read, body, limit)
        limits = {"messages": limit - len(prompt)}
        limits |= ask.request.model_dump(include={"max_tokens", "max_completion_tokens"}, exclude_unset=True)
        room, param = limits["messages"], max(limits, key=lambda name: limits[name])
        if room < 1 or limits[param] > room:
            text = (
                f"the messages take {len(prompt)} tokens of the {limit} of the model's context; shorten them, or ask "
                f"for at most {max(room, 0)} with {param}"
            )
            raise ApiError(text, "messages" if room < 1 else param, code="context_length_exceeded")
        ask.max_tokens = min(limits.values())
        return ask, prompt

    def _read(self, body: bytes, limit: int) -> tuple[Ask, list[int]]:
        """Do what may take long, on a thread of its own."""
        ask = read_ask(body, self._defaults, limit)
        if (model := ask.request.model) not in (None, self.name):
            text = f"this server has no model {model:.60}; it serves {self.name}"
            raise ApiError(text, "model", code="model_not_found")
        try:
            return ask, self._chat.render(ask.messages, ask.tools)
        except (ValueError, RecursionError) as error:
            text = f"the messages and tools cannot be written for this model: {error}"
            raise ApiError(text, "messages") from error

    @contextlib.contextmanager
    def admitted(self, n: int = 1) -> Iterator[None]:
        """Around the work for a request: it counts as pending."""
        most = self.slots + self.queue
        if n > most:
            raise ApiError(f"n is {n}, and this server takes {most} at a time", "n")
        if self.pending + n > most:
            text = f"{self.pending} answers are being written or wait, {most} is the limit; try again later"
            raise ApiError(text, status=429, code="queue_full")
        self.pending += n
        try:
            yield
        finally:
            self.pending -= n

    async def complete(self, ask: Ask, prompt: list[int]) -> dict[str, Any]:
        """Write the answer in one piece. Call it inside `admitted`."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._choice(ask, prompt, number)) for number in range(ask.request.n)]
        choices = [task.result() for task in tasks]
        rows = [
            {"index": number, "message": _message_row(choice.message), "finish_reason": choice.finish}
            | {"logprobs": choice.logprobs}
            for number, choice in enumerate(choices)
        ]
        usage = _usage(prompt, sum(choice.tokens for choice in choices))
        return self._head("chat.completion") | {"choices": rows, "usage": usage}

    async def stream(self, ask: Ask, prompt: list[int]) -> AsyncGenerator[str, None]:
        """Yield the data of server-sent events, the last one being [DONE]; to be closed."""
        n, counts = ask.request.n, ask.request.stream_options.include_usage
        head = self._head("chat.completion.chunk") | ({"usage": None} if counts else {})
        events: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()

        async def one(number: int) -> int:
            try:
                return await self._streamed(ask, prompt, number, events.put_nowait)
            except Exception as error:
                events.put_nowait(error)
                return 0

        with self.admitted(n):
            tasks = [asyncio.create_task(one(number)) for number in range(n)]
            try:
                while n:
                    event = await events.get()
                    if isinstance(event, Exception):
                        yield json.dumps(failure(event).body)
                        break
                    n -= event["finish_reason"] is not None
                    yield json.dumps(head | {"choices": [event]})
                else:
                    if counts:
                        usage = _usage(prompt, sum([await task for task in tasks]))
                        yield json.dumps(head | {"choices": [], "usage": usage})
                yield "[DONE]"
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._writer.shutdown()

    async def _streamed(
        self, ask: Ask, prompt: list[int], number: int, send: Callable[[dict[str, Any]], None]
    ) -> int:
        """Send what one choice is made of as it becomes known, and return the number of its tokens."""
        sent = {"reasoning_content": "", "content": ""}

        def put(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> None:
            send({"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish})

        def tell(message: Message) -> None:
            for key, text in (("reasoning_content", message.reasoning or ""), ("content", message.content)):
                if len(text) > len(sent[key]):
                    put({key: text[len(sent[key]) :]})
                    sent[key] = text

        put({"role": "assistant", "content": ""})
        choice = await self._choice(ask, prompt, number, tell)
        tell(choice.message)
        for index, call in enumerate(_message_row(choice.message).get("tool_calls", [])):
            put({"tool_calls": [{"index": index} | call]})
        put({}, choice.finish, choice.logprobs)
        return choice.tokens

    async def _choice(
        self, ask: Ask, prompt: list[int], number: int, tell: Callable[[Message], None] | None = None
    ) -> Choice:
        seed = ask.request.seed if number == 0 else turn_seed(ask.request.seed, 0, "choice", number, 0)
        reader = TurnReader(self._chat, prompt, ask.tools)
        async with self._gate:
            completion, text, cut = await self._sample(ask, prompt, seed, reader, tell)
        message = reader.message(completion.token_ids, text if cut is None else text[: cut.start])
        for call in message.tool_calls:
            call.id = f"call_{secrets.token_hex(12)}"
        ended = cut is not None or completion.finish == "stop"
        finish = "length" if not ended else "tool_calls" if message.tool_calls else "stop"
        tokens = len(completion.token_ids) if cut is None else cut.tokens
        logprobs = None
        if ask.request.logprobs:
            logprobs = {"content": reader.logprobs(completion, cut), "refusal": None}
        return Choice(message, finish, tokens, logprobs)

    async def _sample(
        self,
        ask: Ask,
        prompt: list[int],
        seed: int,
        reader: TurnReader,
        tell: Callable[[Message], None] | None,
    ) -> tuple[Completion, str, Cut | None]:
        """Return one turn: its tokens, its text, and the stop string that ended it."""
        so_far = Completion([], [], "length")
        piece = PIECE if tell is not None or ask.request.stop else ask.max_tokens
        session = self._sampler.session()
        try:
            while True:
                size = min(piece, ask.max_tokens - len(so_far.token_ids))
                params = dataclasses.replace(ask.params, max_tokens=size, seed=seed)
                more = await session.sample(prompt + so_far.token_ids, params)
                so_far.token_ids += more.token_ids
                so_far.logprobs += more.logprobs
                so_far.finish = more.finish
                text = reader.text(so_far.token_ids)
                cut = reader.cut(so_far.token_ids, text, ask.request.stop)
                if cut or more.finish == "stop" or len(so_far.token_ids) >= ask.max_tokens:
                    return so_far, text, cut
                if tell is not None:
                    tell(reader.so_far(text, ask.request.stop))
        finally:
            session.close()

    def _head(self, kind: str) -> dict[str, Any]:
        unique = f"chatcmpl-{secrets.token_hex(12)}"
        return {"id": unique, "object": kind, "created": int(time.time()), "model": self.name}


def make_server(config: TrainingConfig, name: str, queue: int = 256) -> ChatServer:
    """Load the model of the config; its sampling section holds what a client leaves out."""
    config = by_file(config)
    loaded, slots = load(config), config.sampling.slots
    defaults = SamplingParams(
        **config.sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
    )
    engine = make_engine(config, loaded, slots)
    return ChatServer(name, make_chat(config, loaded), engine, slots=slots, queue=queue, defaults=defaults)


def served_sections(
    name: str, runs: str | Path = "runs", registry: str | Path | None = None
) -> dict[str, dict[str, Any]]:
    """Return the model and sampling sections for whatever can be served: everything that can be named."""
    sections = sections_of(find_model(name, runs, registry))
    return {key: sections[key] for key in ("model", "sampling") if key in sections}


def _message_row(message: Message) -> dict[str, Any]:
    row = message_to_dict(message) | {"refusal": None}
    if not message.reasoning:
        row.pop("reasoning_content", None)
    if message.tool_calls and not message.content:
        row["content"] = None
    return row


def _usage(prompt: list[int], sampled: int) -> dict[str, int]:
    total = len(prompt) + sampled
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": total}
