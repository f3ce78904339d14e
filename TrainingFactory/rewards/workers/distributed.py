"""Rewards from a pool of workers: judges, reward models, or any callable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import validate_call

from TrainingFactory.common.endpoint import Endpoint
from TrainingFactory.common.options import STRICT, Count, NotNegative, Positive
from TrainingFactory.common.user_code import failure
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import Adapted, as_reward, one_by_one
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.judge.judges import Judge
from TrainingFactory.rewards.judge.model_judge import judges_at
from TrainingFactory.rewards.workers.process import FinishedEpisode, RewardProcess, is_rows_own
from TrainingFactory.tools.limits import CircuitBreaker
from TrainingFactory.tools.timeouts import OutOfTime, within
from TrainingFactory.types import Reward, Trajectory

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_REASONS = 100  # told apart
LOOK_AGAIN = 0.1  # seconds between looks at workers that are down


class WorkersDown(Exception):
    """No worker could score it."""


@dataclass(slots=True, eq=False)
class PoolWorker:
    number: int
    model: Any  # as it was handed in
    reward: Adapted | RewardProcess
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(failures=2, pause=0.5))
    down: bool = False  # and a user knows it
    running: int = 0
    done: int = 0
    failed: int = 0

    @property
    def name(self) -> str:
        """Return what a user can look for: a judge has an address."""
        model = self.model.client.model if isinstance(self.model, Judge) else None
        return f"worker {self.number}" + (f" at {model.url}" if isinstance(model, Endpoint) else "")


class RewardWorkerPool:
    """Spread rewards over workers. `model` is one reward for all, or a list with one for each; a text such as
    `rewards.py:score` runs in a process for each worker, or with `base_url` names a model that judges there. `timeout`
    is for one attempt; a row waits at most `patience` seconds while all workers are down."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        model: Any,
        num_workers: Count | None = None,
        *,
        base_url: str | Sequence[str] | None = None,
        per_worker: Count | None = None,
        timeout: Positive = 300.0,
        patience: NotNegative = 10.0,
        **judge_options: Any,
    ) -> None:
        self.timeout, self.patience = timeout, patience
        self._opened: list[Any] = []  # to be closed with the pool
        if base_url is not None:
            models = judges_at(base_url, {"model": model} | judge_options, num_workers)
            self._opened += dict.fromkeys(models)
        elif judge_options:
            raise ValueError(
                f"{', '.join(judge_options)}: these are options of a model that judges, which needs base_url"
            )
        else:
            models = self._models(model, num_workers)
        self.workers = [
            PoolWorker(number, one, one if isinstance(one, RewardProcess) else as_reward(one))
            for number, one in enumerate(models)
        ]
        self.grouped, self.compares = self.workers[0].reward.grouped, self.workers[0].reward.compares
        self.per_worker = per_worker or (1 if isinstance(models[0], RewardProcess) else 8)
        self.dropped: Counter[str] = Counter()  # reasons, since the beginning
        self.moved = 0  # rows that another worker had to take
        self._waiting: deque[asyncio.Future[None]] = deque()

    def _models(self, model: Any, num_workers: int | None) -> list[Any]:
        """Return one for each worker."""
        given = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
        count = num_workers or len(given)
        if not given or len(given) not in (1, count):
            raise ValueError(
                f"num_workers is {count}, but there are {len(given)} models: give one, or one for each"
            )
        models = given * count if len(given) == 1 else given
        made = [RewardProcess(one, self.timeout) if isinstance(one, str) else one for one in models]
        self._opened += [one for one, named in zip(made, models, strict=True) if isinstance(named, str)]
        return made

    async def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[Reward | None]:
        """Return the rewards in order; None for what could not be scored, which is counted in `dropped`."""
        together: dict[Any, list[int]] = {}
        for number, trajectory in enumerate(trajectories):
            together.setdefault(trajectory.group if self.grouped else number, []).append(number)
        found: list[Reward | None] = [None] * len(trajectories)

        async def one(numbers: list[int]) -> None:
            with suppress(Exception):  # rewards are foreign code; counted where it came up
                rewards = await self.group([FinishedEpisode(trajectories[number]) for number in numbers])
                for number, reward in zip(numbers, rewards, strict=True):
                    found[number] = reward if isinstance(reward, Reward) else None

        await asyncio.gather(*map(one, together.values()))
        return found

    async def __call__(self, episode: Episode) -> Reward:
        """Return the reward; raise where there is none."""
        try:
            return await self._scored(lambda worker: worker.reward(episode))
        except Exception as error:
            self._drop(error)
            raise

    async def compute(self, trajectory: Trajectory) -> Reward:
        """Return the reward of a finished episode; raise where there is none."""
        return await self(FinishedEpisode(trajectory))

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        if not self.grouped:
            return await one_by_one(self, episodes)
        try:
            found = await self._scored(lambda worker: worker.reward.group(episodes))
        except Exception as error:
            self._drop(error, len(episodes))
            raise
        for each in found:
            if isinstance(each, Exception):
                self._drop(each)
        return found

    def _drop(self, error: Exception, rows: int = 1) -> None:
        reason = f"judge: {error.kind}" if isinstance(error, JudgeFailure) else failure(error)
        self.dropped[reason if len(self.dropped) < MAX_REASONS else "other"] += rows

    async def close(self) -> None:
        """End what it has started itself: processes, judges. What was handed in stays open."""
        for each in self._opened:
            await each.close()

    @property
    def metrics(self) -> dict[str, float]:
        found = {f"pool/worker_{each.number}_done": float(each.done) for each in self.workers}
        found |= {f"pool/worker_{each.number}_failed": float(each.failed) for each in self.workers}
        return found | {"pool/moved": float(self.moved), "pool/dropped": float(self.dropped.total())}

    async def _scored(self, score: Callable[[PoolWorker], Coroutine[Any, Any, T]]) -> T:
        tried: dict[PoolWorker, Exception] = {}
        # Where there is only one, a process that died is asked again: the next call has another.
        settled = len(self.workers) > 1 or not isinstance(self.workers[0].reward, RewardProcess)
        while True:
            worker, ticket = await self._place(tried)
            answered: bool | None = None  # a call that is cancelled says nothing about the worker
            error: Exception | None = None
            try:
                reward = await self._run(worker, score)
                answered = True
                worker.done += 1
                self.moved += bool(tried)
                return reward
            except Exception as caught:
                error, (answered, again) = caught, _blame(caught)
                if not again:
                    raise
                if settled or not isinstance(caught, ConnectionError):
                    tried[worker] = caught
                settled = True
            finally:
                worker.running -= 1
                worker.failed += answered is False
                worker.breaker.ended(ticket, answered)
                self._tell(worker, answered, error)
                self._wake()

    def _tell(self, worker: PoolWorker, answered: bool | None, error: Exception | None) -> None:
        """Say once that a worker is down, and once that it is back."""
        if worker.down and answered:
            worker.down = False
            log.warning("%s of the reward is back", worker.name)
        elif not worker.down and answered is False and worker.breaker.is_open and error is not None:
            worker.down = True
            log.warning(
                "%s of the reward is down, and left alone until it is back: %s", worker.name, failure(error)
            )

    async def _place(self, tried: dict[PoolWorker, Exception]) -> tuple[PoolWorker, int]:
        """Return the free worker with the fewest rows under way, among those that have not failed at this one."""
        until = time.monotonic() + self.patience
        while True:
            left = [worker for worker in self.workers if worker not in tried]
            if not left:
                last = next(reversed(tried.values()))
                raise WorkersDown(f"none of {len(tried)} workers could score it; the last: {failure(last)}")
            up = [worker for worker in left if not worker.breaker.is_open]
            free = [worker for worker in up if worker.running < self.per_worker]
            if free:
                worker = min(free, key=lambda each: (each.running, each.done))
                ticket = worker.breaker.allow()
                assert ticket is not None
                worker.running += 1
                return worker, ticket
            if up:  # only busy
                until = time.monotonic() + self.patience
            elif time.monotonic() > until:
                raise WorkersDown(f"all workers left for it have been down for {self.patience:g} s")
            await self._change()

    async def _change(self) -> None:
        """Wait until a place is free, or it is time to look at those that were down."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await asyncio.wait({waiter}, timeout=LOOK_AGAIN)
        if not waiter.done():
            self._waiting.remove(waiter)

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _run(self, worker: PoolWorker, score: Callable[[PoolWorker], Coroutine[Any, Any, T]]) -> T:
        # A process has a limit of its own, which starts when it is ready.
        limit = None if isinstance(worker.reward, RewardProcess) else self.timeout
        try:
            return await within(limit, score(worker))
        except OutOfTime:
            raise TimeoutError(f"worker {worker.number} did not answer within {self.timeout:g} s") from None


def _blame(error: Exception) -> tuple[bool | None, bool]:
    """Return whether the worker answered (None: the error says nothing about it), and whether another should try."""
    if isinstance(error, JudgeFailure):
        # A budget that is spent says nothing about the endpoint, and what is in the cache is still answered; one that
        # refuses a request is not down either.
        found = {"budget": (None, True), "unavailable": (False, True), "error": (True, True)}
        return found.get(error.kind, (True, False))
    own = is_rows_own(error)
    return own, not own
