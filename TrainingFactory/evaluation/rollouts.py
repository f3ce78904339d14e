"""Episodes without training. Each episode is saved when it ends, and metrics summarise all of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from TrainingFactory.assembly import rewards as build_rewards
from TrainingFactory.assembly.endpoint_rollouts import (
    EndpointRollouts,
    EndpointSampler,
    EndpointStopped,
    sum_endpoint_metrics,
)
from TrainingFactory.assembly.environment import check_self_play, check_tools, make_environment
from TrainingFactory.assembly.fleet import await_engines, join_cluster
from TrainingFactory.assembly.rewards import check_group_size, check_reward, judge_metrics, make_reward
from TrainingFactory.assembly.run_tools import RunTools, get_recording_folder
from TrainingFactory.assembly.sampler import make_rollouts, make_sampler
from TrainingFactory.assembly.vision import with_vision
from TrainingFactory.common.endpoints.names import is_endpoint
from TrainingFactory.common.event_loop import run as run_loop
from TrainingFactory.common.texts import pluralize
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import check_tasks, save_trajectories
from TrainingFactory.protocols import ChatFormat, EnvironmentFactory, RewardFunction, Sampler
from TrainingFactory.resolve import factories
from TrainingFactory.resolve.model_names import with_resolved_model
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.runs.folder import find_unused_path, shorten_environment
from TrainingFactory.tools.recording import CALLS_FILE
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.training.dataset import UserObjects, make_tasks
from TrainingFactory.training.interrupts import Interrupts, StopRequested
from TrainingFactory.types import Task, Trajectory


@dataclass(slots=True)
class RolloutReport:
    """Finished episodes of a `Rollouts` run and their metrics."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    interrupted: bool = False


class Rollouts:
    """Runs `group_size` episodes per task and saves them to the JSONL file `path`, by default a new one. If
    logging.record_tools is set to true, tool calls are recorded in a folder beside it; `replay` is such a folder, whose
    recorded calls are replayed. `select_reward` selects the part of the config's reward that scores the episodes."""

    def __init__(
        self,
        config: TrainingConfig,
        path: Path | None = None,
        group_size: int = 1,
        tools: Sequence[Any] = (),
        replay: str | Path | None = None,
        select_reward: Callable[[RewardFunction | None], RewardFunction | None] = lambda reward: reward,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        config = factories.resolve_ids(config, notify)
        user_objects = factories.with_dataset_rows(config, UserObjects(), notify)
        self.config = config = with_resolved_model(config)
        self.group_size, self._select_reward, self._notify = group_size, select_reward, notify
        self.tools = RunTools(config, tools, replay)
        reward_section = check_reward(config)
        check_group_size(select_reward(reward_section), group_size)
        self.environment: EnvironmentFactory = make_environment(config, self.tools.is_needed, notify)
        with factories.add_searched_places("datasets"):
            self.tasks = list(user_objects.tasks or ()) or make_tasks(config, self.environment)
        self.config = config = with_vision(config, self.environment, self.tasks)
        build_rewards.check_tasks(reward_section, self.tasks)
        check_self_play(config, self.environment, reward_section)
        self.tools.check_tasks(self.tasks)
        check_tasks(self.tasks)  # now, not after the episodes
        # A partition of the tasks. Rounds run one after the other until `should_stop` returns True.
        self.rounds: Sequence[Sequence[Task]] = [self.tasks]
        self.should_stop: Callable[[Sequence[Trajectory]], bool] = lambda _: False
        self.num_episodes = len(self.tasks) * group_size
        file_stem = shorten_environment(config.environment.environment_id or "tools")
        folder = Path(config.logging.output_dir).expanduser() / "rollouts"
        self.path = path.expanduser() if path is not None else find_unused_path(folder, file_stem, ".jsonl")
        self._target_path = self.path.resolve()  # replace the target of a link, not the link
        self._recording_folder = self._choose_recording_folder()
        self._partial_file = create_part_file(self._target_path)
        self._interrupts = Interrupts(lambda _: None)
        self._ended_episodes: list[Trajectory] = []
        self._reward: RewardFunction | None = None
        # Not set to a local sampler, which would keep its model in memory.
        self._endpoint_sampler: EndpointSampler | None = None

    def run(self, on_episode: Callable[[Trajectory], None] = lambda _: None) -> RolloutReport:
        """Sample all episodes; after Ctrl-C, save and report the finished ones."""
        return run_loop(lambda: self.run_async(on_episode), self._interrupts.request_stop)

    async def run_async(self, on_episode: Callable[[Trajectory], None] = lambda _: None) -> RolloutReport:
        """Sample all episodes on the running event loop."""
        start_time = time.perf_counter()
        was_interrupted = False
        try:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(self.tools.close)
                stack.callback(self.tools.commit)
                with self._interrupts.watch_signals():
                    start_time = await self._interrupts.interruptible(self._run_episodes(stack, on_episode))
        except StopRequested:
            was_interrupted = True
        except EndpointStopped as error:
            note = f", saved to {self.path}" if self._ended_episodes else ""
            progress_text = f"{len(self._ended_episodes)} of {pluralize(self.num_episodes, 'episode')}{note}"
            raise EndpointStopped(f"{error}. Finished: {progress_text}") from error
        finally:
            seconds = time.perf_counter() - start_time
            await in_thread(self._save_episodes)
            _release_gpu()
        metrics = rollout_metrics(self._ended_episodes) | self.tools.metrics() | judge_metrics(self._reward)
        metrics |= sum_endpoint_metrics(self._ended_episodes)
        if self._endpoint_sampler is not None:
            metrics |= self._endpoint_sampler.metrics
        metrics |= {"seconds": seconds, "tokens_per_second": metrics["sampled_tokens"] / seconds}
        return RolloutReport(self._ended_episodes, metrics, was_interrupted)

    async def _run_episodes(self, stack: AsyncExitStack, on_episode: Callable[[Trajectory], None]) -> float:
        """Create environment, sampler and reward, and run the episodes. Return the start time of the first one."""

        def on_ended(trajectory: Trajectory) -> None:
            self._ended_episodes.append(trajectory)
            save_trajectories(self._partial_file, [trajectory], append=True)
            on_episode(trajectory)

        config = self.config
        await join_cluster(config, stack)
        environment = await self.tools.equip(self.environment)
        chat, sampler = await in_thread(self.open_sampler)
        if isinstance(sampler, EndpointSampler):
            self._endpoint_sampler = sampler
        stack.push_async_callback(sampler.close)
        await await_engines(sampler)
        self._reward = make_reward(config)
        await build_rewards.open_reward(self._reward, stack, self._notify)
        reward = self._select_reward(self._reward)
        engine = make_rollouts(
            config, environment, chat, on_ended, reward, self.tools.runtime, sampler=sampler
        )
        if isinstance(engine, EndpointRollouts):
            engine.finished_episodes = {(episode.task.id, episode.member) for episode in self._ended_episodes}
        self._start_recording()
        await check_tools(environment, self.tasks[0], chat, reward)
        start_time = time.perf_counter()
        recording_key = "eval" if config.data.split == "heldout" else None
        for tasks in self.rounds:
            await engine.rollout_batch(tasks, sampler, self.group_size, recording_key=recording_key)
            if self.should_stop(self._ended_episodes):
                break
        return start_time

    @property
    def loads_model(self) -> bool:
        """Return whether this process loads the model; it does not if the model is behind an endpoint."""
        return not is_endpoint(self.config.model.name)

    def open_sampler(self) -> tuple[ChatFormat, Sampler]:
        return make_sampler(self.config, self.num_episodes, self._notify)

    def _choose_recording_folder(self) -> Path | None:
        """Return the folder for recorded tool calls; None unless logging.record_tools is set to true."""
        logging_options = self.config.logging
        if not (logging_options.record_tools and "record_tools" in logging_options.model_fields_set):
            return None
        folder = get_recording_folder(self._target_path)
        if self.tools.recording_path is not None and folder.resolve() == Path(self.tools.recording_path):
            raise ValueError(
                f"cannot replay and record {folder} at the same time. Choose another file with --out, or remove "
                "logging.record_tools=true"
            )
        return folder

    def _start_recording(self) -> None:
        if self._recording_folder is not None:
            self._recording_folder.mkdir(parents=True, exist_ok=True)
            (self._recording_folder / CALLS_FILE).write_bytes(b"")  # discard an earlier recording
            self.tools.record_to(self._recording_folder)

    def discard(self) -> None:
        """Remove the temporary file of episodes."""
        self._partial_file.unlink(missing_ok=True)

    def _save_episodes(self) -> None:
        """Write the episodes to the target file, sorted by task and member."""
        task_order = {task.id: position for position, task in enumerate(self.tasks)}
        self._ended_episodes.sort(key=lambda trajectory: (task_order[trajectory.task.id], trajectory.member))
        if self._ended_episodes:
            save_trajectories(self._partial_file, self._ended_episodes)
            os.replace(self._partial_file, self._target_path)
        self.discard()


def _release_gpu() -> None:
    """Free the GPU memory of the sampler, so that one process can run several evaluations in sequence."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        from TrainingFactory.assembly.memory import release_models

        release_models()


def create_part_file(path: Path) -> Path:
    """Create an empty temporary file beside `path` and return its path; raise ValueError if it cannot be written."""
    if path.exists() and not path.is_file():  # a device or pipe must not be replaced
        raise ValueError(f"{path} is not a regular file. Choose a file name, such as episodes.jsonl")
    partial_file = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file.write_bytes(b"")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    return partial_file
