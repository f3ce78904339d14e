"""The jobs that need a model, in a child process of the page: `pool.py` asks, and `answer` does what is asked."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from TrainingFactory.apps.views.index import EpisodeIndex
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.runs.tracking import PlainLines
from TrainingFactory.types import Trajectory
from TrainingFactory.web.form import Draft, read

Tell = Callable[[Any], None]
# job -> the module with the function of that name: it takes what is given, and a function that tells the page something
# on the way; it returns JSON.
JOBS = dict.fromkeys(("credit", "doctor", "promote", "sample", "tools"), "TrainingFactory.web.worker")
JOBS |= dict.fromkeys(("begin", "say"), "TrainingFactory.web.playing")


def answer(asked: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Do a job; what is a user's mistake is told in its own words."""
    try:
        return {"ok": getattr(import_module(JOBS[asked["job"]]), asked["job"])(asked["given"], tell)}
    except (ValueError, OSError) as error:
        return {"wrong": str(error)}


class Telling(PlainLines):
    """Tells the page what a watcher is told."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def say(self, text: str) -> None:
        self._tell({"text": text})

    def episode(self, trajectory: Trajectory) -> None:
        self.say(f"an episode of task {trajectory.task.id} has ended: {trajectory.status}")


@lru_cache(maxsize=8)
def index_of(run: Path) -> EpisodeIndex:
    """Return the index of a run's episodes, which knows what it has read."""
    return EpisodeIndex(RunFolder(run))


def credit(given: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the members of a group with the credit of their tokens."""
    from TrainingFactory.apps.views.credit import group_credit

    index = index_of(Path(given["run"]))
    found = group_credit(index.run, given["step"], given["task"], index, given["learner"], given["group"])
    return found.model_dump(mode="json")


def doctor(given: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Examine a config as `tfactory doctor` does."""
    config = read(Draft(yaml=given["yaml"]))
    from TrainingFactory.apps.doctor.examination import examine

    found = examine(config, Telling(tell)).as_json
    return {"findings": found["findings"], "rows": list(found["facts"].items())}


def sample(given: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Play two episodes of a config, and keep nothing of them."""
    from TrainingFactory.apps.views.episodes import episode_view
    from TrainingFactory.evaluation.rollouts import Rollouts

    config, notes = read(Draft(yaml=given["yaml"])), list[str]()
    config = config.model_copy(update={"data": config.data.model_copy(update={"count": 2})})
    with tempfile.TemporaryDirectory(prefix="tfactory-sample-") as folder:
        rollouts = Rollouts(config, Path(folder) / "episodes.jsonl", say=notes.append)
        played = rollouts.run(Telling(tell).episode).trajectories
    views = [episode_view(each, number) for number, each in enumerate(played, 1)]
    return {"episodes": [each.model_dump(mode="json") for each in views], "notes": notes}


def tools(given: dict[str, Any], tell: Tell) -> list[dict[str, Any]]:
    """Start or reach the servers of a file, which were confirmed, list their tools, and end them."""
    from TrainingFactory.tools.mcp_tools import MCPTools

    async def ask() -> list[dict[str, Any]]:
        async with MCPTools.load_from_config(given["path"]) as opened:
            return [asdict(offer.spec) | {"server": offer.server} for offer in opened.offers]

    return asyncio.run(ask())


def promote(given: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Promote a version if it holds the gate of a suite."""
    from TrainingFactory.promotion.model_registry import ModelRegistry
    from TrainingFactory.promotion.promotion import Promotion

    def play(name: str, evaluation: Any) -> None:
        text, played = f"{name} plays {evaluation.asked.entry}", count(1)
        evaluation.run(lambda _: tell({"text": text, "done": next(played), "of": evaluation.total}))

    names = [given[key] for key in ("version", "alias", "suite", "first")]
    made = Promotion(ModelRegistry(None, given["runs"]), *names, runs=given["runs"], say=Telling(tell).say)
    for line in made.stated:
        tell({"text": f"the gate: {line}"})
    decision = made.run(play)
    checks = [{"name": each.name, "holds": each.holds, "found": each.found} for each in decision.checks]
    return {"promoted": decision.promoted, "text": decision.text, "checks": checks}
