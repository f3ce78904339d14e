"""Environments whose episodes run in other processes. Requests are hidden tools of the executor, so that timeouts,
retries, metrics, recording and replay are those of tools."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal, Self

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.common.event_loop import run
from TrainingFactory.common.image_parts import read_parts
from TrainingFactory.common.options import STRICT, Count, Positive, Text, make_from
from TrainingFactory.envs.base import ForeignEnvironment, ToolEnvironment
from TrainingFactory.envs.process.pool import PooledEpisode, ProcessPool, request_once
from TrainingFactory.envs.process.process import MAX_MESSAGE_BYTES, EpisodeLost, ProcessLost, RequestFailed
from TrainingFactory.envs.process.programs import find_program
from TrainingFactory.protocols import Episode
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import make_validator
from TrainingFactory.types import Message, Reward, Step, Task, ToolCall, ToolFailure, ToolResult, ToolSpec

REQUEST_PREFIX = "environment."  # prefix of the hidden tools
SHARED_KEYS = ("actions", "tools", "schema")  # keys of the answer to `version` that apply to all episodes
ROLES = ("system", "user", "assistant", "tool")


@checked_dataclass(config=STRICT, frozen=True)
class Timeouts:
    """Timeouts of the requests, in seconds."""

    start: Positive = 120.0
    tasks: Positive = 120.0
    reset: Positive = 60.0
    step: Positive = 60.0
    score: Positive = 60.0


@checked_dataclass(config=STRICT, frozen=True)
class ForeignProcessOptions:
    """environment.options of environments in other processes."""

    args: dict[str, Any] = Field(default_factory=dict)  # arguments of the environment
    episodes_per_process: Count = 32
    isolation: Literal["process", "episode"] = "process"  # episode: each episode has its own process
    timeouts: dict[str, Any] = Field(default_factory=dict)
    env: list[Text] = Field(default_factory=list)  # environment variables to pass on
    readable: list[Text] = Field(default_factory=list)  # files and folders that the processes may read
    confined: bool = True  # False: the processes may access all files
    python: Text | None = None  # interpreter with the environment's package


class RequestTool:
    """Tool that sends a request of one episode to its process and that the model does not see."""

    def __init__(self, environment: ProcessEnvironment, method: str, timeout_seconds: float) -> None:
        self.spec = ToolSpec(REQUEST_PREFIX + method, parameters={"type": "object"})
        self.options = ToolOptions(timeout=timeout_seconds, idempotent=method == "reset", retries=1)
        self._environment, self._method = environment, method

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            if self._method == "reset":
                await self._environment.reopen()
            episode = self._environment.pooled_episode
            answer = await episode.request(self._method, **arguments)
            if self._method == "reset":  # recorded with the actions and tools that all episodes have
                answer = {
                    key: episode.description[key] for key in SHARED_KEYS if key in episode.description
                } | answer
            return ToolResult(json.dumps(answer))
        except (ProcessLost, EpisodeLost) as error:
            return ToolResult(str(error), ok=False, error="unavailable")
        except RequestFailed as error:
            return ToolResult(str(error), ok=False, error="exception")


class EnvironmentTool:
    """A tool of the environment as the model sees it. It cannot run alone: `step` sends its calls to the process
    together with the message."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        raise ToolFailure(f"only a turn of the model can call {self.spec.name}: it runs in the environment")


class ProcessEnvironment(ToolEnvironment):
    """An episode that runs in a process of `pool`."""

    pool: ClassVar[ProcessPool]
    timeouts: ClassVar[Timeouts]

    def __init__(self, task: Task) -> None:
        super().__init__(task, max_output_chars=MAX_MESSAGE_BYTES)
        methods = ("reset", "step", "score")
        requests = [RequestTool(self, method, getattr(self.timeouts, method)) for method in methods]
        self.executor = AsyncToolExecutor(requests, max_output_chars=MAX_MESSAGE_BYTES)
        self.tools = []  # those that the model sees, known after `reset`
        self._episode: PooledEpisode | None = None
        self._call_checker = AsyncToolExecutor([])  # checks the model's calls
        self._action_format = "text"
        self._action_schema: Any = None
        self._step_rewards: list[float | None] = []  # one per step
        self._metrics: dict[str, float] = {}  # of the last step

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
        fields = {"split": split, "seed": seed, "count": count}
        try:
            answer = run(lambda: request_once(cls.pool.program, "tasks", cls.timeouts.tasks, **fields))
        except (ProcessLost, RequestFailed) as error:
            raise ValueError(str(error)) from error
        return [_parse_task(row) for row in _get_list(answer, "tasks")][:count]

    @classmethod
    def run_metrics(cls) -> dict[str, float]:
        return cls.pool.metrics()

    @property
    def pooled_episode(self) -> PooledEpisode:
        if self._episode is None:
            raise ProcessLost("the episode is not open")
        return self._episode

    async def reopen(self) -> None:
        """Close the episode, which a failed `reset` may have left open, and open a new one in a process of the pool."""
        await self.close()
        self._episode = self.pool.open_episode()

    async def reset(self) -> list[Message]:
        # All episodes of a task start in the same state.
        seed = zlib.crc32(self.task.id.encode()) % 2**31
        answer = await self._request("reset", task=asdict(self.task), seed=seed)
        self.tools = [EnvironmentTool(_parse_spec(row)) for row in _get_list(answer, "tools")]
        self._call_checker = AsyncToolExecutor(self.tools)
        self._action_format, self._action_schema = answer.get("actions", "text"), answer.get("schema")
        return [_parse_message(row) for row in _get_list(answer, "messages")]

    async def step(self, message: Message) -> Step:
        self._step_rewards.append(None)
        results = {call.id: self._call_checker.rejection(call) for call in message.tool_calls}
        calls = [call for call in message.tool_calls if results[call.id] is None]
        if message.tool_calls and not calls:
            return _make_step(message.tool_calls, results, [])
        fields = {"role": "assistant", "content": message.content, "tool_calls": [_as_dict(c) for c in calls]}
        if self._action_format == "json":
            try:
                fields["json"] = self._parse_json(message.content)
            except ValueError as error:
                return Step([Message("user", str(error))], signals={"invalid_json": 1.0})
        answer = await self._request("step", message=fields)
        if answer.get("reward") is not None:
            self._step_rewards[-1] = float(answer["reward"])
        self._metrics = _to_floats(answer.get("metrics"))
        message_rows = _get_list(answer, "messages")
        step = _make_step(message.tool_calls, results, message_rows)
        step.done, step.signals = bool(answer.get("done")), dict(self._metrics)
        if step.done:
            stop_reason = str(answer.get("stop_reason") or "done")[:80]
            step.signals[f"stop/{stop_reason}"] = 1.0
            self.pool.count_stop(stop_reason)
        return step

    def skip_turn(self) -> None:
        """Count a turn that is not sent to the environment, so that each step reward stays with its turn."""
        self._step_rewards.append(None)

    async def reward(self, episode: Episode) -> Reward:
        """Return the environment's score. The reward of the last step is part of the outcome; the rewards of earlier
        steps belong to their turns."""
        answer = await self._request("score")
        rewards, score = self._step_rewards, answer.get("reward")
        if score is None and all(reward is None for reward in rewards):
            raise ValueError("the environment gave no reward: neither a step nor `score` has one")
        num_turns = sum(not turn.summary for turn in episode.trajectory.turns)
        steps = [float(reward or 0.0) for reward in rewards] + [0.0] * (num_turns - len(rewards))
        outcome = float(score or 0.0) + (steps[-1] if steps else 0.0)
        if steps:
            steps[-1] = 0.0
        return Reward(outcome, steps if any(steps) else [], self._metrics | _to_floats(answer.get("parts")))

    async def close(self) -> None:
        pooled_episode, self._episode = self._episode, None
        if pooled_episode is not None:
            await pooled_episode.close()

    async def _request(self, method: str, **fields: Any) -> dict[str, Any]:
        [result] = await self.executor.batch_execute([ToolCall(REQUEST_PREFIX + method, fields)])
        if result.ok:
            return json.loads(result.content)
        if result.error in ("unavailable", "timeout"):
            raise ToolFailure(result.content)
        raise RuntimeError(f"{method}: {result.content}")

    def _parse_json(self, answer_text: str) -> Any:
        """Parse a text as JSON and validate it; raise ValueError with an explanation for the model."""
        try:
            action = json.loads(answer_text)
        except ValueError as error:
            raise ValueError(f"Answer with JSON: {error}") from None
        schema_error = next(make_validator(self._action_schema or {}).iter_errors(action), None)
        if schema_error is not None:
            raise ValueError(f"The JSON does not match the schema: {schema_error.message[:500]}")
        return action


class ForeignProcess(ForeignEnvironment):
    """Adapter that makes the environment class for one `environment_id`, which a subclass sets."""

    environment_id: ClassVar[str]

    def __init__(self, options: ForeignProcessOptions) -> None:
        key = "environment.options.timeouts"
        self._timeouts: Timeouts = make_from(Timeouts, options.timeouts, key)
        program = find_program(
            self.environment_id,
            python=options.python,
            args=options.args,
            env=options.env,
            readable=options.readable,
            confined=options.confined,
            start_seconds=self._timeouts.start,
        )
        self.pool = ProcessPool(
            program, 1 if options.isolation == "episode" else options.episodes_per_process
        )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        return cls(make_from(ForeignProcessOptions, options, "environment.options"))

    def as_environment(self) -> type[ProcessEnvironment]:
        members = {"pool": self.pool, "timeouts": self._timeouts}
        return type(self.environment_id, (ProcessEnvironment,), members)


def make_adapter_class(name: str) -> type[ForeignProcess]:
    """Return the adapter class for an `environment_id`: `process:COMMAND` or `gymnasium:NAME`."""
    return type(name, (ForeignProcess,), {"environment_id": name})


def _parse_task(row: Any) -> Task:
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise ValueError(f"the environment's task needs a text `id`: {str(row)[:200]}")
    prompt = row.get("prompt") or ""
    if not isinstance(prompt, str):
        prompt = [_parse_message(message) for message in prompt]
    return Task(row["id"], prompt, row.get("answer"), dict(row.get("metadata") or {}))


def _parse_spec(row: Any) -> ToolSpec:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ValueError(f"the environment's tool needs a `name`: {str(row)[:200]}")
    parameters = row.get("parameters") or {"type": "object", "properties": {}}
    return ToolSpec(row["name"], str(row.get("description") or ""), parameters)


def _parse_message(row: Any) -> Message:
    is_valid = (
        isinstance(row, dict) and row.get("role") in ROLES and isinstance(row.get("content"), str | list)
    )
    if not is_valid:
        raise ValueError(f"the environment's message needs a `role` and a text `content`: {str(row)[:200]}")
    content, images = read_parts(row["content"])
    fields = {"tool_call_id": row.get("tool_call_id"), "name": row.get("name"), "images": images}
    return Message(row["role"], content, **fields)


def _as_dict(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _make_step(calls: list[ToolCall], results: dict[str, ToolResult | None], rows: list[Any]) -> Step:
    """Return a step whose replies are the results of the tool calls, in the order of the calls, and then the other
    messages."""
    messages = [_parse_message(row) for row in rows]
    name_by_id = {call.id: call.name for call in calls}
    for message, row in zip(messages, rows, strict=True):
        if message.role == "tool" and message.tool_call_id in name_by_id:
            has_failed = row.get("ok") is False
            error = "exception" if has_failed else None
            results[message.tool_call_id] = ToolResult(
                message.content, not has_failed, error, id=message.tool_call_id, images=message.images
            )
    results_by_id = {call_id: result for call_id, result in results.items() if result is not None}
    replies = [
        Message("tool", result.content, tool_call_id=call_id, name=name_by_id[call_id], images=result.images)
        for call_id, result in results_by_id.items()
    ]
    new_messages = [message for message in messages if message.tool_call_id not in name_by_id]
    return Step([*replies, *new_messages], tool_results=list(results_by_id.values()))


def _get_list(answer: dict[str, Any], key: str) -> list[Any]:
    rows = answer.get(key) or []
    if not isinstance(rows, list):
        raise ValueError(f"the environment's `{key}` must be a list, not {str(rows)[:80]}")
    return rows


def _to_floats(metrics: Any) -> dict[str, float]:
    pairs = metrics.items() if isinstance(metrics, dict) else ()
    return {str(name): float(value) for name, value in pairs if isinstance(value, int | float)}
