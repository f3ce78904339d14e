"""What the server's tests share: a server on loopback in a thread, and a sampler that says what it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx

from tests.kits.waiting import HANG
from TrainingFactory.apps.serving.served import ServedModel
from TrainingFactory.apps.serving.server import ChatServer
from TrainingFactory.common.http import listen
from TrainingFactory.models import TemplateChatFormat, chat_format
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.types import Completion, Message, SamplingParams, ToolCall

Said = Message | str | list[int] | Exception


CHAT = "/v1/chat/completions"
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
CALL = Message("assistant", "Let me see.", [ToolCall("weather", {"city": "Rome", "days": [1, 2]})])

_tokenizer = cache(make_tiny_tokenizer)


@cache
def tiny_chat() -> TemplateChatFormat:
    return chat_format(_tokenizer())


def raw(text: str) -> list[int]:
    """A turn of just this text, its control tokens live, as a model may write it."""
    return [*_tokenizer()(text).input_ids, tiny_chat().stop_ids[0]]


@contextmanager
def live(server: ChatServer, key: str | None = None) -> Iterator[httpx.Client]:
    """A client of the server, which runs on a port of its own for as long."""
    bound = listen.bind("127.0.0.1", 0)
    runner = listen.make_server(server.make_api(key).app)
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [bound]})
    address = listen.format_url(bound)
    thread.start()
    try:
        with httpx.Client(base_url=address, timeout=HANG, trust_env=False) as client:
            yield client
    finally:
        runner.should_exit = True
        thread.join(HANG)
        server.close()
        assert not thread.is_alive()


class Script:
    """A sampler whose turns are written by `say(the prompt's text)`: a message, a text, token ids, or an error to
    raise. While `gate` is shut, a prompt with the word "wait" in it is not answered."""

    policy_version = 0
    max_length = 2000

    def __init__(self, say: Callable[[str], Said]) -> None:
        self.chat = tiny_chat()
        self.say = say
        self.gate = threading.Event()
        self.prompts: list[list[int]] = []
        self.opened = self.closed = self.waiting = 0

    def session(self) -> ScriptSession:
        self.opened += 1
        return ScriptSession(self)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        return await self.session().sample(prompt_ids, params)

    def server(self, slots: int = 4, queue: int = 16) -> ChatServer:
        return ChatServer("script", ServedModel(self.chat, self, slots), queue=queue)


class ScriptSession:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.start: int | None = None
        self.ids: list[int] = []

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        script = self.script
        if self.start is None:
            self.start = len(prompt_ids)
            script.prompts.append(list(prompt_ids))
            text = script.chat.decode(prompt_ids)
            if "wait" in text:
                await self.wait()
            said = script.say(text)
            if isinstance(said, Exception):
                raise said
            if isinstance(said, list):
                self.ids = said
            else:
                self.ids = script.chat.write(Message("assistant", said) if isinstance(said, str) else said)
        done = len(prompt_ids) - self.start
        assert list(prompt_ids[self.start :]) == self.ids[:done]
        ids = self.ids[done : done + params.max_tokens]
        finish = "stop" if ids[-1] in params.stop_ids else "length"
        return Completion(ids, [-0.25] * len(ids), finish)

    async def wait(self) -> None:
        self.script.waiting += 1
        try:
            while not self.script.gate.is_set():
                await asyncio.sleep(0.005)
        finally:
            self.script.waiting -= 1

    def close(self) -> None:
        self.script.closed += 1


def user(text: str = "Where is the tower?", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def post(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice of a stream, put together as clients do."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "logprobs": []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        for key in ("content", "reasoning_content"):
            whole[key] += delta.get(key) or ""
        whole["tool_calls"] += delta.get("tool_calls", [])
        whole["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        whole["finish_reason"] = choice["finish_reason"]
    return whole


def script(said: Said) -> Script:
    return Script(lambda prompt: said)
