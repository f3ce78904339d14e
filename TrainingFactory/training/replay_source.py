"""Replay of an asynchronously sampled run from its recorded episodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby, islice

from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.protocols import Algorithm
from TrainingFactory.runs.folder import CONSUMED, TRAJECTORIES, RunFolder
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.training.filters import EpisodeFilters, find_dropped_problem
from TrainingFactory.training.source import StepGroups, compute_metrics, find_unscored_problem
from TrainingFactory.types import Group, Trajectory


class RecordedSource:
    """Reads the groups of a recorded run in the order in which the run trained them. It samples nothing and calls no
    tools. `first_step` is the step to start with, `steps` the number of recorded steps."""

    def __init__(
        self,
        run: RunFolder,
        algorithm: Algorithm,
        max_unscored: float,
        first_step: int = 0,
        filters: EpisodeFilters | None = None,
    ) -> None:
        self._run, self._algorithm, self._max_unscored = run, algorithm, max_unscored
        self._filters = filters or EpisodeFilters({})
        if not (run.path / TRAJECTORIES).is_file():
            raise ValueError(
                f"Cannot replay run {run.name}: it was sampled with optimization.async_rollout and has no recorded "
                "episodes (logging.save_trajectories=false)"
            )
        self._ledger_rows = run.read_ledger()
        self.steps = len(self._ledger_rows)
        self._groups = self._read_groups()
        num_skipped = sum(len(row["groups"]) for row in self._ledger_rows[:first_step])
        next(islice(self._groups, num_skipped, num_skipped), None)

    async def take(self, step: int) -> StepGroups:
        start_time = time.perf_counter()
        groups = await in_thread(self._take_groups, step)
        seconds = time.perf_counter() - start_time
        metrics = compute_metrics(groups, seconds, None)
        problem = find_unscored_problem(groups, self._max_unscored) or find_dropped_problem(groups)
        return StepGroups(step, groups, seconds, metrics, problem, is_sampled=True)

    async def close(self) -> None: ...

    def _take_groups(self, step: int) -> list[Group]:
        slots = self._ledger_rows[step]["groups"]
        groups = list(islice(self._groups, len(slots)))
        task_ids = [group[0].task.id for group in groups]
        if task_ids != self._ledger_rows[step]["tasks"]:
            text = f"{self._run.path / TRAJECTORIES} and {CONSUMED} differ"
            raise ValueError(f"{text} in step {step + 1}: {task_ids} and {self._ledger_rows[step]['tasks']}")
        return self._filters.make_groups(groups, self._algorithm, slots)

    def _read_groups(self) -> Iterator[list[Trajectory]]:
        episodes = load_trajectories(self._run.path / TRAJECTORIES, is_growing=True)
        yield from (list(group) for _, group in groupby(episodes, key=lambda episode: episode.group))
