"""The model that plays a user: its instructions, its view of the conversation, and its replies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from TrainingFactory.common.endpoints.messages import ModelReply, ModelRequest
from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.tools.endpoints.client import EndpointClient, ModelFailure
from TrainingFactory.types import Message, Task

FirstMessage = Literal["task", "user"]
STOP_MARKER = "###STOP###"
GREETING = "Hello! How can I help you?"  # what the user model answers with its first message
DEFAULT_TEMPLATE = """You play a user who writes to an assistant. Write only the user's next message.

Who you are: {persona}
What you want: {goal}

- Write one short message at a time, in your own words, as this person would.
- Tell the assistant a detail when it asks for it, not before. Do not make up details that are not written above.
- When the assistant has done what you want, or clearly cannot do it, write {stop} and nothing else."""
DEFAULT_PERSONA = "an ordinary person"
PLACEHOLDER_PATTERN = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class UserModel(Protocol):
    """A model that replies to a request or raises ModelError. `identity` is part of the cache key."""

    @property
    def identity(self) -> str: ...
    async def ask(self, request: ModelRequest) -> ModelReply: ...
    async def close(self) -> None: ...


@dataclass(slots=True, frozen=True)
class UserBrief:
    """Instructions of the user model and limits of the conversation. The fields are keys of `environment.user`."""

    persona: str | None = None  # template over the task's columns; None: its column `persona`, if it has one
    goal: str | None = None  # template; None: the column `goal`, or with first=user the task's prompt
    template: str = DEFAULT_TEMPLATE  # with {persona}, {goal}, {stop} and columns of the task
    first: FirstMessage = (
        "task"  # user: the user model writes the first message, in place of the task's prompt
    )
    stop: str = STOP_MARKER
    max_turns: int = 8  # replies of the user
    sees_tools: bool = False

    def render_instructions(self, task: Task) -> str:
        """Return the system prompt of the user model for a task; raise ValueError for a missing column."""
        columns = {"prompt": _join_prompt(task.prompt), "answer": task.answer, "id": task.id, **task.metadata}
        persona = self.persona if self.persona is not None else "{persona}" if "persona" in columns else None
        goal = self.goal
        if goal is None:
            if "goal" not in columns and self.first != "user":
                raise ValueError(
                    f"task {task.id} has no column `goal` for the simulated user: add it, or set environment.user.goal "
                    'to a text with columns of the task, such as "{prompt}"'
                )
            goal = "{goal}" if "goal" in columns else "{prompt}"
        placeholder_values = {
            "persona": fill_template(persona or DEFAULT_PERSONA, columns, task.id, "persona"),
            "goal": fill_template(goal, columns, task.id, "goal"),
            "stop": self.stop,
        }
        return fill_template(self.template, columns | placeholder_values, task.id, "template")


def fill_template(template: str, columns: Mapping[str, Any], task_id: str, key: str) -> str:
    """Replace {column} and {column.key} by the values of a task."""

    def look_up(match: re.Match[str]) -> str:
        value: Any = columns
        for name in match[1].split("."):
            if not isinstance(value, Mapping) or name not in value:
                raise ValueError(
                    f"environment.user.{key} has {match[0]}, but task {task_id} has no such column; its columns: "
                    f"{', '.join(columns)}"
                )
            value = value[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return PLACEHOLDER_PATTERN.sub(look_up, template)


def _join_prompt(prompt: str | list[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message.content for message in prompt if message.role == "user")


class UserReply(NamedTuple):
    """A message of the user. `ended`: the reply contained the stop marker, which is removed from `text`."""

    text: str
    ended: bool
    tokens: int
    cut: bool  # at the model's token limit


@dataclass(eq=False)
class SimulatedUser:
    """The user model of a run, shared by its episodes."""

    client: EndpointClient  # its `model` is a UserModel
    brief: UserBrief = field(default_factory=UserBrief)
    timeout: float = 300.0  # seconds for one reply with its retries

    async def reply(self, instructions: str, dialogue: Sequence[Message], seed: int) -> UserReply:
        """Return the user's next message; raise ModelFailure without one. In `dialogue`, the agent's messages have the
        role `user` and the user's the role `assistant`. `seed` distinguishes equal requests of different episodes."""
        request = ModelRequest([Message("system", instructions), *dialogue], sample_index=seed)
        model: UserModel = self.client.model
        body = json.dumps([message_to_dict(message) for message in request.messages], sort_keys=True)

        async def send() -> ModelReply:
            return await model.ask(request)

        try:
            reply = await self.client.request(("user", model.identity, body, f"{seed}"), send, self._check)
        except ModelFailure as failure:
            self.client.usage.failures[failure.kind] += 1
            raise
        text = reply.text.replace(self.brief.stop, "").strip()
        has_ended = self.brief.stop in reply.text
        return UserReply(text, has_ended, reply.input_tokens + reply.output_tokens, reply.fault == "cut")

    def _check(self, reply: ModelReply) -> None:
        if reply.fault == "refused":
            raise ModelFailure("the user model refused to answer", "refused")
        if not reply.text.strip():
            raise ModelFailure("the user model wrote an empty message", "unreadable")

    def metrics(self) -> dict[str, float]:
        """Return requests, retries, failures and spending since the start of the process."""
        usage = self.client.usage.metrics("user")
        metric_names = ("requests", "retries", "cached", "cost")
        return {
            name: value
            for name, value in usage.items()
            if name.removeprefix("user/") in metric_names or name.startswith("user/failed_")
        }

    async def close(self) -> None:
        await self.client.close()
