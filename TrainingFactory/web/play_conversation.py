"""A conversation of the playground with its environment, tools and reward. The models that answer are in
`play_local.py` and `play_endpoint.py`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from TrainingFactory.apps.serving.served import make_serving_config
from TrainingFactory.assembly.environment import make_environment
from TrainingFactory.assembly.rewards import check_group_size, make_reward, open_reward
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.common.image_parts import make_openai_content
from TrainingFactory.common.images import shift_images
from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.common.seeds import derive_seed
from TrainingFactory.common.user_code import as_value_error
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import ChatFormat, Environment, RewardFunction
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.training.dataset import generates_tasks, make_tasks
from TrainingFactory.types import (
    Completion,
    Message,
    Reward,
    SamplingParams,
    Task,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
)
from TrainingFactory.web.worker import ProgressCallback

JobArguments = dict[str, Any]
MAX_TASKS = 50  # maximum tasks of an environment that are offered
STOP_POLL_SECONDS = 0.1  # seconds between two checks of the stop file
USER_TASK_ID = "own-words"  # id of the task of a conversation that the user begins
COMPUTED_REWARDS = ("environment", "rule_based", "function")  # others need a model, or call tools


class PlayConversation(ABC):
    """Playground conversation with an environment, tools and a reward; a subclass adds the model."""

    def __init__(self, chat: ChatFormat, config: TrainingConfig) -> None:
        self.chat, self.config = chat, config
        self.task, self.tasks = Task(USER_TASK_ID, ""), list[Task]()
        self.environment: Environment | None = None
        self.seen_messages = list[Message]()  # messages that the environment has processed
        self.tool_specs = list[ToolSpec]()  # tools of the environment
        self._turns = dict[int, Turn]()  # sampled turns since the environment's start, by position
        self._calls_are_lost = False  # by a restart of the environment
        self._reward: RewardFunction | None = None  # None: the environment's own
        self._reward_problem: str | None = None
        self._tools = RunTools(config, (), None)
        self._exit_stack = AsyncExitStack()

    @abstractmethod
    def describe_model(self) -> JobArguments:
        """Return the facts about the model that the page shows when the conversation begins."""

    @abstractmethod
    async def begin_answer(
        self, history: list[Message], arguments: JobArguments, report: ProgressCallback
    ) -> PlayedAnswer:
        """Return the model's next answer to a conversation; the answer is not yet played."""

    @abstractmethod
    def finish_answer(self, answer: PlayedAnswer, history: list[Message]) -> JobArguments:
        """Cache the parts of an answer that later answers reuse, and return the facts for the page."""

    async def open(self, task_id: str | None) -> None:
        if self.config.environment.command is not None:
            raise ValueError("the playground does not support external programs (environment.command)")
        try:
            self._factory: Any = await self._tools.equip(make_environment(self.config, True))
            if self.config.data.tasks is not None or generates_tasks(self._factory):
                self.tasks = make_tasks(self.config, self._factory)[:MAX_TASKS]
            matching_tasks = [candidate for candidate in self.tasks if candidate.id == task_id]
            if task_id is not None and not matching_tasks:
                raise ValueError(f"no task {task_id!r} among the first {MAX_TASKS} tasks of the environment")
            # The person's own words replace the prompt of the first task, whose data the environment may need.
            user_tasks = [replace(first_task, id=self.task.id, prompt="") for first_task in self.tasks[:1]]
            self.task = [*matching_tasks, *user_tasks, self.task][0]
            if self._computes_reward:
                await self._open_reward()
        except BaseException:
            await self.close()
            raise

    async def _open_reward(self) -> None:
        try:
            reward = make_reward(self.config)
            check_group_size(reward, 1)
        except ValueError as error:  # the conversation does not need it
            self._reward_problem = str(error)
            return
        self._reward = reward
        await open_reward(reward, self._exit_stack, lambda _: None)

    @property
    def _computes_reward(self) -> bool:
        section = self.config.reward
        return section.type in COMPUTED_REWARDS and not section.parts and self.task.id != USER_TASK_ID

    async def restart_environment(self) -> list[Message]:
        """Restart the environment; return its initial messages."""
        await self._close_environment()
        try:
            self.environment = environment = self._factory(self.task)
            self.seen_messages, self.tool_specs = [], [tool.spec for tool in environment.tools]
            self._turns, self._calls_are_lost = {}, False
            return await environment.reset()
        except Exception as error:  # foreign code
            raise as_value_error(error) from error

    async def follow_edits(self, messages: list[Message]) -> bool:
        """Restart the environment if the user edited the conversation; return whether tool effects are lost."""
        if self.environment is not None and messages[: len(self.seen_messages)] == self.seen_messages:
            return False
        await self.restart_environment()
        self._calls_are_lost = any(message.role == "tool" for message in messages)
        return self._calls_are_lost

    async def call_tools(self, message: Message) -> list[Message]:
        """Execute the tool calls of a turn that the user wrote."""
        assert self.environment is not None
        if not message.tool_calls:
            raise ValueError("the last message is the model's and calls no tool; add a message after it")
        truncate, max_tokens = self.chat.truncate, self.config.sampling.max_reply_tokens
        step = await self.environment.step(message)
        contents = [truncate(reply.content, max_tokens) for reply in step.replies]
        return [
            replace(reply, content=content, images=shift_images(reply.images, reply.content, content))
            for reply, content in zip(step.replies, contents, strict=True)
        ]

    def make_episode_settings(self, params: SamplingParams) -> EpisodeSettings:
        section, max_tokens = self.config.environment, self.config.sampling.max_reply_tokens
        limits = section.max_turns, section.episode_timeout, max_tokens
        return EpisodeSettings(lambda _: self.environment, self.chat, params, self._reward, *limits)  # type: ignore[arg-type]

    def make_seed_function(self, seed: int, history: Sequence[Message]) -> Callable[[int], int]:
        return partial(derive_seed, seed, 0, "play", len(history))

    async def score(
        self, answer: PlayedAnswer, start_index: int, was_stopped: bool
    ) -> tuple[Reward | None, str | None]:
        """Return the reward of the conversation, or the reason why scoring failed; (None, None) if there is nothing to
        score. The answer begins at position `start_index` of `seen_messages`."""
        trajectory = answer.trajectory
        roles = [message.role for message in self.seen_messages]
        positions = [i for i, role in enumerate(roles) if i >= start_index and role == "assistant"]
        self._turns |= dict(zip(positions, trajectory.turns, strict=True))
        has_ended = not was_stopped and trajectory.status not in ("error", "tool_failure")
        has_reward = self._reward or self._reward_problem or getattr(self.environment, "reward", None)
        if not (has_ended and has_reward and self._computes_reward) or self._calls_are_lost:
            return None, None
        if self._reward_problem is not None:
            return None, self._reward_problem
        prompt, turns = self._split_history()
        scored_answer = await answer.score(prompt, turns)
        if scored_answer.reward is None:
            return None, scored_answer.error
        step_rewards = scored_answer.reward.steps[len(turns) - len(trajectory.turns) :]
        trajectory.reward = replace(scored_answer.reward, steps=step_rewards)
        return scored_answer.reward, None

    def _split_history(self) -> tuple[list[Message], list[Turn]]:
        """Return the conversation as an episode. A user message becomes a reply to the turn before it."""
        prompt, turns = list[Message](), list[Turn]()
        for position, message in enumerate(self.seen_messages):
            if message.role == "assistant":
                turn = self._turns.get(position) or Turn([], Completion([], [], "stop"), message)
                turns.append(replace(turn, replies=[]))
            else:
                (turns[-1].replies if turns else prompt).append(message)
        return prompt, turns

    async def _close_environment(self) -> None:
        environment, self.environment = self.environment, None
        if environment is not None:
            await environment.close()
            if isinstance(environment, ToolEnvironment):
                await environment.executor.close()

    async def close(self) -> None:
        await self._close_environment()
        await self._exit_stack.aclose()
        await self._tools.close()


class PlayedAnswer(EpisodeRun):
    """Answer of the model: turns, reported to the page one by one, until one calls no tool or `stop_file` exists."""

    is_interruptible = True  # whether a stop cancels at once

    def report_to(self, arguments: JobArguments, report: ProgressCallback) -> None:
        """Set the callback for progress and the file that stops the answer."""
        self.report, self.stop_file = report, Path(arguments["stop"])

    async def play_until_stopped(self) -> bool:
        """Play the turns; return whether the user stopped the answer."""
        play_task = asyncio.ensure_future(self.play())
        while not play_task.done():
            await asyncio.wait({play_task}, timeout=STOP_POLL_SECONDS)
            if self.is_interruptible and self.stop_file.exists():
                play_task.cancel()
        self.close_session()
        return play_task.cancelled() or play_task.result() is not None or self.stop_file.exists()

    async def score(self, prompt: list[Message], turns: list[Turn]) -> Trajectory:
        """Score the whole conversation with the answer and return it as an episode."""
        answer = self.trajectory
        self.trajectory = conversation = replace(answer, prompt=prompt, turns=turns)
        try:
            await self._score_episode()
        finally:
            self.trajectory = answer
        return conversation

    async def _step_environment(self, environment: Environment, turn: Turn) -> list[int]:
        self.report({"message": message_to_dict(turn.message)})
        try:
            return await super()._step_environment(environment, turn)
        finally:
            self.report({"results": [_make_result_view(result) for result in turn.tool_results]})


def _make_result_view(result: ToolResult) -> JobArguments:
    """Return a tool result as JSON. Its images are part of the content, as in messages."""
    content = make_openai_content(Message("tool", result.content, images=result.images))
    return asdict(replace(result, images=[])) | {"content": content}


def make_config(arguments: JobArguments) -> TrainingConfig:
    """Return the config of a conversation: the model's own, with the chosen environment, tools and reward."""
    config = make_serving_config(find_model(arguments["model"], arguments["runs"]))
    prefix, _, name = (arguments["environment"] or "").partition(":")
    changes: JobArguments = {"logging": config.logging.model_copy(update={"output_dir": arguments["runs"]})}
    if prefix == "environment":
        changes["environment"] = config.environment.model_copy(update={"environment_id": name})
        changes["data"] = config.data.model_copy(update={"count": MAX_TASKS})
    elif prefix == "run":
        run_config = RunFolder(Path(arguments["runs"]) / name).config
        environment = run_config.environment.model_copy(update={"user": None})  # the person is the user
        changes |= {"environment": environment, "tools": run_config.tools, "data": run_config.data}
        changes["reward"] = run_config.reward
    return config.model_copy(update=changes)
