"""Rewards from a pool of workers: judges, reward models, or any callable.

```python
pool = DistributedRewardModel(model="Qwen/QwQ-32B", base_url=["http://a:8000/v1", "http://b:8000/v1"], api_key_env=None)
pool = DistributedRewardModel(model="rewards.py:score", num_workers=4)  # in processes
pool = DistributedRewardModel(model=[judge_on_host_a, judge_on_host_b])
rewards = await pool.compute_rewards(trajectories)  # None where there is no reward; pool.dropped says why
```
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from TrainingFactory.endpoint import Endpoint
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import Adapted, BrokeOff, as_reward, one_by_one
from TrainingFactory.rewards.judge.base import Judge
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.judge.pool import judges_at
from TrainingFactory.rewards.targets import load_target
from TrainingFactory.rewards.workers.processes import ROWS_OWN, FinishedEpisode, RewardProcess
from TrainingFactory.tools.limits import CircuitBreaker
from TrainingFactory.tools.waiting import OutOfTime, SelfCancelled, within
from TrainingFactory.types import Reward, Trajectory
from TrainingFactory.user_code import failure

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_REASONS = 100  # told apart
LOOK_AGAIN = 0.1  # seconds between looks at workers that are down


@runtime_checkable
class Checked(Protocol):
    """A model may have this: it raises where the model is out of reach."""

    async def check(self) -> None: ...


class WorkersDown(Exception):
    """No worker could score it."""


@dataclass(slots=True, eq=False)
class Worker:
    number: int
    model: Any  # as it was handed in
    reward: Adapted
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(failures=2, pause=0.5))
    suspect: bool = False  # its last call failed
    down: bool = False  # and a user knows it
    running: int = 0
    done: int = 0
    failed: int = 0

    @property
    def name(self) -> str:
        """With the address of a judge: that is what a user can look after."""
        model = self.model.client.model if isinstance(self.model, Judge) else None
        return f"worker {self.number}" + (f" at {model.url}" if isinstance(model, Endpoint) else "")


class DistributedRewardModel:
    """`model`: one reward for all workers, or a list with one for each. What is not async runs in threads. A text such
    as `rewards.py:score` or `package.module:function` runs in a process for each worker, one call at a time, and a call
    that takes longer than `timeout` ends its process. With `base_url`, one address or several, the text is the name of
    a model that judges there; `judge_options` are those of `model_judge`, and a budget among them is for all together.

    Every row goes to the worker with the fewest under way, at most `per_worker` each; what a worker fails at goes to
    another, and one that fails twice running is left alone until a check, or a row, succeeds there. A row whose own
    content is the trouble (an unreadable verdict, a ValueError) is not tried again. Rewards of whole groups (rankings)
    take a group for a row.

    `timeout` is for one attempt; a row waits at most `patience` seconds while all workers are down."""

    def __init__(
        self,
        model: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
        num_workers: int | None = None,
        *,
        base_url: str | Sequence[str] | None = None,
        per_worker: int | None = None,  # 8, or 1 for processes
        timeout: float = 300.0,
        patience: float = 10.0,
        **judge_options: Any,
    ) -> None:
        if num_workers is not None and (
            isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1
        ):
            raise ValueError(f"num_workers is {num_workers!r}; it must be a whole number, 1 or more")
        for name, value in (("per_worker", per_worker), ("timeout", timeout)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value!r}; it must be over 0")
        if judge_options and base_url is None:
            raise ValueError(
                f"{', '.join(judge_options)}: these are options of a model that judges, which needs base_url"
            )
        self._held = ExitStack()  # what was opened here
        try:
            models = self._models(model, num_workers, base_url, timeout, judge_options)
            self.workers = [
                Worker(number, one, one.like if isinstance(one, RewardProcess) else as_reward(one))
                for number, one in enumerate(models)
            ]
        except BaseException:
            self._held.close()
            raise
        in_processes = isinstance(models[0], RewardProcess)
        self.grouped, self.compares = self.workers[0].reward.grouped, self.workers[0].reward.compares
        if any(worker.reward.grouped != self.grouped for worker in self.workers):
            raise ValueError("some of the models score whole groups and some single episodes; give one kind")
        self.per_worker, self.timeout, self.patience = (
            per_worker or (1 if in_processes else 8),
            timeout,
            patience,
        )
        self.dropped: Counter[str] = Counter()  # reasons, since the beginning
        self.moved = 0  # rows that another worker had to take
        self._waiting: deque[asyncio.Future[None]] = deque()

    def _models(
        self,
        model: Any,
        num_workers: int | None,
        base_url: str | Sequence[str] | None,
        timeout: float,
        judge_options: dict[str, Any],
    ) -> list[Any]:
        """One for each worker."""
        if base_url is not None:
            judges = judges_at(base_url, {"model": model} | judge_options, num_workers)
            for judge in dict.fromkeys(judges):
                self._held.callback(lambda judge=judge: asyncio.run(judge.close()))
            return judges
        given = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
        count = num_workers if num_workers is not None else len(given)
        if not given or not all(isinstance(each, str) or callable(each) for each in given):
            raise ValueError(
                f"model must be a reward (a callable that takes an episode, or a text that names one), or a list of "
                f"such, not {model!r:.60}; num_workers is their number"
            )
        if len(given) not in (1, count):
            raise ValueError(
                f"num_workers is {count}, but there are {len(given)} models: give one, or one for each"
            )
        known = {each: load_target(each) for each in given if isinstance(each, str)}
        made: list[Any] = []
        for one in given * count if len(given) == 1 else given:
            if isinstance(one, str):
                one = RewardProcess(one, timeout, like=known[one])
                self._held.callback(one.close)
            made.append(one)
        return made

    async def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[Reward | None]:
        """In order. None: could not be scored, which is counted in `dropped`. Where whole groups are scored, those with
        the same `group` belong together."""
        together: dict[Any, list[int]] = {}
        for number, trajectory in enumerate(trajectories):
            together.setdefault(trajectory.group if self.grouped else number, []).append(number)
        found: list[Reward | None] = [None] * len(trajectories)

        async def one(numbers: list[int]) -> None:
            episodes = [FinishedEpisode(trajectories[number]) for number in numbers]
            try:
                rewards = await self.group(episodes) if self.grouped else [await self(episodes[0])]
            except Exception:  # rewards are foreign code; counted where it came up
                return
            for number, reward in zip(numbers, rewards, strict=True):
                found[number] = reward if isinstance(reward, Reward) else None

        await asyncio.gather(*map(one, together.values()))
        return found

    async def __call__(self, episode: Episode) -> Reward:
        """As a reward of its own: raises where there is none."""
        try:
            return await self._scored(lambda worker: _model(worker)(episode))
        except Exception as error:
            self._drop(error)
            raise

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        if not self.grouped:
            return await one_by_one(self, episodes)
        try:
            found = await self._scored(lambda worker: _model(worker).group(episodes))
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

    def close(self) -> None:
        """Ends what it has started itself: processes, judges. What was handed in stays open."""
        self._held.close()

    async def health(self) -> list[bool]:
        """Which workers answer now. Those whose model has a `check` are asked; of others the last calls speak."""
        return list(await asyncio.gather(*(self._healthy(worker) for worker in self.workers)))

    @property
    def figures(self) -> dict[str, float]:
        found = {f"pool/worker_{each.number}_done": float(each.done) for each in self.workers}
        found |= {f"pool/worker_{each.number}_failed": float(each.failed) for each in self.workers}
        return found | {"pool/moved": float(self.moved), "pool/dropped": float(self.dropped.total())}

    async def _scored(self, score: Callable[[Worker], Awaitable[T]]) -> T:
        tried: dict[Worker, Exception] = {}
        while True:
            worker, ticket = await self._place(tried)
            answered: bool | None = True
            try:
                reward = await self._run(worker, score)
            except BrokeOff as error:
                answered = False
                tried[worker] = error
            except ROWS_OWN:
                raise
            except JudgeFailure as failure:
                # A budget that is spent says nothing about the endpoint, and what is in the cache is still answered;
                # one that refuses a request is not down either.
                answered = None if failure.kind == "budget" else failure.kind != "unavailable"
                if answered and failure.kind != "error":
                    raise
                tried[worker] = failure
            except asyncio.CancelledError:
                answered = None
                raise
            except Exception as error:
                answered = False
                tried[worker] = error
            else:
                worker.done += 1
                self.moved += bool(tried)
                return reward
            finally:
                worker.breaker.ended(ticket, answered)
                worker.failed += answered is False
                worker.suspect = worker.suspect if answered is None else not answered
                worker.running -= 1
                self._tell(worker, answered, tried.get(worker))
                self._wake()

    def _tell(self, worker: Worker, answered: bool | None, error: Exception | None) -> None:
        """Says once that a worker is down, and once that it is back."""
        if worker.down and answered:
            worker.down = False
            log.warning("%s of the reward is back", worker.name)
        elif not worker.down and answered is False and worker.breaker.is_open and error is not None:
            worker.down = True
            log.warning(
                "%s of the reward is down, and left alone until it is back: %s", worker.name, failure(error)
            )

    async def _place(self, tried: dict[Worker, Exception]) -> tuple[Worker, int]:
        """The free worker with the fewest rows under way, among those that have not failed at this one."""
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
        """Until a place is free, or it is time to look at those that were down."""
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

    async def _run(self, worker: Worker, score: Callable[[Worker], Awaitable[T]]) -> T:
        # A process has a limit of its own, which starts when it is ready.
        limit = None if isinstance(worker.model, RewardProcess) else self.timeout

        async def run() -> T:
            return await score(worker)

        try:
            if worker.suspect and (check := _check_of(worker)) is not None:
                await within(self.timeout, check())
            return await within(limit, run())
        except OutOfTime:
            raise TimeoutError(f"worker {worker.number} did not answer within {self.timeout:g} s") from None
        except SelfCancelled:
            raise ConnectionError(f"worker {worker.number} cancelled the call") from None

    async def _healthy(self, worker: Worker) -> bool:
        if (check := _check_of(worker)) is None:
            return not worker.breaker.is_open
        try:
            await within(self.timeout, check())
        except (Exception, OutOfTime, SelfCancelled):  # foreign code
            return False
        return True


def _check_of(worker: Worker) -> Callable[[], Coroutine[Any, Any, None]] | None:
    model: Any = worker.model
    return model.check if isinstance(model, Checked) else None


def _model(worker: Worker) -> Adapted | RewardProcess:
    return worker.model if isinstance(worker.model, RewardProcess) else worker.reward
