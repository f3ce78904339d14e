"""Tools and episodes that run at the same time, for whoever needs no more than that: `tools/executor.py` and
`rollout/engine.py` with a model, tools and limits of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from TrainingFactory.assembly.environment import environment_named
from TrainingFactory.assembly.fleet import await_engines, join_cluster
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.assembly.sampler import make_rollouts, make_sampler
from TrainingFactory.assembly.tools import listed
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import AnyReward
from TrainingFactory.resolve.factories import by_file
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.tools.making import make_tool, tools_without_options
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Task, Trajectory

log = logging.getLogger(__name__)


class AsyncRolloutEngine:
    """Plays an episode for every prompt, at most `num_workers` at once: `await engine.rollout_batch(prompts)`.

    `model` is a name (the built-in one if none is given), `tools` are tools, functions or names of the catalog (those
    that need no options if none are given), `environment` a name or class for more than a conversation, `reward` any
    callable, without which only tasks with an answer are scored. Further `options` are sections of a config, such as
    `sampling={"max_tokens": 64}`. The model is loaded by the first batch; `await engine.close()` gives it back."""

    def __init__(
        self,
        num_workers: int = 8,
        *,
        model: str | None = None,
        tools: Any = None,
        environment: Any = None,
        reward: AnyReward | None = None,
        **options: Any,
    ) -> None:
        if model is None:
            model = "builtin:tiny"
            log.warning("no model is given: the built-in one is taken (%s), which is not trained", model)
        if tools is None:
            tools = tools_without_options() if environment is None else ()
        tools = [make_tool(each) if isinstance(each, str) else each for each in listed(tools)]
        slots = dict(options.pop("sampling", {})) | {"slots": num_workers}
        self.config = by_file(TrainingConfig(model=model, sampling=slots, **options))
        self._environment = environment_named(environment) if isinstance(environment, str) else environment
        self._tools, self._reward = RunTools(self.config, tools, None), reward
        self._opening, self._held = asyncio.Lock(), AsyncExitStack()
        self._made: tuple[RolloutEngine, Any] | None = None
        self._batches = 0

    async def rollout_batch(self, prompts: Sequence[str | Task]) -> list[Trajectory]:
        """Return the episodes in the order of the prompts, which are texts or tasks."""
        async with self._opening:
            engine, sampler = self._made = self._made or await self._open()
            batch, self._batches = self._batches, self._batches + 1
        tasks = [
            each if isinstance(each, Task) else Task(f"prompt-{number}", each)
            for number, each in enumerate(prompts)
        ]
        groups = await engine.rollout_batch(tasks, sampler, step=batch)
        return [trajectory for [trajectory] in groups]

    async def close(self) -> None:
        """Close the model and the tools; a later batch opens them again."""
        self._made = None
        await self._held.aclose()

    async def _open(self) -> tuple[RolloutEngine, Any]:
        self._held.push_async_callback(self._tools.close)
        await join_cluster(self.config, self._held)
        environment = await self._tools.equip(self._environment or ToolEnvironment)
        chat, sampler = await in_thread(make_sampler, self.config, self.config.sampling.slots)
        self._held.push_async_callback(sampler.close)
        await await_engines(sampler)
        reward = None if self._reward is None else as_reward(self._reward)
        given = {"reward": reward, "runtime": self._tools.runtime, "sampler": sampler}
        return make_rollouts(self.config, environment, chat, **given), sampler
