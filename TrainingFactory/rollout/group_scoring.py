"""Group rewards: episodes of one task that are scored together when the last of them has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from TrainingFactory.common.user_code import locate_error
from TrainingFactory.protocols import GroupReward
from TrainingFactory.rewards.adapt import Unscored
from TrainingFactory.rollout.episode import EpisodeRun
from TrainingFactory.rollout.scoring import OpenEpisode, format_error
from TrainingFactory.tools.timeouts import OutOfTime, SelfCancelled, run_within
from TrainingFactory.types import Reward, SamplersLost

log = logging.getLogger(__name__)
T = TypeVar("T")


class GroupRun:
    """Plays and scores the episodes of one task. An episode that has ended releases its slot of the concurrency limit
    and its sampling session, because its siblings may need them. Its environment stays open until the group is
    scored."""

    def __init__(self, runs: Sequence[EpisodeRun], reward: GroupReward) -> None:
        self.runs, self.reward = runs, reward

    async def run(self, play_all: Callable[[], Awaitable[object]]) -> None:
        """Await `play_all`, which calls `play` for each episode. Then score and close the episodes."""
        try:
            await play_all()
            await self._score_group()
        finally:
            await asyncio.gather(*(run.close() for run in self.runs))

    @staticmethod
    async def play(run: EpisodeRun, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                await run.play()
        finally:
            run.close_session()

    async def _score_group(self) -> None:
        """Score all episodes of the group that did not fail, even if only one is left."""
        start_time = time.perf_counter()
        episodes = [episode for run in self.runs if (episode := self._open_episode(run)) is not None]
        rewards = await self._compute_rewards(episodes) if episodes else []
        episode_seconds = (time.perf_counter() - start_time) / (len(episodes) or 1)  # per episode
        for episode, reward in zip(episodes, rewards, strict=True):
            trajectory = episode.trajectory
            trajectory.seconds += episode_seconds
            if isinstance(reward, Reward):
                trajectory.reward = reward
            else:
                trajectory.error = reward

    def _open_episode(self, run: EpisodeRun) -> OpenEpisode | None:
        try:
            return run.make_open_episode()
        except Exception as error:  # the environment's tools are user code
            run.trajectory.error = format_error(error)
            return None

    async def _compute_rewards(self, episodes: Sequence[OpenEpisode]) -> list[Reward | str]:
        """Return each episode's reward, or the reason why it has none."""
        timeout = self.runs[0].rules.timeout
        try:
            with contextlib.ExitStack() as stack:
                for episode in episodes:
                    stack.enter_context(episode.executor.measure("reward"))
                rewards = await run_within(timeout, _call_reward(self.reward, episodes))
        except OutOfTime:
            return [f"scoring the group took longer than {timeout:g} s"] * len(episodes)
        except SamplersLost:
            raise
        except (Exception, SelfCancelled) as error:  # rewards are user code
            log.info("scoring the group of task %s failed", episodes[0].task.id, exc_info=True)
            return [format_error(error)] * len(episodes)
        return [format_error(reward) if isinstance(reward, Exception) else reward for reward in rewards]


async def _call_reward(reward: GroupReward, episodes: Sequence[OpenEpisode]) -> list[Reward | Exception]:
    try:
        rewards = list(await reward.group(episodes))
    except SystemExit as error:  # raised in a task, it would end the event loop
        raise Unscored(f"the reward{locate_error(error)} tried to end the program") from error
    if len(rewards) != len(episodes):
        raise Unscored(f"the reward returned {len(rewards)} rewards for {len(episodes)} episodes")
    return rewards


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return all results. If one fails or the caller is cancelled, cancel the others
    and wait until they have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
