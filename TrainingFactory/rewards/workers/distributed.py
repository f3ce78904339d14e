"""Pool of reward workers: judges, reward models, or any callable."""

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

from TrainingFactory.common.endpoints.transport import Endpoint
from TrainingFactory.common.options import STRICT, Count, NotNegative, Positive
from TrainingFactory.common.user_code import describe_failure
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import AdaptedReward, as_reward, score_independently
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.judge.judges import Judge
from TrainingFactory.rewards.judge.model_judge import make_judges
from TrainingFactory.rewards.workers.process import FinishedEpisode, RewardProcess, is_row_error
from TrainingFactory.tools.limits import CircuitBreaker
from TrainingFactory.tools.timeouts import OutOfTime, run_within
from TrainingFactory.types import Reward, Trajectory

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_DROP_REASONS = 100  # distinct reasons in `dropped`
RECHECK_SECONDS = 0.1  # seconds between checks of workers that are down


class WorkersDown(Exception):
    """Raised when no worker can score a row."""


@dataclass(slots=True, eq=False)
class PoolWorker:
    index: int
    model: Any  # as passed to the pool
    reward: AdaptedReward | RewardProcess
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(2, pause_seconds=0.5))
    is_down: bool = False  # a warning was logged
    num_running: int = 0
    num_done: int = 0
    num_failed: int = 0

    @property
    def name(self) -> str:
        """Return the worker's name for logs; for a judge, with the address of its endpoint."""
        model = self.model.client.model if isinstance(self.model, Judge) else None
        return f"worker {self.index}" + (f" at {model.url}" if isinstance(model, Endpoint) else "")


class RewardWorkerPool:
    """Reward that distributes rows over workers. `model` is one reward for all workers, or a list with one for each. A
    string such as `rewards.py:score` runs in one process per worker; with `base_url` it names a judge model at these
    endpoints. `timeout` limits one attempt; a row waits at most `patience` seconds while all workers are down."""

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
        self._owned_models: list[Any] = []  # closed with the pool
        if base_url is not None:
            models = make_judges(base_url, {"model": model} | judge_options, num_workers)
            self._owned_models += dict.fromkeys(models)
        elif judge_options:
            raise ValueError(f"{', '.join(judge_options)}: options of a judge model, which needs base_url")
        else:
            models = self._make_models(model, num_workers)
        self.workers = [
            PoolWorker(index, model, model if isinstance(model, RewardProcess) else as_reward(model))
            for index, model in enumerate(models)
        ]
        self.grouped, self.compares = self.workers[0].reward.grouped, self.workers[0].reward.compares
        self.per_worker = per_worker or (1 if isinstance(models[0], RewardProcess) else 8)
        self.dropped: Counter[str] = Counter()  # unscored rows by reason
        self.num_retried = 0  # rows that were retried on another worker
        self._waiters: deque[asyncio.Future[None]] = deque()

    def _make_models(self, model: Any, num_workers: int | None) -> list[Any]:
        """Return one model per worker; start a process for each that is an import path."""
        models = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
        total = num_workers or len(models)
        if not models or len(models) not in (1, total):
            raise ValueError(f"num_workers is {total}, but there are {len(models)} models; pass 1 or {total}")
        if len(models) == 1:
            models *= total
        rewards = [
            RewardProcess(model, self.timeout) if isinstance(model, str) else model for model in models
        ]
        self._owned_models += [
            reward for reward, model in zip(rewards, models, strict=True) if isinstance(model, str)
        ]
        return rewards

    async def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[Reward | None]:
        """Return the rewards of the trajectories, in order. An unscored trajectory has None and is counted in
        `dropped`."""
        indices_by_group: dict[Any, list[int]] = {}
        for index, trajectory in enumerate(trajectories):
            indices_by_group.setdefault(trajectory.group if self.grouped else index, []).append(index)
        rewards: list[Reward | None] = [None] * len(trajectories)

        async def score_group(indices: list[int]) -> None:
            with suppress(Exception):  # rewards are user code; `group` has counted the failure
                results = await self.group([FinishedEpisode(trajectories[index]) for index in indices])
                for index, result in zip(indices, results, strict=True):
                    rewards[index] = result if isinstance(result, Reward) else None

        await asyncio.gather(*map(score_group, indices_by_group.values()))
        return rewards

    async def __call__(self, episode: Episode) -> Reward:
        """Return the reward; raise if the episode cannot be scored."""
        try:
            return await self._score_with_retries(lambda worker: worker.reward(episode))
        except Exception as error:
            self._count_dropped(error)
            raise

    async def compute(self, trajectory: Trajectory) -> Reward:
        """Return the reward of a finished episode; raise if it cannot be scored."""
        return await self(FinishedEpisode(trajectory))

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        if not self.grouped:
            return await score_independently(self, episodes)
        try:
            results = await self._score_with_retries(lambda worker: worker.reward.group(episodes))
        except Exception as error:
            self._count_dropped(error, len(episodes))
            raise
        for result in results:
            if isinstance(result, Exception):
                self._count_dropped(result)
        return results

    def _count_dropped(self, error: Exception, num_rows: int = 1) -> None:
        reason = f"judge: {error.kind}" if isinstance(error, JudgeFailure) else describe_failure(error)
        self.dropped[reason if len(self.dropped) < MAX_DROP_REASONS else "other"] += num_rows

    async def close(self) -> None:
        """Close the processes and judges that the pool has started; models that were passed in stay open."""
        for model in self._owned_models:
            await model.close()

    @property
    def metrics(self) -> dict[str, float]:
        metrics = {f"pool/worker_{worker.index}_done": float(worker.num_done) for worker in self.workers}
        metrics |= {f"pool/worker_{worker.index}_failed": float(worker.num_failed) for worker in self.workers}
        return metrics | {"pool/moved": float(self.num_retried), "pool/dropped": float(self.dropped.total())}

    async def _score_with_retries(self, score: Callable[[PoolWorker], Coroutine[Any, Any, T]]) -> T:
        errors: dict[PoolWorker, Exception] = {}
        # A single worker is retried once if its process died, because the next call starts a new process.
        excludes_worker = len(self.workers) > 1 or not isinstance(self.workers[0].reward, RewardProcess)
        while True:
            worker, breaker_ticket = await self._acquire_worker(errors)
            has_answered: bool | None = None  # None: cancelled, which says nothing about the worker
            error: Exception | None = None
            try:
                reward = await self._attempt(worker, score)
                has_answered = True
                worker.num_done += 1
                self.num_retried += bool(errors)
                return reward
            except Exception as worker_error:
                error = worker_error
                has_answered, should_retry = _classify_error(worker_error)
                if not should_retry:
                    raise
                if excludes_worker or not isinstance(worker_error, ConnectionError):
                    errors[worker] = worker_error
                excludes_worker = True
            finally:
                worker.num_running -= 1
                worker.num_failed += has_answered is False
                worker.breaker.record_outcome(breaker_ticket, has_answered)
                self._log_health(worker, has_answered, error)
                self._wake_waiter()

    def _log_health(self, worker: PoolWorker, has_answered: bool | None, error: Exception | None) -> None:
        """Log once that a worker is down, and once that it has recovered."""
        if worker.is_down and has_answered:
            worker.is_down = False
            log.warning("reward %s has recovered", worker.name)
        elif not worker.is_down and has_answered is False and worker.breaker.is_open and error is not None:
            worker.is_down = True
            log.warning(
                "reward %s is down and is skipped until it recovers: %s", worker.name, describe_failure(error)
            )

    async def _acquire_worker(self, failed_workers: dict[PoolWorker, Exception]) -> tuple[PoolWorker, int]:
        """Wait for a free worker that has not failed on this row. Reserve the one with the fewest running rows, and
        return it with its circuit breaker's token. Raise WorkersDown if there is none."""
        deadline = time.monotonic() + self.patience
        while True:
            candidates = [worker for worker in self.workers if worker not in failed_workers]
            if not candidates:
                last_error = next(reversed(failed_workers.values()))
                raise WorkersDown(
                    f"all {len(failed_workers)} reward workers failed; last error: {describe_failure(last_error)}"
                )
            available_workers = [worker for worker in candidates if not worker.breaker.is_open]
            free_workers = [worker for worker in available_workers if worker.num_running < self.per_worker]
            if free_workers:
                worker = min(free_workers, key=lambda candidate: (candidate.num_running, candidate.num_done))
                breaker_ticket = worker.breaker.admit_call()
                assert breaker_ticket is not None
                worker.num_running += 1
                return worker, breaker_ticket
            if available_workers:  # only busy
                deadline = time.monotonic() + self.patience
            elif time.monotonic() > deadline:
                raise WorkersDown(f"all reward workers have been down for {self.patience:g} s")
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait until a worker is released, or until it is time to check the workers that are down."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await asyncio.wait({waiter}, timeout=RECHECK_SECONDS)
        if not waiter.done():
            self._waiters.remove(waiter)

    def _wake_waiter(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _attempt(self, worker: PoolWorker, score: Callable[[PoolWorker], Coroutine[Any, Any, T]]) -> T:
        # A process enforces the timeout itself, from the time when it is ready.
        timeout = None if isinstance(worker.reward, RewardProcess) else self.timeout
        try:
            return await run_within(timeout, score(worker))
        except OutOfTime:
            raise TimeoutError(f"{worker.name} did not answer within {self.timeout:g} s") from None


def _classify_error(error: Exception) -> tuple[bool | None, bool]:
    """Return whether the worker is up (None: unknown), and whether to retry the row on another worker."""
    if isinstance(error, JudgeFailure):
        # A spent budget says nothing about the endpoint, and cached requests still succeed. An endpoint that rejects a
        # request is up.
        classification_by_kind = {"budget": (None, True), "unavailable": (False, True), "error": (True, True)}
        return classification_by_kind.get(error.kind, (True, False))
    is_row_fault = is_row_error(error)
    return is_row_fault, not is_row_fault
