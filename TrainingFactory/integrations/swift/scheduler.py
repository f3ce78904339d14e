"""ms-swift's multi-turn scheduler over our environments. Nothing here imports ms-swift; `plugin.py` does."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from statistics import fmean
from typing import Any, TypeVar

from TrainingFactory.assembly import rewards as reward_assembly
from TrainingFactory.assembly.environment import make_environment
from TrainingFactory.assembly.named_files import read_config
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.assembly.sampler import make_rollouts
from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.convert import to_swift_messages
from TrainingFactory.data.trajectories import task_from_dict
from TrainingFactory.envs.self_play import is_self_play
from TrainingFactory.integrations.swift import CONFIG_VARIABLE, TASK_COLUMN
from TrainingFactory.integrations.swift.episodes import SampledTurn, SwiftEpisode, SwiftFormat
from TrainingFactory.models import chat_format
from TrainingFactory.resolve import factories
from TrainingFactory.rewards.adapt import compares_episodes
from TrainingFactory.rollout.episode import EpisodeSettings
from TrainingFactory.types import Message, Task, Trajectory

T = TypeVar("T")
log = logging.getLogger(__name__)
CLOSE_TIMEOUT_SECONDS = 30.0


class EpisodeLoop:
    """Event loop in a thread, because ms-swift closes its own loops and connections to tools need an open one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True).start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this object's event loop, and wait for its result on the caller's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CLOSE_TIMEOUT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)


class SwiftRun:
    """Environment, tools and reward of a config, shared by all episodes of an ms-swift process."""

    def __init__(self, config: TrainingConfig) -> None:
        check_config(config)
        self._config = config = factories.resolve_ids(config, log.info)
        self._tools = RunTools(config, (), None)
        self._environment = build_environment(config, self._tools)
        self._exit_stack = AsyncExitStack()
        self._open_lock = asyncio.Lock()
        self._settings: EpisodeSettings | None = None
        self.max_episodes: int | None = getattr(self._environment, "max_episodes", None)

    async def prepare_settings(self, chat: SwiftFormat) -> EpisodeSettings:
        """Return the settings that all episodes share; start the tools' servers on the first call."""
        async with self._open_lock:
            if self._settings is None:
                self._exit_stack.push_async_callback(self._tools.close)
                environment = await self._tools.equip(self._environment)
                reward = reward_assembly.make_reward(self._config)
                await reward_assembly.open_reward(reward, self._exit_stack, log.info)
                runtime = self._tools.runtime
                self._settings = make_rollouts(
                    self._config, environment, chat, reward=reward, runtime=runtime
                ).rules
            return self._settings

    async def close(self) -> None:
        await self._exit_stack.aclose()


class EnvironmentScheduler:
    """Hooks of ms-swift's multi-turn scheduler; a subclass adds ms-swift's `MultiTurnScheduler`."""

    tokenizer: Any  # of the second base
    max_turns: int | None

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, **options: Any) -> None:
        config = read_run_config()
        config_max_turns = config.environment.max_turns
        super().__init__(infer_engine, min(max_turns or config_max_turns, config_max_turns), **options)  # type: ignore[call-arg]
        model = config.model
        self._chat = SwiftFormat(chat_format(self.tokenizer, model.family, thinking=model.thinking))
        self._control_texts = [*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()]
        self._run = SwiftRun(config.model_copy(update={"environment": self._limit_turns(config)}))
        self._loop = EpisodeLoop()
        self._episodes: dict[str, SwiftEpisode] = {}
        self._counts: Counter[str] = Counter()
        atexit.register(self._close)

    def _limit_turns(self, config: TrainingConfig) -> Any:
        return config.environment.model_copy(update={"max_turns": self.max_turns})

    async def on_trajectory_start(self, requests: Sequence[Any]) -> None:
        """Start an episode for each request, and put the prompts of the environments into the requests."""
        await self._loop.run(self._begin_episodes(requests))

    async def _begin_episodes(self, requests: Sequence[Any]) -> None:
        rules = await self._run.prepare_settings(self._chat)
        max_episodes = self._run.max_episodes
        num_episodes = len(self._episodes) + len(requests)
        if max_episodes is not None and num_episodes > max_episodes:
            raise ValueError(
                f"ms-swift plays {num_episodes} episodes at once, and the environment holds at most "
                f"{max_episodes}. Lower per_device_train_batch_size or steps_per_generation."
            )
        for request in requests:
            if request.uuid in self._episodes:  # ms-swift starts the request again
                await self._episodes.pop(request.uuid).abandon()
            task = read_task(request.data_dict)
            self._counts["episodes"] += 1
            trajectory = Trajectory(task, group=task.id, member=self._counts["episodes"])
            self._episodes[request.uuid] = SwiftEpisode(rules, self._chat, trajectory)
        await asyncio.gather(*(self._episodes[request.uuid].begin() for request in requests))
        for request in requests:
            trajectory = self._episodes[request.uuid].trajectory
            if trajectory.prompt:  # empty if the reset failed
                _check_tools(request, trajectory)
                request.messages = self._as_swift_messages(trajectory.prompt)

    async def on_turn_end(
        self, infer_request: Any, response_choice: Any, current_turn: int
    ) -> dict[str, Any]:
        """Process a sampled turn in its episode's environment; return the reward after the last turn."""
        token_ids, is_sampled = self.get_response_token_data(infer_request, response_choice)  # type: ignore[attr-defined]
        tokens = list(zip(token_ids, is_sampled, strict=True))
        turn = SampledTurn(
            [token for token, is_sampled_token in tokens if not is_sampled_token],
            [token for token, is_sampled_token in tokens if is_sampled_token],
            response_choice.message.content or "",
            "length" if response_choice.finish_reason == "length" else "stop",
        )
        episode = self._episodes[infer_request.uuid]
        if not episode.is_over:  # over before the first turn if the reset failed
            await self._loop.run(episode.advance(turn))
        if not episode.is_over:
            return {}
        del self._episodes[infer_request.uuid]
        return {"done": True, "rollout_infos": self._make_rollout_infos(episode.trajectory)}

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """Append the replies of the environment to the conversation."""
        replies = self._episodes[infer_request.uuid].trajectory.turns[-1].replies
        infer_request.messages += self._as_swift_messages(replies)
        return {"infer_request": infer_request}

    def check_finished(self, *arguments: Any) -> bool:
        """Return False, because `on_turn_end` ends episodes."""
        return False

    def _make_rollout_infos(self, trajectory: Trajectory) -> dict[str, Any]:
        self._counts[trajectory.status] += 1
        reward = trajectory.reward
        if reward is None:
            self._counts["unscored"] += 1
            log.warning("task %s has no reward: %s", trajectory.task.id, trajectory.error)
        results = [result for turn in trajectory.turns for result in turn.tool_results]
        return {
            "total_reward": None if reward is None else reward.outcome,
            "tf_status": trajectory.status,
            "tf_error": trajectory.error,
            "tool_calls": len(results),
            "tool_errors": sum(not result.ok for result in results),
            **({} if reward is None else {f"reward/{name}": value for name, value in reward.parts.items()}),
        }

    def _as_swift_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        for message in messages:
            self._count_control_texts(message)
        return as_swift_messages(messages)

    def _count_control_texts(self, message: Message) -> None:
        text = next((text for text in self._control_texts if text in message.content), None)
        if text is None:
            return
        if not self._counts["control texts"]:
            log.warning(
                "A %s message contains %s. ms-swift encodes it as the control token, so a tool result or a document "
                "can pretend to be another message. TrainingFactory's own trainer encodes it as ordinary text.",
                message.role, text
            )  # fmt: skip
        self._counts["control texts"] += 1

    def _close(self) -> None:
        if self._counts:
            count_text = ", ".join(f"{count} {name}" for name, count in self._counts.items())
            print(f"TrainingFactory: {count_text}", flush=True)
        self._loop.close(self._close_all())

    async def _close_all(self) -> None:
        await asyncio.gather(*(episode.abandon() for episode in self._episodes.values()))
        await self._run.close()


def read_run_config() -> TrainingConfig:
    """Return the config in the file that the environment variable TF_CONFIG names."""
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise ValueError(f"{CONFIG_VARIABLE} is not set. Set it to the config: {CONFIG_VARIABLE}=run.yaml")
    return read_config(path)


def check_config(config: TrainingConfig) -> None:
    """Raise ValueError for options that ms-swift's trainer would silently ignore or does not support."""
    environment, training = config.environment, config.training
    option_values = {
        "environment.command": environment.command,
        "environment.context": environment.context,
        "environment.user": environment.user,
        "training.branching": training.branching,
        "training.filters": training.filters,
        "grpo.state_groups": config.grpo.state_groups,
    }
    if unsupported_names := [name for name, value in option_values.items() if value]:
        raise ValueError(
            f"{', '.join(unsupported_names)} does not work in ms-swift. Remove it, or train with tfactory train."
        )
    if compares_episodes(reward_assembly.check_reward(config)):
        raise ValueError(
            "reward: it compares the episodes of a group, but in ms-swift each episode is scored when it ends. Use a "
            "reward of single episodes, or train with tfactory train."
        )


def build_environment(config: TrainingConfig, tools: RunTools) -> Any:
    """Return the environment of the config; raise ValueError if ms-swift cannot play it."""
    environment = make_environment(config, tools.is_needed, log.info)
    if is_self_play(environment):
        raise ValueError("environment: self-play does not work in ms-swift. Train with tfactory train.")
    return environment


def read_task(columns: dict[str, Any] | None) -> Task:
    """Return the task in the columns of a dataset row."""
    task_json = (columns or {}).get(TASK_COLUMN)
    if not isinstance(task_json, str):
        raise ValueError(
            f"the dataset row has no column {TASK_COLUMN!r}. Write the dataset with `tfactory swift export`; with "
            "vllm_mode=server, also set --vllm_server_pass_dataset true."
        )
    return task_from_dict(json.loads(task_json))


def as_swift_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in ms-swift's roles. Raise ValueError for images."""
    if any(message.images for message in messages):
        raise ValueError("a message of the environment has an image. Only texts are passed to ms-swift.")
    return to_swift_messages(map(message_to_dict, messages))


def fill_missing_rewards(
    rollout_infos: Sequence[dict[str, Any]] | None, tasks: Sequence[str] | None
) -> list[float]:
    """Return the rewards of episodes. An unscored episode gets the mean reward of its task's scored episodes, and thus
    no advantage. ms-swift would count it as 0, which teaches the model to avoid something that was not its fault."""
    if rollout_infos is None or tasks is None or not all("total_reward" in infos for infos in rollout_infos):
        raise ValueError(
            "the reward training_factory needs --multi_turn_scheduler training_factory. Set both."
        )
    rewards = [infos["total_reward"] for infos in rollout_infos]
    rewards_by_task: dict[str, list[float]] = {}
    for task, reward in zip(tasks, rewards, strict=True):
        if reward is not None:
            rewards_by_task.setdefault(task, []).append(float(reward))
    return [
        fmean(rewards_by_task.get(task, [0.0])) if reward is None else float(reward)
        for task, reward in zip(tasks, rewards, strict=True)
    ]


def _check_tools(request: Any, trajectory: Trajectory) -> None:
    """Raise if the dataset row shows other tools than the environment has."""
    request_tools = request.tools or []
    tool_rows = json.loads(request_tools) if isinstance(request_tools, str) else request_tools
    tool_rows = [json.loads(row) if isinstance(row, str) else row for row in tool_rows]
    dataset_tools = sorted(str(row.get("function", row).get("name")) for row in tool_rows)
    tool_names = sorted(tool.name for tool in trajectory.tools)
    if tool_names != dataset_tools:
        raise ValueError(
            f"task {trajectory.task.id}: the column tools of the dataset has {', '.join(dataset_tools) or 'no tools'}, "
            f"but the environment has {', '.join(tool_names) or 'none'}. Write the dataset again with `tfactory swift "
            "export`."
        )
