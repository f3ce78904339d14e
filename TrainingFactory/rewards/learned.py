"""A trained reward model as a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from TrainingFactory.protocols import Episode, Scorer
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Trajectory

Waiting = list[tuple[Trajectory, "asyncio.Future[Reward]"]]


class LearnedReward:
    """Score episodes that end at about the same time together: the first one waits `patience` seconds for others."""

    def __init__(self, scorer: Scorer, patience: float = 0.005) -> None:
        self.scorer, self.patience = scorer, patience
        # An object may outlive a run and its loop: what belongs to an earlier one is left alone.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: Waiting = []
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, episode: Episode) -> Reward:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._waiting, self._worker = loop, [], None
        answer: asyncio.Future[Reward] = loop.create_future()
        self._waiting.append((episode.trajectory, answer))
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        """Score until nobody waits. Nothing is awaited between the last look and the end, so nobody is overlooked."""
        while self._waiting:
            await asyncio.sleep(self.patience)
            batch = [(each, answer) for each, answer in self._waiting if not answer.done()]
            self._waiting.clear()
            if not batch:
                continue
            found = await self._scored([trajectory for trajectory, _ in batch])
            for (_, answer), result in zip(batch, found, strict=True):
                if answer.done():  # its episode was given up meanwhile
                    continue
                if isinstance(result, Reward):
                    answer.set_result(result)
                else:
                    answer.set_exception(result)

    async def _scored(self, trajectories: Sequence[Trajectory]) -> list[Reward | BaseException]:
        try:
            found = list(await in_thread(self.scorer.score, trajectories))
            rewards = [each for each in found if isinstance(each, Reward)]
            if not len(rewards) == len(found) == len(trajectories):
                raise ValueError(f"the scorer gave {len(rewards)} rewards for {len(trajectories)} episodes")
            return [*rewards]
        except (Exception, SystemExit) as error:  # foreign code, perhaps
            if len(trajectories) == 1:
                return [error]
        # One episode that cannot be scored must not cost the others their reward.
        return [result for each in trajectories for result in await self._scored([each])]
