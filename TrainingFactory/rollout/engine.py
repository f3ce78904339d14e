"""Many episodes at once. None waits for another: while one episode's tools run, the others are sampled."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

from TrainingFactory.protocols import ChatFormat, Environment, RewardFunction, Sampler
from TrainingFactory.rollout.episode import EpisodeRules, EpisodeRun
from TrainingFactory.rollout.seeds import turn_seed
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.tape import EpisodeKey
from TrainingFactory.types import SamplingParams, Task, Trajectory


class AsyncRolloutEngine:
    """`environment` makes an environment for a task; an environment class is such a thing.

    Without `reward` the environment's own is used. `on_episode` is told of every episode as it ends.
    `max_concurrency` episodes run at a time; an episode's clock (`episode_timeout`) starts when it is let in,
    so with more episodes than the sampler has slots, set it to the number of slots. `runtime` is what the tools of
    all episodes share: limits, a cache, a recording, figures.
    """

    def __init__(
        self,
        environment: Callable[[Task], Environment],
        chat: ChatFormat,
        params: SamplingParams,
        *,
        reward: RewardFunction | None = None,
        max_turns: int = 8,
        episode_timeout: float = 300.0,
        max_reply_tokens: int = 1024,
        max_concurrency: int | None = None,
        seed: int = 0,
        on_episode: Callable[[Trajectory], None] | None = None,
        runtime: ToolRuntime | None = None,
    ) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(
                f"max_concurrency is {max_concurrency}; it must be 1 or more, or None for no limit"
            )
        params = dataclasses.replace(params, stop_ids=params.stop_ids or chat.stop_ids)
        self.rules = EpisodeRules(
            environment, chat, params, reward, max_turns, episode_timeout, max_reply_tokens, runtime
        )
        self.max_concurrency = max_concurrency
        self.seed = seed
        self.on_episode = on_episode

    async def rollout_batch(
        self,
        tasks: Sequence[Task],
        sampler: Sampler,
        group_size: int = 1,
        step: int = 0,
        recorded_as: str | None = None,
    ) -> list[list[Trajectory]]:
        """`group_size` episodes of each task, with their rewards: one list per task, members in order.

        Random numbers are keyed by `step`, and so are the tool calls in a recording unless they are
        `recorded_as` something else: evaluations that use the same random numbers are told apart by it."""
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; it must be 1 or more")
        runs = self._open(tasks, sampler, group_size, step, step if recorded_as is None else recorded_as)
        gate = asyncio.Semaphore(self.max_concurrency or len(runs) or 1)
        episodes = [asyncio.create_task(self._run(run, gate)) for run in runs]
        for run, episode in zip(runs, episodes, strict=True):
            # A callback, because a task that is cancelled before it starts runs no `finally`.
            episode.add_done_callback(functools.partial(_close_session, run))
        try:
            trajectories = await asyncio.gather(*episodes)
        except BaseException:
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)
            raise
        return [trajectories[start : start + group_size] for start in range(0, len(trajectories), group_size)]

    def rollout(
        self,
        tasks: Sequence[Task],
        sampler: Sampler,
        group_size: int = 1,
        step: int = 0,
        recorded_as: str | None = None,
    ) -> list[list[Trajectory]]:
        """`rollout_batch` for callers without an event loop."""
        groups: list[list[Trajectory]] = []

        async def fill() -> None:
            # Not returned: asyncio.run makes a text of its task, and with it of a batch of trajectories.
            groups.extend(await self.rollout_batch(tasks, sampler, group_size, step, recorded_as))

        asyncio.run(fill())
        return groups

    async def _run(self, run: EpisodeRun, gate: asyncio.Semaphore) -> Trajectory:
        async with gate:
            trajectory = await run.run()
        if self.rules.runtime is not None and self.rules.runtime.tape is not None:
            self.rules.runtime.tape.check()  # a replay that has left its recording ends all episodes
        if self.on_episode is not None:
            self.on_episode(trajectory)
        return trajectory

    def _open(
        self, tasks: Sequence[Task], sampler: Sampler, group_size: int, step: int, recorded_as: int | str
    ) -> list[EpisodeRun]:
        """All sessions, in (task, member) order and before anything is awaited: which one an episode gets
        must not depend on how long others take."""
        runs: list[EpisodeRun] = []
        seen: Counter[str] = Counter()
        try:
            for task in tasks:
                seen[task.id] += 1
                # A task may come twice in a batch: its second group has its own name and its own seeds.
                name = task.id if seen[task.id] == 1 else f"{task.id}#{seen[task.id]}"
                for member in range(group_size):
                    trajectory = Trajectory(task, group=f"{step}/{name}", member=member)
                    seed_of = functools.partial(turn_seed, self.seed, step, name, member)
                    key = EpisodeKey(recorded_as, name, member)
                    runs.append(
                        EpisodeRun(
                            self.rules, trajectory, sampler.session(), sampler.max_length, seed_of, key
                        )
                    )
        except BaseException:
            for run in runs:
                run.session.close()
            raise
        return runs


def _close_session(run: EpisodeRun, _: asyncio.Task[Trajectory]) -> None:
    run.session.close()
