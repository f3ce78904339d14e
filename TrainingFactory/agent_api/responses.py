"""Sampling of chat completions, and their JSON for clients, as one response or as a stream."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from TrainingFactory.agent_api.requests import ParsedRequest
from TrainingFactory.agent_api.response_text import TurnReader
from TrainingFactory.common.http.api import as_api_error
from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.protocols import SamplingSession
from TrainingFactory.types import Completion, Message, SamplingParams

CHUNK_TOKENS = 8  # tokens sampled at a time if a turn is streamed or has stop strings


@dataclass(slots=True)
class SampledChoice:
    """One finished choice of a chat completion."""

    message: Message
    finish: str
    tokens: int
    logprobs: dict[str, Any] | None


OnPartial = Callable[[Message], None]  # called with the part of an unfinished turn that can be streamed
# Samples the choice with this index.
ChoiceSampler = Callable[[int, OnPartial | None], Coroutine[Any, Any, SampledChoice]]


async def sample_choice(
    session: SamplingSession,
    chat: Any,
    ask: ParsedRequest,
    prompt: list[int],
    params: SamplingParams,
    on_partial: OnPartial | None,
) -> tuple[SampledChoice, Completion]:
    """Sample one turn. Return it as the client sees it, and its tokens, up to and including a stop string."""
    reader = TurnReader(chat, prompt, ask.tools)
    ids, logprobs, versions = list[int](), list[float](), list[int]()
    piece = CHUNK_TOKENS if on_partial is not None or ask.request.stop else ask.max_tokens
    while True:
        size = min(piece, ask.max_tokens - len(ids))
        chunk = await session.sample(prompt + ids, dataclasses.replace(params, max_tokens=size))
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        versions += chunk.token_versions
        text = reader.text(ids)
        stop_match = reader.find_stop(ids, text, ask.request.stop)
        if stop_match or chunk.finish == "stop" or len(ids) >= ask.max_tokens:
            break
        if on_partial is not None:
            on_partial(reader.so_far(text, ask.request.stop))
    message = reader.message(ids, text if stop_match is None else text[: stop_match.start])
    for call in message.tool_calls:
        call.id = f"call_{secrets.token_hex(12)}"
    is_finished = stop_match is not None or chunk.finish == "stop"
    finish = "length" if not is_finished else "tool_calls" if message.tool_calls else "stop"
    completion = Completion(ids, logprobs, chunk.finish, versions[0])
    choice_logprobs = (
        {"content": reader.logprobs(completion, stop_match), "refusal": None}
        if ask.request.logprobs
        else None
    )
    if stop_match is not None:
        ids, logprobs, versions = (
            ids[: stop_match.tokens],
            logprobs[: stop_match.tokens],
            versions[: stop_match.tokens],
        )
        completion = Completion(ids, logprobs, "length", versions[0])
    completion.versions = versions if len(set(versions)) > 1 else None
    return SampledChoice(message, finish, len(ids), choice_logprobs), completion


def response_head(model: str, streamed: bool = False) -> dict[str, Any]:
    """Return the common fields of a response, or of every chunk of a stream."""
    kind = "chat.completion.chunk" if streamed else "chat.completion"
    name = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


async def complete(
    head: dict[str, Any], ask: ParsedRequest, prompt: list[int], choose: ChoiceSampler
) -> dict[str, Any]:
    """Sample all choices and return the whole response."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(choose(number, None)) for number in range(ask.request.n)]
    rows, tokens = list[dict[str, Any]](), 0
    for number, choice in enumerate(task.result() for task in tasks):
        row = {"index": number, "message": _message_row(choice.message), "finish_reason": choice.finish}
        rows.append(row | {"logprobs": choice.logprobs})
        tokens += choice.tokens
    return head | {"choices": rows, "usage": _usage(prompt, tokens)}


async def stream(
    head: dict[str, Any],
    ask: ParsedRequest,
    prompt: list[int],
    choose: ChoiceSampler,
    context: AbstractContextManager[Any],
) -> AsyncGenerator[str, None]:
    """Yield the data of server-sent events, inside the context `context`; the last is [DONE]. Close the generator."""
    unfinished, with_usage = ask.request.n, ask.request.stream_options.include_usage
    head |= {"usage": None} if with_usage else {}
    events: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()

    async def run_choice(number: int) -> int:
        try:
            return await _streamed(choose, number, events.put_nowait)
        except Exception as error:
            events.put_nowait(error)
            return 0

    with context:
        tasks = [asyncio.create_task(run_choice(number)) for number in range(unfinished)]
        try:
            while unfinished:
                event = await events.get()
                if isinstance(event, Exception):
                    yield json.dumps(as_api_error(event).body)
                    break
                unfinished -= event["finish_reason"] is not None
                yield json.dumps(head | {"choices": [event]})
            else:
                if with_usage:
                    usage = _usage(prompt, sum([await task for task in tasks]))
                    yield json.dumps(head | {"choices": [], "usage": usage})
            yield "[DONE]"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _streamed(choose: ChoiceSampler, number: int, send: Callable[[dict[str, Any]], None]) -> int:
    """Send the deltas of one choice as they become known; return the number of its tokens."""
    sent_text = {"reasoning_content": "", "content": ""}

    def put_delta(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> None:
        send({"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish})

    def send_partial(message: Message) -> None:
        for key, text in (("reasoning_content", message.reasoning or ""), ("content", message.content)):
            if len(text) > len(sent_text[key]):
                put_delta({key: text[len(sent_text[key]) :]})
                sent_text[key] = text

    put_delta({"role": "assistant", "content": ""})
    choice = await choose(number, send_partial)
    send_partial(choice.message)
    for index, call in enumerate(_message_row(choice.message).get("tool_calls", [])):
        put_delta({"tool_calls": [{"index": index} | call]})
    put_delta({}, choice.finish, choice.logprobs)
    return choice.tokens


def _message_row(message: Message) -> dict[str, Any]:
    row = message_to_dict(message) | {"refusal": None}
    if not message.reasoning:
        row.pop("reasoning_content", None)
    if message.tool_calls and not message.content:
        row["content"] = None
    return row


def _usage(prompt: list[int], num_sampled: int) -> dict[str, int]:
    total = len(prompt) + num_sampled
    return {"prompt_tokens": len(prompt), "completion_tokens": num_sampled, "total_tokens": total}
