"""Reward by a trained reward model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from TrainingFactory.protocols import Episode, Scorer
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Trajectory

ScoringQueue = list[tuple[Trajectory, "asyncio.Future[Reward]"]]


class LearnedReward:
    """Reward by a trained reward model, which scores together the episodes that end within `patience` seconds."""

    def __init__(self, scorer: Scorer, patience: float = 0.005) -> None:
        self.scorer, self.patience = scorer, patience
        # The object may outlive a run and its event loop; the state below belongs to one loop.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: ScoringQueue = []
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, episode: Episode) -> Reward:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._queue, self._worker = loop, [], None
        future: asyncio.Future[Reward] = loop.create_future()
        self._queue.append((episode.trajectory, future))
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._score_queue())
        return await future

    async def _score_queue(self) -> None:
        """Score batches until the queue is empty. No await follows the last check of the queue, so that no request is
        missed."""
        while self._queue:
            await asyncio.sleep(self.patience)
            batch = [(trajectory, future) for trajectory, future in self._queue if not future.done()]
            self._queue.clear()
            if not batch:
                continue
            results = await self._score([trajectory for trajectory, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # the episode was cancelled meanwhile
                    continue
                if isinstance(result, Reward):
                    future.set_result(result)
                else:
                    future.set_exception(result)

    async def _score(self, trajectories: Sequence[Trajectory]) -> list[Reward | BaseException]:
        try:
            results = list(await in_thread(self.scorer.score, trajectories))
            rewards = [result for result in results if isinstance(result, Reward)]
            if not len(rewards) == len(results) == len(trajectories):
                raise ValueError(f"the scorer gave {len(rewards)} rewards for {len(trajectories)} episodes")
            return [*rewards]
        except (Exception, SystemExit) as error:  # the scorer may be user code
            if len(trajectories) == 1:
                return [error]
        # Score one by one, so that one failing episode does not fail the others.
        return [result for trajectory in trajectories for result in await self._score([trajectory])]
