"""Implementation of the `Policy` protocol with one learner in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from TrainingFactory.common.event_loop import OneThread
from TrainingFactory.learning.checkpoints import load_checkpoint, save_checkpoint
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.step import StepOptions, evaluate_rows, score_rows, train_step
from TrainingFactory.protocols import Algorithm
from TrainingFactory.types import Sample, Weights

CLOSE_TIMEOUT_SECONDS = 10.0


class WeightPublisher(Protocol):
    """Protocol of an object that writes weights for samplers in other processes; implemented in
    `learning/publishing.py`."""

    model_folder: str
    dtype: str
    adapter_rank: int | None

    def publish(self, version: int) -> Weights: ...
    def close(self) -> None: ...


class LocalPolicy:
    """Policy that trains a learner on one thread of this process, so that an update never blocks the event loop.
    Samplers in this process share the weights; others need a `publisher`. The published version counts training steps,
    even skipped ones. `before_step` gets the rows and the number of a step before its update, and returns further
    metrics."""

    def __init__(
        self, learner: Learner, algorithm: Algorithm, tokenizer: Any, options: StepOptions,
        publisher: WeightPublisher | None = None,
    ) -> None:  # fmt: skip
        self.publisher = publisher
        self.learner, self.algorithm = learner, algorithm
        self._tokenizer, self._options = tokenizer, options
        self.thread = OneThread("policy")
        self.before_step: Callable[[Sequence[Sample], int], Awaitable[dict[str, float]]] | None = None
        self._version = 0

    async def step(self, rows: Sequence[Sample], step: int) -> dict[str, float]:
        args = (self.learner, self.algorithm, rows, step, self._options)
        callback_metrics = {} if self.before_step is None else await self.before_step(rows, step)
        metrics = await self.thread.call(train_step, *args)
        self._version = step + 1
        return callback_metrics | metrics

    async def evaluate(self, rows: Sequence[Sample], step: int) -> dict[str, float]:
        args = (self.learner, self.algorithm, rows, step, self._options)
        return await self.thread.call(evaluate_rows, *args)

    async def score(self, rows: Sequence[Sample]) -> list[list[float]]:
        return await self.thread.call(score_rows, self.learner, rows, self._options)

    async def save(self, folder: str, state: dict[str, Any]) -> None:
        await self.thread.call(save_checkpoint, folder, self.learner, self._tokenizer, state)

    async def load(self, folder: str) -> dict[str, Any]:
        state = await self.thread.call(load_checkpoint, folder, self.learner)
        self._version = state["step"]
        return state

    async def publish(self) -> Weights:
        if self.publisher is None:
            return Weights(self._version)
        return await self.thread.call(self.publisher.publish, self._version)

    async def close(self) -> None:
        if self.publisher is not None:
            with suppress(TimeoutError):  # queued behind a running `publish`, which would recreate its folder
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await self.thread.call(self.publisher.close)
        self.thread.close()
