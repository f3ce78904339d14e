"""A teacher plays an environment, and its good episodes become training rows. A folder holds everything:

teach.json       teacher and conditions; another teacher needs another folder
replies.sqlite   replies of the teacher, so that a repeated request costs nothing
spent.jsonl      tokens of every paid reply
episodes.jsonl   all episodes
rows.jsonl       training rows
report.json      counts, tokens and cost
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.assembly.datasets import write_rows
from TrainingFactory.assembly.endpoint_rollouts import EndpointSampler, TextFormat
from TrainingFactory.assembly.rewards import check_reward, name_scorer
from TrainingFactory.common.endpoints.budget import SpendingLog, Usage
from TrainingFactory.common.endpoints.names import EndpointSettings
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.convert import ConversionResult, Filters, convert
from TrainingFactory.data.datasets import DatasetRow, read_rows
from TrainingFactory.data.disk import write_atomically
from TrainingFactory.data.examples import read_recorded_episode
from TrainingFactory.data.ranking import sum_rewards
from TrainingFactory.data.trajectories import load_trajectories, save_trajectories
from TrainingFactory.evaluation.identity import make_conditions
from TrainingFactory.evaluation.records import digest_task
from TrainingFactory.evaluation.rollouts import Rollouts
from TrainingFactory.protocols import ChatFormat, Sampler
from TrainingFactory.rewards.adapt import as_group_reward
from TrainingFactory.types import Trajectory

REQUEST_FILE, REPLIES_FILE, SPENDING_FILE = "teach.json", "replies.sqlite", "spent.jsonl"
EPISODES_FILE, ROWS_FILE, REPORT_FILE = "episodes.jsonl", "rows.jsonl", "report.json"
FAILED_STATUSES = ("error", "tool_failure")  # played again by the next run
TeachForm = Literal["sft", "rft", "dpo"]
Notify = Callable[[str], None]


@dataclass(slots=True, frozen=True)
class Selection:
    """Selection of the episodes that become training rows. `rft` rows are `sft` rows without duplicates."""

    form: TeachForm = "sft"
    min_reward: float | None = None  # None: any reward above 0
    best: int | None = None  # episodes per task, highest reward first; None: all

    def convert(self, episodes_file: Path) -> ConversionResult:
        if self.form == "dpo":
            return convert(read_rows(episodes_file), "dpo", Filters())
        min_reward = math.nextafter(0.0, 1.0) if self.min_reward is None else self.min_reward
        filters = Filters(min_reward=min_reward, dedupe=self.form == "rft")
        return convert(self._select_best_rows(episodes_file), "sft", filters)

    def _select_best_rows(self, episodes_file: Path) -> Iterator[DatasetRow]:
        rows = list(read_rows(episodes_file))
        if self.best is None:
            yield from rows
            return
        rewards: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for index, row in enumerate(rows):
            trajectory = read_recorded_episode(row)
            if trajectory.reward is not None:
                rewards[trajectory.task.id].append((-sum_rewards(trajectory.reward), index))
        best_indices = {index for pairs in rewards.values() for _, index in sorted(pairs)[: self.best]}
        yield from (row for index, row in enumerate(rows) if index in best_indices)


class Teaching(Rollouts):
    """Rollouts of a teacher, saved in `folder`. A later run skips the episodes that an earlier run finished."""

    def __init__(
        self, config: TrainingConfig, settings: EndpointSettings, folder: Path, episodes: int, notify: Notify
    ) -> None:
        self.folder = folder = folder.expanduser()
        self.settings = replace(settings, cache=settings.cache or str(folder / REPLIES_FILE))
        self._spending_log = SpendingLog(folder / SPENDING_FILE)
        earlier_episodes = _load_earlier_episodes(folder)
        super().__init__(config, folder / EPISODES_FILE, episodes, notify=notify)
        save_trajectories(self._partial_file, earlier_episodes.values())  # which it has emptied
        self.scored_by = name_scorer(self.config, check_reward(self.config))
        self._check_same_request()
        keys = {(digest_task(task), member) for task in self.tasks for member in range(episodes)}
        self._ended_episodes = [episode for key, episode in earlier_episodes.items() if key in keys]
        # Episodes of other tasks, or of more episodes per task, stay in the file.
        self._other_episodes = [episode for key, episode in earlier_episodes.items() if key not in keys]
        if as_group_reward(check_reward(self.config)) is not None:  # scores whole groups
            self._ended_episodes = [
                episode for episode in self._ended_episodes if self._count_ended(episode.task.id) == episodes
            ]
        self.num_finished = len(self._ended_episodes)
        self.rounds = [[task for task in self.tasks if self._count_ended(task.id) < episodes]]
        save_trajectories(self._partial_file, [*self._other_episodes, *self._ended_episodes])

    def _count_ended(self, task_id: str) -> int:
        return sum(episode.task.id == task_id for episode in self._ended_episodes)

    def open_sampler(self) -> tuple[ChatFormat, Sampler]:
        return TextFormat(), EndpointSampler(self.settings, self.sum_usage(), self._spending_log.add)

    def sum_usage(self) -> Usage:
        """Return the total paid usage of all runs in this folder, at the current prices."""
        return self._spending_log.sum_usage(self.settings.budget)

    def _check_same_request(self) -> None:
        """Store the teacher and the conditions of its episodes; raise ValueError if the folder has episodes of another
        teacher or conditions."""
        conditions = make_conditions(self.config, (), 1).model_dump(exclude={"tasks", "count", "episodes"})
        request = {
            "teacher": self.settings.model,
            "endpoint": self.settings.make_endpoint().identity,
        } | conditions
        request = json.loads(json.dumps(request))
        request_file = self.folder / REQUEST_FILE
        if not request_file.is_file():
            write_atomically(
                request_file, json.dumps(request | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=2)
            )
            return
        stored_request = json.loads(request_file.read_text(encoding="utf-8"))
        if changed_keys := [key for key, value in request.items() if stored_request.get(key) != value]:
            descriptions = [key if key != "rest" else "environment, tools or reward" for key in changed_keys]
            raise ValueError(
                f"{self.folder} holds episodes of another request: {', '.join(descriptions)} "
                "differ. Choose another folder with --out, or repeat the first command"
            )

    def _save_episodes(self) -> None:
        super()._save_episodes()
        if self._other_episodes:
            save_trajectories(self.path, self._other_episodes, append=True)

    def write_rows(self, selection: Selection) -> ConversionResult:
        """Write the training rows of all finished episodes."""
        if not self.path.is_file():  # no episode has ended
            return ConversionResult()
        conversion = selection.convert(self.path)
        lineage = {"teacher": self.settings.model, "environment": self.config.environment.environment_id}
        lineage |= {"scored_by": self.scored_by, "form": selection.form}
        rows = [row | {"lineage": lineage | {"episode": row["id"]}} for row in conversion.rows]
        write_rows(self.folder / ROWS_FILE, rows, conversion.images)
        return conversion

    def write_report(self, conversion: ConversionResult, metrics: dict[str, float]) -> dict[str, Any]:
        usage, budget = self.sum_usage(), self.settings.budget
        report: dict[str, Any] = {
            "teacher": self.settings.model,
            "episodes": len(self._ended_episodes),
            "rows": len(conversion.rows),
            "requests": usage.requests,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "estimated": usage.estimated,
        }
        if budget.has_prices:
            report |= {
                "cost": usage.cost,
                "input_price": budget.input_price,
                "output_price": budget.output_price,
            }
            report |= {"cost_per_row": usage.cost / len(conversion.rows)} if conversion.rows else {}
        report |= {name: value for name, value in metrics.items() if name.startswith("judge/")}
        write_atomically(self.folder / REPORT_FILE, json.dumps(report, indent=2))
        return report


def _load_earlier_episodes(folder: Path) -> dict[tuple[str, int], Trajectory]:
    """Return the scored episodes of earlier runs, including killed ones, by (digest of the task, member)."""
    episodes: dict[tuple[str, int], Trajectory] = {}
    for path in (folder / EPISODES_FILE, folder / f"{EPISODES_FILE}.part"):
        for episode in load_trajectories(path, is_growing=True) if path.is_file() else ():
            if episode.status not in FAILED_STATUSES and episode.reward is not None:
                episodes[digest_task(episode.task), episode.member] = episode
    return episodes
