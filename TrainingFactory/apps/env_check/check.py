"""Checks of an environment: rewards of a reference and of junk, determinism, reset, and concurrent episodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from typing import Any, Literal

from TrainingFactory.apps.env_check.players import MakePlayer, find_reference, make_junk_player, play, replay
from TrainingFactory.assembly.environment import make_environment
from TrainingFactory.common.event_loop import run
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.envs.process.environment import ProcessEnvironment
from TrainingFactory.types import Task, Trajectory

Status = Literal["passed", "failed", "skipped"]


@dataclass(slots=True)
class CheckResult:
    name: str
    status: Status
    detail: str


@dataclass(slots=True)
class EnvironmentReport:
    """Results of all checks of an environment. `figures` are its rewards, number of episodes and episodes per
    second."""

    environment: str
    checks: list[CheckResult] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(check.status == "failed" for check in self.checks)

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"failed": self.failed}

    def add(self, name: str, passed: bool, detail: str) -> None:
        self.checks.append(CheckResult(name, "passed" if passed else "failed", detail))


def check_environment(
    config: TrainingConfig, num_tasks: int = 4, num_episodes: int = 64, reference: str | None = None
) -> EnvironmentReport:
    """Check the environment that a config names."""
    if config.environment.command is not None:
        raise ValueError("an agent program is no environment; check its config with: tfactory doctor")
    environment: Any = make_environment(config)
    tasks = _load_tasks(config, environment, num_tasks)
    make_reference = find_reference(environment, tasks, reference)
    check = _EnvironmentCheck(environment, tasks, config.environment.max_turns, make_reference)
    report = EnvironmentReport(str(config.environment.environment_id))
    run(lambda: check.run(report, num_episodes))
    return report


def _load_tasks(config: TrainingConfig, environment: Any, num_tasks: int) -> list[Task]:
    if config.data.tasks is not None:
        tasks = load_tasks(config.data.tasks, count=num_tasks)
    else:
        tasks = list(islice(environment.tasks("train", config.training.seed, num_tasks), num_tasks))
    if not tasks:
        raise ValueError("the environment has no tasks; name some with data.tasks=FILE.jsonl")
    return tasks


class _EnvironmentCheck:
    def __init__(
        self, environment: Any, tasks: Sequence[Task], max_turns: int, make_reference: MakePlayer | None
    ) -> None:
        self._environment, self._tasks, self._max_turns = environment, tasks, max_turns
        self._make_reference = make_reference
        self._max_episodes: int | None = getattr(environment, "max_episodes", None)

    async def run(self, report: EnvironmentReport, num_episodes: int) -> None:
        environment = self._environment
        try:
            make_player = self._make_reference or make_junk_player
            episodes = await self._play(make_player)
            self._check_reference(report, episodes, await self._play(make_junk_player))
            replays = await self._play_concurrently([(episode.task, replay(episode)) for episode in episodes])
            self._check_replays(report, episodes, replays)
            await self._check_concurrent(report, make_player, num_episodes)
        finally:
            if isinstance(environment, type) and issubclass(environment, ProcessEnvironment):
                await environment.pool.close()

    async def _play(self, make_player: MakePlayer) -> list[Trajectory]:
        return [await play(self._environment, task, make_player, self._max_turns) for task in self._tasks]

    async def _play_concurrently(self, assignments: Sequence[tuple[Task, MakePlayer]]) -> list[Trajectory]:
        """Play episodes concurrently, up to the environment's limit."""
        semaphore = asyncio.Semaphore(self._max_episodes or len(assignments))

        async def play_one(task: Task, make_player: MakePlayer) -> Trajectory:
            async with semaphore:
                return await play(self._environment, task, make_player, self._max_turns)

        return await asyncio.gather(*(play_one(task, make_player) for task, make_player in assignments))

    def _check_reference(
        self, report: EnvironmentReport, episodes: list[Trajectory], junk_episodes: list[Trajectory]
    ) -> None:
        name = "the reference earns more than junk"
        junk_mean = _average_rewards(junk_episodes)
        if junk_mean is not None:
            report.figures["junk_reward"] = junk_mean
        if self._make_reference is None:
            detail = "no expert and no answers; name a function: --reference FILE.py:FUNCTION"
            report.checks.append(CheckResult(name, "skipped", detail))
            return
        mean = _average_rewards(episodes)
        if mean is None:
            report.add(name, False, f"the reference earns no reward: {_find_first_error(episodes)}")
            return
        report.figures["reference_reward"] = mean
        junk_text = "no reward" if junk_mean is None else f"{junk_mean:.4g}"
        report.add(name, junk_mean is None or mean > junk_mean, f"reference {mean:.4g}, junk {junk_text}")

    def _check_replays(
        self, report: EnvironmentReport, episodes: Sequence[Trajectory], replays: Sequence[Trajectory]
    ) -> None:
        """Check that `replays`, which repeats the messages of `episodes`, has the same rewards, first messages, tools
        and replies."""
        pairs = list(zip(episodes, replays, strict=True))
        count = len(pairs)
        task_ids = [a.task.id for a, b in pairs if _sum_reward(a) != _sum_reward(b)]
        detail = f"differs for {', '.join(task_ids)}" if task_ids else f"equal in {count} repeated episodes"
        if all(_sum_reward(episode) is None for episode in episodes):
            report.add("the reward is deterministic", False, f"no reward: {_find_first_error(episodes)}")
        else:
            report.add("the reward is deterministic", not task_ids, detail)
        task_ids = [a.task.id for a, b in pairs if (a.prompt, a.tools) != (b.prompt, b.tools)]
        detail = f"differs for {', '.join(task_ids)}" if task_ids else f"equal for {count} tasks"
        report.add("reset restores the initial state", not task_ids, f"first messages and tools: {detail}")
        task_ids = [
            a.task.id
            for a, b in pairs
            if [turn.replies for turn in a.turns] != [turn.replies for turn in b.turns]
        ]
        detail = f"differ for {', '.join(task_ids)}" if task_ids else f"equal in {count} repeated episodes"
        report.add("replies are deterministic", not task_ids, detail)

    async def _check_concurrent(self, report: EnvironmentReport, make_player: MakePlayer, count: int) -> None:
        start_time = time.perf_counter()
        assignments = [(task, make_player) for task in islice(cycle(self._tasks), count)]
        episodes = await self._play_concurrently(assignments)
        seconds = time.perf_counter() - start_time
        failed_episodes = [episode for episode in episodes if _sum_reward(episode) is None]
        report.figures |= {"episodes": float(count), "episodes_per_second": count / seconds}
        limit = self._max_episodes
        note = "" if limit is None or limit >= count else f" (the environment's limit: {limit} at a time)"
        detail = f"{count / seconds:.3g} episodes per second{note}"
        if failed_episodes:
            detail = f"{len(failed_episodes)} of {count} failed: {_find_first_error(failed_episodes)}"
        report.add(f"{count} episodes run concurrently", not failed_episodes, detail)


def _sum_reward(trajectory: Trajectory) -> float | None:
    reward = trajectory.reward
    return None if reward is None else reward.outcome + sum(reward.steps)


def _average_rewards(trajectories: Sequence[Trajectory]) -> float | None:
    totals = [total for total in map(_sum_reward, trajectories) if total is not None]
    return sum(totals) / len(totals) if totals else None


def _find_first_error(trajectories: Sequence[Trajectory]) -> str:
    return next((trajectory.error for trajectory in trajectories if trajectory.error), "no reason")
