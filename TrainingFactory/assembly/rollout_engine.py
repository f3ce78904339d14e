"""A rollout engine for use outside of a run: it loads its own model and tools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from TrainingFactory.assembly.environment import find_environment
from TrainingFactory.assembly.fleet import await_engines, join_cluster
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.assembly.sampler import make_rollouts, make_sampler
from TrainingFactory.assembly.tools import as_list
from TrainingFactory.assembly.vision import with_vision
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import AnyReward
from TrainingFactory.resolve.factories import resolve_ids
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.tools.making import make_tool, make_tools_without_options
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Task, Trajectory

log = logging.getLogger(__name__)


class AsyncRolloutEngine:
    """Play an episode for every prompt, at most `num_workers` at a time: `await engine.rollout_batch(prompts)`.

    `model` is a name, by default the built-in model. `tools` are tools, functions or names of the catalog; by default
    all that need no options. `environment` is a name or class; by default a plain conversation. `reward` is any
    callable; without it only tasks with an answer are scored. Further `options` are sections of a config, such as
    `sampling={"max_tokens": 64}`. The first batch loads the model; `await engine.close()` releases it."""

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
            log.warning("No model is given: the untrained built-in model (%s) is used.", model)
        if tools is None:
            tools = make_tools_without_options() if environment is None else ()
        tools = [make_tool(tool) if isinstance(tool, str) else tool for tool in as_list(tools)]
        sampling = dict(options.pop("sampling", {})) | {"slots": num_workers}
        self.config = resolve_ids(TrainingConfig(model=model, sampling=sampling, **options))
        self._environment = find_environment(environment) if isinstance(environment, str) else environment
        self._tools = RunTools(self.config, tools, None)
        self._reward = reward
        self._open_lock = asyncio.Lock()
        self._exit_stack = AsyncExitStack()
        self._engine_and_sampler: tuple[RolloutEngine, Any] | None = None
        self._num_batches = 0

    async def rollout_batch(self, prompts: Sequence[str | Task]) -> list[Trajectory]:
        """Return one episode per prompt, in order. Prompts are texts or tasks."""
        async with self._open_lock:
            if self._engine_and_sampler is None:
                self._engine_and_sampler = await self._open_engine()
            engine, sampler = self._engine_and_sampler
            batch_index = self._num_batches
            self._num_batches += 1
        tasks = [
            prompt if isinstance(prompt, Task) else Task(f"prompt-{index}", prompt)
            for index, prompt in enumerate(prompts)
        ]
        groups = await engine.rollout_batch(tasks, sampler, step=batch_index)
        return [trajectory for [trajectory] in groups]

    async def close(self) -> None:
        """Close the model and the tools; a later batch opens them again."""
        self._engine_and_sampler = None
        await self._exit_stack.aclose()

    async def _open_engine(self) -> tuple[RolloutEngine, Any]:
        self._exit_stack.push_async_callback(self._tools.close)
        await join_cluster(self.config, self._exit_stack)
        environment = await self._tools.equip(self._environment or ToolEnvironment)
        config = with_vision(self.config, environment)
        chat, sampler = await in_thread(make_sampler, config, config.sampling.slots)
        self._exit_stack.push_async_callback(sampler.close)
        await await_engines(sampler)
        reward = None if self._reward is None else as_reward(self._reward)
        runtime = self._tools.runtime
        engine = make_rollouts(
            self.config, environment, chat, reward=reward, runtime=runtime, sampler=sampler
        )
        return engine, sampler
