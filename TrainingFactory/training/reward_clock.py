"""The reward of a run: timed, and told of where it takes long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from TrainingFactory.protocols import Episode, RewardFunction
from TrainingFactory.rewards.adapt import group_reward
from TrainingFactory.rollout.scoring import score, scoring_failed
from TrainingFactory.types import Reward

FIRST, AGAIN = 10.0, 30.0  # seconds


class RewardClock:
    """The reward of a run, timed, with what it spends. Seconds add up over episodes and groups that are scored side by
    side. `stats` are the counts of what judges and pools in it have asked, done and spent so far. Where rewards take
    long, `say` is told so: a judge that does not answer is asked again, which may take minutes in silence. It is told
    as well why the first episode could not be scored."""

    def __init__(
        self,
        reward: RewardFunction | None,
        say: Callable[[str], None] = lambda _: None,
        stats: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.reward, self._group = reward, group_reward(reward)
        self.grouped = self._group is not None
        self.compares = self._group is not None and self._group.compares
        self.seconds = 0.0
        self._say, self._stats, self._before = say, stats, stats()
        self._asked = False  # about any episode
        self._open: dict[object, tuple[float, int]] = {}  # since when, and of how many episodes
        self._timer: asyncio.TimerHandle | None = None

    def spent(self) -> dict[str, float]:
        """Return what judges and pools in the reward have asked, done and spent since the last time."""
        before, self._before = self._before, self._stats()
        return {name: value - before.get(name, 0.0) for name, value in self._before.items()}

    async def __call__(self, episode: Episode) -> Reward:
        with self._timed(1):
            found = await score(episode, self.reward)  # type: ignore[arg-type]
            self._first([found])
            return found

    async def group(self, episodes: Sequence[Episode]) -> Sequence[Reward | Exception]:
        assert self._group is not None
        with self._timed(len(episodes)):
            found = await self._group.group(episodes)
            self._first(found)
            return found

    def _first(self, found: Sequence[Reward | Exception]) -> None:
        """Say why the first episodes cannot be scored: it may be so with all, and a step takes long."""
        if not self._asked and isinstance(found[0], Exception):
            self._say(f"WARNING: the first episode could not be scored; {scoring_failed(found[0])}")
        self._asked = True

    @contextmanager
    def _timed(self, episodes: int) -> Iterator[None]:
        this, started = object(), time.monotonic()
        self._open[this] = started, episodes
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FIRST, self._tell)
        try:
            yield
        except Exception as error:
            self._first([error])
            raise
        finally:
            self.seconds += time.monotonic() - started
            del self._open[this]
            if not self._open and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _tell(self) -> None:
        waited = time.monotonic() - min(since for since, _ in self._open.values())
        late = waited >= FIRST
        if late:
            count = sum(episodes for _, episodes in self._open.values())
            self._say(f"waiting for {count} reward{'s' * (count > 1)}, the longest for {waited:.0f} s so far")
        again = AGAIN if late else FIRST - waited
        self._timer = asyncio.get_running_loop().call_later(again, self._tell)
