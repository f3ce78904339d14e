"""An environment with a simulated user: a message of the agent without a tool call goes to the user, who answers or
ends the conversation. The requests are a hidden tool, so that timeouts, recording and replay are those of tools."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any, ClassVar

from TrainingFactory.envs.base import ToolEnvironment
from TrainingFactory.envs.process.environment import ProcessEnvironment
from TrainingFactory.envs.users.user import GREETING, SimulatedUser, UserReply
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.endpoints.client import ModelFailure
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import Message, Step, Task, ToolCall, ToolFailure, ToolResult, ToolSpec

TOOL_NAME = "user.reply"
CALLER_NAME = "user"  # in recordings
MAX_REPLY_CHARS = 1_000_000


class ReplyTool:
    """Tool that requests a reply from the user model and that the agent cannot call."""

    def __init__(self, conversation: UserConversation) -> None:
        self.spec = ToolSpec(TOOL_NAME, parameters={"type": "object"})
        self.options = ToolOptions(timeout=conversation.user.timeout, ordered=True)
        self._conversation = conversation

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            reply = await self._conversation.ask_model(arguments["turn"])
        except ModelFailure as failure:
            return ToolResult(str(failure), ok=False, error="unavailable")
        return ToolResult(json.dumps(reply._asdict(), ensure_ascii=False))


class UserConversation(ToolEnvironment):
    """Base class that adds a simulated user to the environment class after it in the inheritance order.
    `with_simulated_user` sets `user`."""

    user: ClassVar[SimulatedUser]
    fork = None

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._instructions = self.user.brief.render_instructions(task)
        self._dialogue: list[Message] = []  # as the user model sees it
        self._num_replies = 0
        self._reply_executor: AsyncToolExecutor | None = None
        self._signals: dict[str, float] = {}  # of the next step

    @classmethod
    def run_metrics(cls) -> dict[str, float]:
        environment_metrics = getattr(super(), "run_metrics", dict)
        return environment_metrics() | cls.user.metrics()

    async def reset(self) -> list[Message]:
        messages = await super().reset()
        if isinstance(self, ProcessEnvironment) and not self.tools:
            raise ValueError(
                "environment.user needs an environment whose actions are tool calls; this one reads the agent's texts"
            )
        self._dialogue = [Message("user", GREETING)]
        if self.user.brief.first == "user":
            reply = await self._request_reply("")
            if not reply.text:
                raise ToolFailure("the simulated user ended the conversation before its first message")
            return [*(message for message in messages if message.role == "system"), self._add_reply(reply)]
        for message in messages:
            if message.role == "user":
                self._add_text("assistant", message.content)
            elif message.role == "assistant":
                self._add_text("user", message.content)
        return messages

    async def step(self, message: Message) -> Step:
        self._add_text("user", message.content)
        if message.tool_calls:
            step = await super().step(message)
            if self.user.brief.sees_tools:
                self._add_tool_calls(message, step)
            return self._with_signals(step)
        if self._num_replies == self.user.brief.max_turns:
            return await self._end_conversation(message, "limit", [])
        self._num_replies += 1
        reply = await self._request_reply(message.content)
        replies = [self._add_reply(reply)] if reply.text else []
        if reply.ended:
            return await self._end_conversation(message, "user", replies)
        if isinstance(self, ProcessEnvironment):
            self.skip_turn()
        return self._with_signals(Step(replies))

    async def _end_conversation(self, message: Message, ended_by: str, replies: list[Message]) -> Step:
        """Pass the agent's last message to the environment; return its step with `done` set."""
        step = await super().step(message)
        self._signals[f"user/ended_by_{ended_by}"] = 1.0
        return self._with_signals(replace(step, replies=[*step.replies, *replies], done=True))

    async def _request_reply(self, agent_text: str) -> UserReply:
        """Request a reply from the user model through a tool that is hidden from the agent."""
        if self._reply_executor is None:
            self._reply_executor = self.executor.hidden([ReplyTool(self)], self.user.timeout, MAX_REPLY_CHARS)
        with self._reply_executor.measure(CALLER_NAME):
            arguments = {"turn": self._num_replies, "text": agent_text}
            [result] = await self._reply_executor.batch_execute([ToolCall(TOOL_NAME, arguments)])
        if not result.ok:
            raise ToolFailure(f"simulated user: {result.content}")
        reply = UserReply(**json.loads(result.content))
        signals = {"turns": 1.0, "tokens": reply.tokens, "cut": reply.cut, "seconds": result.seconds}
        for name, value in signals.items():
            self._signals[f"user/{name}"] = self._signals.get(f"user/{name}", 0.0) + float(value)
        return reply

    async def ask_model(self, turn: int) -> UserReply:
        assert self._reply_executor is not None
        # Members of a group are different conversations, also while their texts are equal.
        seed = zlib.crc32(repr((self._reply_executor.key, self.task.id, turn)).encode()) % 2**31
        return await self.user.reply(self._instructions, self._dialogue, seed)

    def _add_reply(self, reply: UserReply) -> Message:
        self._add_text("assistant", reply.text)
        return Message("user", reply.text)

    def _add_text(self, role: Any, text: str) -> None:
        """Add a text to the dialogue; several texts of one side become one message."""
        if not text.strip():
            return
        if self._dialogue[-1].role == role:
            last_message = self._dialogue[-1]
            self._dialogue[-1] = replace(last_message, content=f"{last_message.content}\n\n{text}")
        else:
            self._dialogue.append(Message(role, text))

    def _add_tool_calls(self, message: Message, step: Step) -> None:
        for call in message.tool_calls:
            self._add_text("user", f"[calls {call.name} {json.dumps(call.arguments, ensure_ascii=False)}]")
        for result in step.tool_results:
            self._add_text("user", f"[result: {result.content}]")

    def _with_signals(self, step: Step) -> Step:
        signals, self._signals = self._signals, {}
        return replace(step, signals=step.signals | signals)


def with_simulated_user(environment: Any, user: SimulatedUser) -> type[UserConversation]:
    """Return a subclass of the environment class with a simulated user."""
    if not isinstance(environment, type) or not issubclass(environment, ToolEnvironment):
        class_name = getattr(environment, "__name__", type(environment).__name__)
        raise ValueError(
            f"environment.user needs a class that inherits from ToolEnvironment; {class_name} does not"
        )
    return type(environment.__name__, (UserConversation, environment), {"user": user})
