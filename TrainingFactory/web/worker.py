"""The jobs that need a model, in a child process of the page: `pool.py` asks, and `answer` does what is asked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from TrainingFactory.config.problems import ConfigError
from TrainingFactory.types import Trajectory
from TrainingFactory.web.form import Draft, read

Tell = Callable[[Any], None]
# job -> the function that does it: it takes what is given and a function that tells the page something on the way,
# and returns JSON.
JOBS = {
    "credit": "TrainingFactory.web.worker:credit",
    "doctor": "TrainingFactory.web.worker:doctor",
    "promote": "TrainingFactory.web.worker:promote",
    "sample": "TrainingFactory.web.worker:sample",
}


def answer(asked: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Do a job; what is a user's mistake is told in its own words."""
    module, _, name = JOBS[asked["job"]].partition(":")
    try:
        return {"ok": getattr(import_module(module), name)(asked["given"], tell)}
    except ConfigError as error:
        return {"wrong": {"message": str(error), "param": ".".join(map(str, error.problems[0].key)) or None}}
    except (ValueError, OSError) as error:
        return {"wrong": {"message": str(error), "param": None}}


class Telling:
    """Watches a run, and tells the page."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def phase(self, name: str) -> None:
        self.say(f"{name} ...")

    def episode(self, trajectory: Trajectory) -> None:
        self.say(f"an episode of task {trajectory.task.id} has ended: {trajectory.status}")

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None: ...

    def say(self, text: str) -> None:
        self._tell({"text": text})


def doctor(given: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Examine a config as `tfactory doctor` does."""
    from TrainingFactory.services.doctor.examination import examine

    found = examine(read(Draft(yaml=given["yaml"])), Telling(tell)).as_json
    return {"findings": found["findings"], "rows": list(found["facts"].items())}


def promote(given: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Promote a version if it holds the gate of a suite."""
    from TrainingFactory.services.evaluation.promotion import Promotion
    from TrainingFactory.services.model_registry import ModelRegistry

    watch, runs = Telling(tell), given["runs"]
    made = Promotion(
        ModelRegistry(None, runs), given["version"], given["alias"], given["suite"], given["first"], (), runs, watch.say
    )  # fmt: skip
    for line in made.stated:
        watch.say(f"the gate: {line}")

    def play(name: str, evaluation: Any) -> None:
        played = 0

        def ended(trajectory: Trajectory) -> None:
            nonlocal played
            played += 1
            tell({"text": f"{name} plays {evaluation.asked.entry}", "done": played, "of": evaluation.total})

        evaluation.run(ended)

    decision = made.run(play)
    checks = [{"name": each.name, "holds": each.holds, "found": each.found} for each in decision.checks]
    return {"promoted": decision.promoted, "text": decision.text, "checks": checks}


def sample(given: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Play two episodes of a config, and keep nothing of them."""
    from TrainingFactory.services.evaluation.rollouts import Rollouts
    from TrainingFactory.services.views.episodes import episode_view

    config = read(Draft(yaml=given["yaml"]))
    config = config.model_copy(update={"data": config.data.model_copy(update={"count": 2})})
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tfactory-sample-") as folder:
        rollouts = Rollouts(config, Path(folder) / "episodes.jsonl", say=notes.append)
        rollouts.run(Telling(tell).episode)
        lines = rollouts.path.read_bytes().splitlines()
    views = [episode_view(number, line) for number, line in enumerate(lines, 1)]
    return {"episodes": [each.model_dump(mode="json") for each in views], "notes": notes}


def credit(given: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the members of a group with the credit of their tokens."""

    raise NotImplementedError
