"""A reward as an HTTP service, for Gemini's reinforcement tuning: `POST {example, response, metadata}` returns
`{"reward": number}`. The format is that of the Cloud Run reward scorer in google-genai 3.3.0. The provider has never
called it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from TrainingFactory.assembly.environment import make_environment
from TrainingFactory.assembly.rewards import (
    check_group_size,
    check_reward,
    make_reward,
    name_scorer,
    open_reward,
)
from TrainingFactory.common.http.api import Api, ApiError, HandlerResult
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import EnvironmentFactory
from TrainingFactory.resolve.factories import Notify, resolve_ids
from TrainingFactory.rewards.workers.process import FinishedEpisode
from TrainingFactory.rollout.scoring import OpenEpisode, format_error, score
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.types import Completion, Message, Task, ToolCall, Trajectory, Turn

SCORING_PATHS = ("/", "/reward")
ANSWER_KEY = "answer"  # the reference that becomes the task's answer


class _Function(BaseModel):
    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    response: dict[str, Any] = Field(default_factory=dict)


class ContentPart(BaseModel):
    text: str = ""
    thought: bool = False
    functionCall: _Function | None = None
    functionResponse: _Function | None = None


class Content(BaseModel):
    role: str = "user"
    parts: list[ContentPart] = Field(default_factory=list)

    def to_messages(self, is_response: bool = False) -> list[Message]:
        """Return the messages in the content, with one message per tool result."""
        results = [part.functionResponse for part in self.parts if part.functionResponse is not None]
        calls = [part.functionCall for part in self.parts if part.functionCall is not None]
        text = "".join(part.text for part in self.parts if not part.thought)
        role = "assistant" if is_response or self.role == "model" else "user"
        tool_calls = [ToolCall(call.name, call.args, f"call_{index}") for index, call in enumerate(calls)]
        replies = [Message(role, text, tool_calls)] if text or tool_calls or not results else []
        return [*(Message("tool", str(result.response), name=result.name) for result in results), *replies]


class TuningExample(BaseModel):
    contents: list[Content] = Field(min_length=1)
    references: dict[str, str] = Field(default_factory=dict)
    systemInstruction: Content | None = None


class ScoringRequest(BaseModel):
    example: TuningExample
    response: Content
    metadata: dict[str, Any] = Field(default_factory=dict)

    def to_trajectory(self) -> Trajectory:
        """Return the response as an episode of one turn. The task's answer is the reference named `answer`, or the only
        reference."""
        references = self.example.references
        answer = references.get(ANSWER_KEY, next(iter(references.values())) if len(references) == 1 else None)
        system = self.example.systemInstruction
        prompt = [Message("system", message.content) for message in (system.to_messages() if system else ())]
        prompt += [message for content in self.example.contents for message in content.to_messages()]
        [message] = self.response.to_messages(is_response=True) or [Message("assistant")]
        turn = Turn([], Completion([], [], "stop"), message)
        user_texts = [message.content for message in prompt if message.role == "user"]
        task = Task("example", user_texts[-1] if user_texts else "", answer, dict(references))
        return Trajectory(task, group="example", prompt=prompt, turns=[turn])


class RewardService:
    """Service that scores single responses with the reward of a config. An unscored response is an error, never 0."""

    def __init__(self, config: TrainingConfig, notify: Notify = lambda _: None) -> None:
        self.config = config = resolve_ids(config, notify)
        reward_section = check_reward(config)
        check_group_size(reward_section, 1)
        self.name = name_scorer(config, reward_section)
        self._notify = notify
        has_environment = config.environment.environment_id is not None
        self._environment: EnvironmentFactory | None = make_environment(config) if has_environment else None
        if reward_section is None and self._environment is None:
            raise ValueError("the config names no reward; set reward.type, or environment.environment_id")
        self.num_scored, self.num_failed = 0, 0

    async def open(self, stack: AsyncExitStack) -> None:
        self._reward = make_reward(self.config)
        await open_reward(self._reward, stack, self._notify)

    def make_api(self, key: str | None = None, is_local: bool = True) -> Api:
        api = Api(key, is_local)
        for path in SCORING_PATHS:
            api.post(path, self.answer)
        api.get("/health", self.report_health, needs_key=False)
        return api

    def report_health(self) -> dict[str, Any]:
        return {"status": "ok", "reward": self.name, "scored": self.num_scored, "failed": self.num_failed}

    async def answer(self, body: bytes) -> HandlerResult:
        try:
            request = ScoringRequest.model_validate_json(body)
        except ValidationError as error:
            first_error = error.errors(include_url=False, include_input=False)[0]
            location = ".".join(map(str, first_error["loc"])) or "body"
            raise ApiError(f"{location}: {first_error['msg']}", location) from None
        try:
            reward = await self._score(request.to_trajectory())
        except Exception as error:  # rewards are user code
            self.num_failed += 1
            raise ApiError(format_error(error), "response", status=500, code="unscored") from error
        self.num_scored += 1
        return reward

    async def _score(self, trajectory: Trajectory) -> dict[str, Any]:
        if self._environment is None:
            reward = await score(FinishedEpisode(trajectory), self._reward)  # type: ignore[arg-type]
        else:
            environment = self._environment(trajectory.task)
            try:
                is_tool_environment = isinstance(environment, ToolEnvironment)
                executor = (
                    environment.executor if is_tool_environment else AsyncToolExecutor(environment.tools)
                )
                reward = await score(OpenEpisode(trajectory, environment, executor), self._reward)
            finally:
                await environment.close()
        extra_fields = {"user_requested_aux_info": str(reward.parts)} if reward.parts else {}
        return {"reward": reward.outcome + sum(reward.steps)} | extra_fields
