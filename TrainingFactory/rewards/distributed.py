"""Rewards from a pool of workers: judges, reward models, or any callable.

```python
pool = DistributedRewardModel(model=[judge_on_host_a, judge_on_host_b], num_workers=2)
rewards = await pool.compute_rewards(trajectories)  # None where there is no reward; pool.dropped says why
```
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.judge_endpoints import JudgeFailure
from TrainingFactory.rewards.processes import FinishedEpisode, ProcessReward, checked_reward
from TrainingFactory.tools.limits import CircuitBreaker
from TrainingFactory.tools.texts import describe
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.tools.waiting import OutOfTime, SelfCancelled, within
from TrainingFactory.types import Reward, ToolFailure, Trajectory

MAX_REASONS = 100  # told apart
LOOK_AGAIN = 0.1  # seconds between looks at workers that are down
DOWN = ("unavailable", "budget")  # failures of a judge that are the worker's; a row's own are the others


@runtime_checkable
class Checked(Protocol):
    """A model may have this: it raises where the model is out of reach."""

    async def check(self) -> None: ...


class WorkersDown(Exception):
    """No worker could score it."""


@dataclass(slots=True, eq=False)
class Worker:
    number: int
    model: Callable[[Episode], Any]
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(failures=2, pause=0.5))
    suspect: bool = False  # its last call failed
    running: int = 0
    done: int = 0
    failed: int = 0


class DistributedRewardModel:
    """`model`: one reward for all workers, or a list with one for each (several endpoints). What is not async runs in
    threads. A text such as `package.module:function` runs in a process for each worker, one row at a time.

    Every row goes to the worker with the fewest under way, at most `per_worker` each; what a worker fails at goes to
    another, and one that fails twice running is left alone until a check, or a row, succeeds there. A row whose own
    content is the trouble (an unreadable verdict, a ValueError) is not tried again.

    `timeout` is for one attempt; a row waits at most `patience` seconds while all workers are down."""

    def __init__(
        self,
        model: str | Callable[[Episode], Any] | Sequence[str | Callable[[Episode], Any]],
        num_workers: int | None = None,
        *,
        per_worker: int | None = None,  # 8, or 1 for processes
        timeout: float = 300.0,
        patience: float = 10.0,
    ) -> None:
        given = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
        count = num_workers if num_workers is not None else len(given)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"num_workers is {num_workers!r}; it must be a whole number, 1 or more")
        if not given or not all(isinstance(each, str) or callable(each) for each in given):
            raise ValueError("model must be a reward (a callable that takes an episode), or a list of such")
        if len(given) not in (1, count):
            raise ValueError(
                f"num_workers is {count}, but there are {len(given)} models: give one, or one for each"
            )
        if per_worker is None:
            per_worker = 1 if isinstance(given[0], str) else 8
        for name, value in (("per_worker", per_worker), ("timeout", timeout)):
            if value <= 0:
                raise ValueError(f"{name} is {value!r}; it must be over 0")
        each = given * count if len(given) == 1 else given
        self.workers = [
            Worker(number, ProcessReward(one, timeout) if isinstance(one, str) else one)
            for number, one in enumerate(each)
        ]
        self.per_worker, self.timeout, self.patience = per_worker, timeout, patience
        self.dropped: Counter[str] = Counter()  # reasons, since the beginning
        self.moved = 0  # rows that another worker had to take
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[Reward | None]:
        """In order. None: could not be scored, which is counted in `dropped`."""

        async def one(trajectory: Trajectory) -> Reward | None:
            try:
                return await self(FinishedEpisode(trajectory))
            except Exception:  # rewards are foreign code; counted where it came up
                return None

        return list(await asyncio.gather(*(one(each) for each in trajectories)))

    async def __call__(self, episode: Episode) -> Reward:
        """As a reward of its own: raises where there is none."""
        try:
            return await self._scored(episode)
        except Exception as error:
            reason = f"judge: {error.kind}" if isinstance(error, JudgeFailure) else describe(error)
            self.dropped[reason if len(self.dropped) < MAX_REASONS else "other"] += 1
            raise

    def close(self) -> None:
        """Ends the processes that it has started. What was handed in stays open."""
        for worker in self.workers:
            if isinstance(worker.model, ProcessReward):
                worker.model.close()

    async def health(self) -> list[bool]:
        """Which workers answer now. Those whose model has a `check` are asked; of others the last calls speak."""
        return list(await asyncio.gather(*(self._healthy(worker) for worker in self.workers)))

    @property
    def figures(self) -> dict[str, float]:
        found = {f"pool/worker_{each.number}_done": float(each.done) for each in self.workers}
        found |= {f"pool/worker_{each.number}_failed": float(each.failed) for each in self.workers}
        return found | {"pool/moved": float(self.moved), "pool/dropped": float(self.dropped.total())}

    async def _scored(self, episode: Episode) -> Reward:
        tried: dict[Worker, Exception] = {}
        while True:
            worker, ticket = await self._place(tried)
            answered: bool | None = True
            try:
                reward = await self._run(worker, episode)
            except (ValueError, TypeError, ToolFailure):
                raise
            except JudgeFailure as failure:
                answered = failure.kind not in DOWN
                if answered and failure.kind != "error":  # an endpoint that refuses a request is not down
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
                self._wake()

    async def _place(self, tried: dict[Worker, Exception]) -> tuple[Worker, int]:
        """The free worker with the fewest rows under way, among those that have not failed at this one."""
        until = time.monotonic() + self.patience
        while True:
            left = [worker for worker in self.workers if worker not in tried]
            if not left:
                last = next(reversed(tried.values()))
                raise WorkersDown(f"none of {len(tried)} workers could score it; the last: {describe(last)}")
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

    async def _run(self, worker: Worker, episode: Episode) -> Reward:
        try:
            if worker.suspect and (check := _check_of(worker)) is not None:
                await within(self.timeout, check())
            return await within(self.timeout, _called(worker.model, episode))
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


async def _called(model: Callable[[Episode], Any], episode: Episode) -> Reward:
    function = model if inspect.isroutine(model) else type(model).__call__
    try:
        on_loop = inspect.iscoroutinefunction(function)
        value = model(episode) if on_loop else await in_thread(model, episode)
        if inspect.isawaitable(value):
            value = await value
    except SystemExit as error:
        raise RuntimeError("it tried to end the program") from error
    return checked_reward(value)
