"""What the rollout tests share: a chat format and a sampler simple enough to see through (one token per
character), and an environment that repeats what it is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.tools import tool
from TrainingFactory.types import (
    Completion,
    Message,
    SamplingParams,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
    Weights,
)

STOP, HEADER = 1, 2  # end of a message, and "the assistant speaks"
ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6}


def call_text(name: str, **arguments: object) -> str:
    return f"!{name} {json.dumps(arguments)}"


class FakeChat:
    """A line that starts with ! is a call."""

    stop_ids = (STOP,)
    sees_images = False

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        ids = [ord(character) for tool in tools for character in tool.name]
        for message in messages:
            ids += [ROLES[message.role], *map(ord, message.content), STOP]
        return [*ids, HEADER]

    def extend(self, turn: Turn, replies: Sequence[Message]) -> list[int]:
        return self.render(replies)

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools=()) -> Message:
        text = self.decode(token_ids)
        calls = []
        for line in text.split("\n"):
            if line.startswith("!"):
                name, _, arguments = line[1:].partition(" ")
                try:
                    calls.append(ToolCall(name, json.loads(arguments or "{}")))
                except ValueError:
                    calls.append(ToolCall(name, error="the call is not valid JSON"))
        return Message("assistant", "" if calls else text, calls)

    def write(self, message: Message, prompt_ids=(), tools=(), exact=True) -> list[int]:
        text = "\n".join(call_text(call.name, **call.arguments) for call in message.tool_calls)
        return [*map(ord, text or message.content), STOP]

    def truncate(self, text: str, max_tokens: int) -> str:
        return text if len(text) <= max_tokens else text[: max_tokens - 3] + "..."

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token > 9)


class FakeSession:
    def __init__(self, sampler: FakeSampler, number: int) -> None:
        self.sampler = sampler
        self.number = number
        self.turn = 0
        self.closed = 0

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.sampler.requests.append((self.number, list(prompt_ids), params))
        await asyncio.sleep(0)
        said = self.sampler.say(self.number, self.turn, FakeChat().decode(prompt_ids))
        self.turn += 1
        ids = [*map(ord, said), STOP][: params.max_tokens]
        finish = "stop" if ids[-1] == STOP else "length"
        return Completion(ids, [-0.5 - i / 100 for i in range(len(ids))], finish, policy_version=3)

    def fork(self) -> FakeSession:
        forked = self.sampler.session()
        forked.turn = self.turn
        return forked

    def close(self) -> None:
        self.closed += 1


class FakeSampler:
    """`say(session, turn, prompt)` is what the model writes."""

    policy_version = 3

    def __init__(self, say: Callable[[int, int, str], str], max_length: int = 10_000) -> None:
        self.say = say
        self.max_length = max_length
        self.sessions: list[FakeSession] = []
        self.requests: list[tuple[int, list[int], SamplingParams]] = []

    def session(self) -> FakeSession:
        self.sessions.append(FakeSession(self, len(self.sessions)))
        return self.sessions[-1]

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        return await self.session().sample(prompt_ids, params)

    async def update(self, weights: Weights) -> None: ...
    async def close(self) -> None: ...


PARAMS = SamplingParams(max_tokens=200)


class Echo(ToolEnvironment):
    """Repeats what it is given."""

    closed: ClassVar[Counter[str]] = Counter()

    @tool
    def echo(self, text: str, seconds: float = 0.0) -> str:
        time.sleep(seconds)
        return text

    async def close(self) -> None:
        Echo.closed[self.task.id] += 1


def tasks(*ids: str) -> list[Task]:
    return [Task(name, f"ask {name}", answer="ok") for name in ids]


def say_echo_then_ok(session: int, turn: int, prompt: str) -> str:
    return call_text("echo", text=f"{session}.{turn}") if turn < 2 else "ok"


def rollout(
    environment: Any = Echo,
    say: Callable[[int, int, str], str] = say_echo_then_ok,
    names: tuple[str, ...] = ("a",),
    group_size: int = 1,
    step: int = 0,
    sampler: FakeSampler | None = None,
    **options: Any,
) -> list[list[Trajectory]]:
    Echo.closed.clear()
    chat = options.pop("chat", None) or FakeChat()
    engine = RolloutEngine(environment, chat, options.pop("params", PARAMS), **options)
    return asyncio.run(engine.rollout_batch(tasks(*names), sampler or FakeSampler(say), group_size, step))
