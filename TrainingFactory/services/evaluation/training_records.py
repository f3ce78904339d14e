"""The records that a run writes of its own evaluations on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from TrainingFactory.config import TrainingConfig
from TrainingFactory.services.evaluation.identity import conditions, identity
from TrainingFactory.services.evaluation.records import append_record, make_record
from TrainingFactory.services.runs.folder import EVALUATIONS, RunFolder
from TrainingFactory.types import Task, Trajectory

PYTHON = "a reward from Python"


@dataclass(slots=True)
class TrainingRecords:
    """`given` are the kinds of Python objects in place of what the config names: they have no digest, so that records
    of other runs are never taken for evaluations under the same conditions."""

    config: TrainingConfig
    run: RunFolder
    tasks: Sequence[Task]
    scored_by: str
    given: Sequence[str] = ()

    def write(self, step: int, played: Sequence[Trajectory], metrics: dict[str, float]) -> None:
        """Append what the run's model did after so many steps."""
        config, run = self.config, self.run
        own = [*self.given, run.about.get("id")] if self.given else []
        record = make_record(
            played,
            identity(config.model, f"{run.name}@step-{step}", run, step, saved=False),
            conditions(config, self.tasks, 1, own),
            metrics,
            by="training",
            scored_by=PYTHON if "reward" in self.given else self.scored_by,
        )
        append_record(run.path / EVALUATIONS, record)
