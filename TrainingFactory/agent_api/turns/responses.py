"""Sampling of the choices of a request, and the order of their events in a stream. The dialects write the JSON."""

from __future__ import annotations

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from TrainingFactory.agent_api.turns.requests import ParsedRequest
from TrainingFactory.agent_api.turns.response_text import TurnReader
from TrainingFactory.common.http.api import ApiError, StreamEvent, as_api_error, encode_events
from TrainingFactory.protocols import SamplingSession
from TrainingFactory.types import Completion, Message, SamplingParams

CHUNK_TOKENS = 8  # tokens sampled at a time if a turn is streamed or has stop strings


@dataclass(slots=True)
class SampledChoice:
    """One finished choice of a request."""

    message: Message
    finish: str  # stop, tool_calls or length
    num_tokens: int
    logprobs: dict[str, Any] | None
    stop_string: str | None = None  # the stop string that ended the turn


OnPartial = Callable[[Message], None]  # called with the part of an unfinished turn that can be streamed
# Samples the choice with this index.
ChoiceSampler = Callable[[int, OnPartial | None], Coroutine[Any, Any, SampledChoice]]


class EventWriter(ABC):
    """Writer of the events of one stream."""

    def write_start(self) -> Iterable[StreamEvent]:
        """Return the events before the first token."""
        return ()

    @abstractmethod
    def write_partial(self, choice_index: int, message: Message) -> Iterable[StreamEvent]:
        """Return the events for the text of choice `choice_index` that was sampled since the last call."""

    @abstractmethod
    def write_finish(self, choice_index: int, choice: SampledChoice) -> Iterable[StreamEvent]:
        """Return the last events of choice `choice_index`."""

    @abstractmethod
    def write_end(self, choices: Sequence[SampledChoice]) -> Iterable[StreamEvent]:
        """Return the events after all choices."""

    @abstractmethod
    def write_error(self, error: ApiError) -> Iterable[StreamEvent]:
        """Return the events that end a failed stream."""


async def sample_choice(
    session: SamplingSession,
    chat: Any,
    request: ParsedRequest,
    prompt: list[int],
    params: SamplingParams,
    on_partial: OnPartial | None,
) -> tuple[SampledChoice, Completion]:
    """Sample one turn. Return the choice that the client sees, and the completion with all tokens up to and including a
    stop string."""
    reader = TurnReader(chat, prompt, request.tools)
    token_ids, logprobs, versions = list[int](), list[float](), list[int]()
    chunk_size = CHUNK_TOKENS if on_partial is not None or request.stop else request.max_tokens
    while True:
        max_tokens = min(chunk_size, request.max_tokens - len(token_ids))
        chunk = await session.sample(prompt + token_ids, dataclasses.replace(params, max_tokens=max_tokens))
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
        versions += chunk.token_versions
        text = reader.decode(token_ids)
        stop_match = reader.find_stop(token_ids, text, request.stop)
        if stop_match or chunk.finish == "stop" or len(token_ids) >= request.max_tokens:
            break
        if on_partial is not None:
            on_partial(reader.parse_partial(text, request.stop))
    message = reader.parse_message(token_ids, text if stop_match is None else text[: stop_match.start])
    for index, call in enumerate(message.tool_calls):
        call.id = request.make_call_id(index)
    is_finished = stop_match is not None or chunk.finish == "stop"
    finish = "length" if not is_finished else "tool_calls" if message.tool_calls else "stop"
    completion = Completion(token_ids, logprobs, chunk.finish, versions[0])
    choice_logprobs = (
        {"content": reader.make_logprobs(completion, stop_match), "refusal": None}
        if request.logprobs
        else None
    )
    if stop_match is not None:
        token_ids, logprobs, versions = (
            token_ids[: stop_match.num_tokens],
            logprobs[: stop_match.num_tokens],
            versions[: stop_match.num_tokens],
        )
        completion = Completion(token_ids, logprobs, "length", versions[0])
    completion.versions = versions if len(set(versions)) > 1 else None
    stop_string = None if stop_match is None else stop_match.stop_string
    return SampledChoice(message, finish, len(token_ids), choice_logprobs, stop_string), completion


async def sample_choices(n: int, choose: ChoiceSampler) -> list[SampledChoice]:
    """Sample all choices concurrently."""
    async with asyncio.TaskGroup() as task_group:
        tasks = [task_group.create_task(choose(index, None)) for index in range(n)]
    return [task.result() for task in tasks]


async def stream_choices(
    n: int, choose: ChoiceSampler, writer: EventWriter, context: AbstractContextManager[Any]
) -> AsyncGenerator[bytes, None]:
    """Sample `n` choices concurrently and yield their events, inside the context `context`. Events that become known at
    the same time are sent together, because sending costs more than writing. The caller must close the generator."""
    queue: asyncio.Queue[tuple[int, Message | SampledChoice] | Exception] = asyncio.Queue()

    async def run_choice(choice_index: int) -> None:
        try:
            choice = await choose(choice_index, lambda message: queue.put_nowait((choice_index, message)))
            queue.put_nowait((choice_index, choice))
        except Exception as error:
            queue.put_nowait(error)

    with context:
        tasks = [asyncio.create_task(run_choice(index)) for index in range(n)]
        choices: dict[int, SampledChoice] = {}
        try:
            if first_chunk := encode_events(writer.write_start()):
                yield first_chunk
            while len(choices) < n:
                update = await queue.get()
                if isinstance(update, Exception):
                    events = writer.write_error(as_api_error(update))
                elif isinstance(update[1], SampledChoice):
                    choices[update[0]] = update[1]
                    events = writer.write_finish(update[0], update[1])
                else:
                    events = writer.write_partial(update[0], update[1])
                if len(choices) == n:
                    events = [*events, *writer.write_end([choices[index] for index in range(n)])]
                if chunk := encode_events(events):
                    yield chunk
                if isinstance(update, Exception):
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
