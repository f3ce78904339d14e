"""An OpenAI-compatible chat server on the native engine: what it answers. How it is reached is in `http/`.

Requests of all clients are sampled in one engine, each choice in a session of its own. A stream samples its turn in
pieces: the session keeps what was computed, and a random number depends on the seed and the token's place only, so
that pieces give the tokens of the whole. Each request holds the loaded model that it was begun with, so that another
can take over between two requests; the last request to let go of a model frees it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.http.api import Answer, Api, ApiError, failure
from TrainingFactory.openai_form import message_to_dict
from TrainingFactory.seeds import turn_seed
from TrainingFactory.services.serving.request import Ask, check_size, read_ask
from TrainingFactory.services.serving.served import Served, load_served
from TrainingFactory.services.serving.text import Cut, TurnReader
from TrainingFactory.types import Completion, Message

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

    def __init__(self, name: str, served: Served, *, queue: int = 256) -> None:
        self.name, self.served, self.queue = name, served, queue
        self.pending = 0  # requests that are being read, choices that are being sampled or wait
        self.refused = 0  # requests since the start
        self.follows: dict[str, str | None] | None = None  # the alias that decides which version answers
        self._before: list[weakref.ref[Served]] = []
        self._writer = ThreadPoolExecutor(1, "chat-template")  # a long prompt must not stop the event loop
        self._started = int(time.time())

    def switch(self, served: Served) -> None:
        """Let another model answer the requests that come from now on; from any thread."""
        self._before = [*(ref for ref in self._before if ref() is not None), weakref.ref(self.served)]
        self.served = served

    def finishing(self) -> list[str | None]:
        """Return the versions that were switched away from and still answer requests."""
        return [served.version for ref in self._before if (served := ref()) is not None]

    def api(self, key: str | None = None, local: bool = True) -> Api:
        """Make the pages of this server."""
        api = Api(key, local)
        api.post("/v1/chat/completions", self.chat)
        api.get("/v1/models", self.models)
        api.get("/health", self.health, keyed=False)
        return api

    async def chat(self, body: bytes) -> Answer:
        """Answer one request, in one piece or as a stream."""
        served = self.served
        try:
            with self.admitted():
                ask, prompt = await self.read(served, body)
            with self.admitted(ask.request.n):  # a stream is refused here, while a status can still be told
                if ask.request.stream:
                    return self.stream(served, ask, prompt)
                return await self.complete(served, ask, prompt)
        except ApiError:
            self.refused += 1
            raise

    def models(self) -> dict[str, Any]:
        served = self.served
        row = {"id": self.name, "object": "model", "created": self._started, "owned_by": "trainingfactory"}
        row |= {"max_model_len": served.sampler.max_length} | _known("version", served)
        return {"object": "list", "data": [row]}

    def health(self) -> dict[str, Any]:
        running = min(self.pending, self.served.slots)
        counts = {"running": running, "waiting": self.pending - running, "refused": self.refused}
        found = {"status": "ok", "model": self.name} | _known("version", self.served) | counts
        return found | ({} if self.follows is None else self.follows | {"finishing": self.finishing()})

    async def read(self, served: Served, body: bytes) -> tuple[Ask, list[int]]:
        """Return the request and its prompt, all checked."""
        limit = served.sampler.max_length
        check_size(body, limit)
        loop = asyncio.get_running_loop()
        ask, prompt = await loop.run_in_executor(self._writer, self._read, served, body, limit)
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

    def _read(self, served: Served, body: bytes, limit: int) -> tuple[Ask, list[int]]:
        """Do what may take long, on a thread of its own."""
        ask = read_ask(body, served.defaults, limit)
        if (model := ask.request.model) not in (None, self.name):
            text = f"this server has no model {model:.60}; it serves {self.name}"
            raise ApiError(text, "model", code="model_not_found")
        try:
            return ask, served.chat.render(ask.messages, ask.tools)
        except (ValueError, RecursionError) as error:
            text = f"the messages and tools cannot be written for this model: {error}"
            raise ApiError(text, "messages") from error

    @contextlib.contextmanager
    def admitted(self, n: int = 1) -> Iterator[None]:
        """Around the work for a request: it counts as pending."""
        most = self.served.slots + self.queue
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

    async def complete(self, served: Served, ask: Ask, prompt: list[int]) -> dict[str, Any]:
        """Write the answer in one piece. Call it inside `admitted`."""
        async with asyncio.TaskGroup() as group:
            each = range(ask.request.n)
            tasks = [group.create_task(self._choice(served, ask, prompt, number)) for number in each]
        choices = [task.result() for task in tasks]
        rows = [
            {"index": number, "message": _message_row(choice.message), "finish_reason": choice.finish}
            | {"logprobs": choice.logprobs}
            for number, choice in enumerate(choices)
        ]
        usage = _usage(prompt, sum(choice.tokens for choice in choices))
        return self._head(served, "chat.completion") | {"choices": rows, "usage": usage}

    async def stream(self, served: Served, ask: Ask, prompt: list[int]) -> AsyncGenerator[str, None]:
        """Yield the data of server-sent events, the last one being [DONE]; to be closed."""
        n, counts = ask.request.n, ask.request.stream_options.include_usage
        head = self._head(served, "chat.completion.chunk") | ({"usage": None} if counts else {})
        events: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()

        async def one(number: int) -> int:
            try:
                return await self._streamed(served, ask, prompt, number, events.put_nowait)
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
        self, served: Served, ask: Ask, prompt: list[int], number: int, send: Callable[[dict[str, Any]], None]
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
        choice = await self._choice(served, ask, prompt, number, tell)
        tell(choice.message)
        for index, call in enumerate(_message_row(choice.message).get("tool_calls", [])):
            put({"tool_calls": [{"index": index} | call]})
        put({}, choice.finish, choice.logprobs)
        return choice.tokens

    async def _choice(
        self,
        served: Served,
        ask: Ask,
        prompt: list[int],
        number: int,
        tell: Callable[[Message], None] | None = None,
    ) -> Choice:
        seed = ask.request.seed if number == 0 else turn_seed(ask.request.seed, 0, "choice", number, 0)
        reader = TurnReader(served.chat, prompt, ask.tools)
        async with served.gate:
            completion, text, cut = await self._sample(served, ask, prompt, seed, reader, tell)
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
        served: Served,
        ask: Ask,
        prompt: list[int],
        seed: int,
        reader: TurnReader,
        tell: Callable[[Message], None] | None,
    ) -> tuple[Completion, str, Cut | None]:
        """Return one turn: its tokens, its text, and the stop string that ended it."""
        so_far = Completion([], [], "length")
        piece = PIECE if tell is not None or ask.request.stop else ask.max_tokens
        session = served.sampler.session()
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

    def _head(self, served: Served, kind: str) -> dict[str, Any]:
        unique = f"chatcmpl-{secrets.token_hex(12)}"
        head = {"id": unique, "object": kind, "created": int(time.time()), "model": self.name}
        return head | _known("system_fingerprint", served)


def make_server(
    config: TrainingConfig, name: str, queue: int = 256, version: str | None = None
) -> ChatServer:
    """Load the model of the config; its sampling section holds what a client leaves out."""
    return ChatServer(name, load_served(config, version), queue=queue)


def _known(key: str, served: Served) -> dict[str, str]:
    """Return which version of a registered model it is, under this key; nothing for other models."""
    return {} if served.version is None else {key: served.version}


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
