"""Timing of a run's reward, with progress messages while it is slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from TrainingFactory.protocols import Episode, RewardFunction
from TrainingFactory.rewards.adapt import as_group_reward
from TrainingFactory.rollout.scoring import format_error, score
from TrainingFactory.types import Reward

FIRST_REPORT_SECONDS = 10.0  # until the first message
REPORT_EVERY_SECONDS = 30.0  # between further ones


class RewardClock:
    """Wraps the reward of a run and measures its time, summed over episodes and groups that are scored concurrently.
    `read_stats` returns the total requests and costs of the reward's judges and pools. `notify` reports slow rewards,
    because retries of an unresponsive judge may take minutes, and why the first episode could not be scored."""

    def __init__(
        self,
        reward: RewardFunction | None,
        notify: Callable[[str], None] = lambda _: None,
        read_stats: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.reward, self._group_reward = reward, as_group_reward(reward)
        self.grouped = self._group_reward is not None
        self.compares = self._group_reward is not None and self._group_reward.compares
        self.seconds = 0.0
        self._notify, self._read_stats, self._last_stats = notify, read_stats, read_stats()
        self._has_scored = False  # whether any call has returned or raised
        self._running_calls: dict[object, tuple[float, int]] = {}  # start time and number of episodes
        self._timer: asyncio.TimerHandle | None = None

    def take_costs(self) -> dict[str, float]:
        """Return the requests and costs of the reward's judges and pools since the last call."""
        last_stats, self._last_stats = self._last_stats, self._read_stats()
        return {name: value - last_stats.get(name, 0.0) for name, value in self._last_stats.items()}

    async def __call__(self, episode: Episode) -> Reward:
        with self._measure_time(1):
            reward = await score(episode, self.reward)  # type: ignore[arg-type]
            self._report_first([reward])
            return reward

    async def group(self, episodes: Sequence[Episode]) -> Sequence[Reward | Exception]:
        assert self._group_reward is not None
        with self._measure_time(len(episodes)):
            rewards = await self._group_reward.group(episodes)
            self._report_first(rewards)
            return rewards

    def _report_first(self, rewards: Sequence[Reward | Exception]) -> None:
        """Report the error of the first scored episode immediately, because all later ones may fail for the same
        reason."""
        if not self._has_scored and isinstance(rewards[0], Exception):
            self._notify(f"WARNING: the first episode could not be scored; {format_error(rewards[0])}")
        self._has_scored = True

    @contextmanager
    def _measure_time(self, num_episodes: int) -> Iterator[None]:
        call_id, start_time = object(), time.monotonic()
        self._running_calls[call_id] = start_time, num_episodes
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FIRST_REPORT_SECONDS, self._report_slow)
        try:
            yield
        except Exception as error:
            self._report_first([error])
            raise
        finally:
            self.seconds += time.monotonic() - start_time
            del self._running_calls[call_id]
            if not self._running_calls and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _report_slow(self) -> None:
        waited_seconds = time.monotonic() - min(start_time for start_time, _ in self._running_calls.values())
        is_slow = waited_seconds >= FIRST_REPORT_SECONDS
        if is_slow:
            num_rewards = sum(num_episodes for _, num_episodes in self._running_calls.values())
            noun = "reward" if num_rewards == 1 else "rewards"
            self._notify(f"Waiting for {num_rewards} {noun}, the longest for {waited_seconds:.0f} s so far")
        delay_seconds = REPORT_EVERY_SECONDS if is_slow else FIRST_REPORT_SECONDS - waited_seconds
        self._timer = asyncio.get_running_loop().call_later(delay_seconds, self._report_slow)
