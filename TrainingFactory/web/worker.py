"""Jobs that need a model, run in a worker process of the web UI: `pool.py` sends them, and `answer` runs them."""

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
from TrainingFactory.web.form import Draft, read_draft

ProgressCallback = Callable[[Any], None]
# job -> module with the function of that name, which takes the job's arguments and a progress callback and returns JSON
JOB_MODULES = dict.fromkeys(("credit", "doctor", "promote", "sample", "tools"), "TrainingFactory.web.worker")
JOB_MODULES |= dict.fromkeys(("begin", "say"), "TrainingFactory.web.playing")


def answer(request: dict[str, Any], report: ProgressCallback) -> dict[str, Any]:
    """Run a job and return its result, or the text of a ValueError or OSError, which are usually a user's mistake."""
    try:
        run_job = getattr(import_module(JOB_MODULES[request["job"]]), request["job"])
        return {"ok": run_job(request["given"], report)}
    except (ValueError, OSError) as error:
        return {"wrong": str(error)}


class ProgressWatcher(PlainLines):
    """Watcher that sends progress messages to the page."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report

    def say(self, text: str) -> None:
        self._report({"text": text})

    def episode(self, trajectory: Trajectory) -> None:
        self.say(f"episode of task {trajectory.task.id} finished: {trajectory.status}")


@lru_cache(maxsize=8)
def find_index(run_folder: Path) -> EpisodeIndex:
    return EpisodeIndex(RunFolder(run_folder))


def credit(arguments: dict[str, Any], report: ProgressCallback) -> dict[str, Any]:
    from TrainingFactory.apps.views.credit import make_group_view

    index = find_index(Path(arguments["run"]))
    step, task, learner, group = (arguments[key] for key in ("step", "task", "learner", "group"))
    view = make_group_view(index.run, step, task, index, learner, group)
    return view.model_dump(mode="json")


def doctor(arguments: dict[str, Any], report: ProgressCallback) -> dict[str, Any]:
    """Examine a config as `tfactory doctor` does."""
    config = read_draft(Draft(yaml=arguments["yaml"]))
    from TrainingFactory.apps.doctor.examination import examine

    diagnosis = examine(config, ProgressWatcher(report)).as_json
    return {"findings": diagnosis["findings"], "rows": list(diagnosis["facts"].items())}


def sample(arguments: dict[str, Any], report: ProgressCallback) -> dict[str, Any]:
    """Play two episodes of a config without saving them."""
    from TrainingFactory.apps.views.episodes import make_episode_view
    from TrainingFactory.evaluation.rollouts import Rollouts

    config, notes = read_draft(Draft(yaml=arguments["yaml"])), list[str]()
    config = config.model_copy(update={"data": config.data.model_copy(update={"count": 2})})
    with tempfile.TemporaryDirectory(prefix="tfactory-sample-") as folder:
        rollouts = Rollouts(config, Path(folder) / "episodes.jsonl", notify=notes.append)
        episodes = rollouts.run(ProgressWatcher(report).episode).trajectories
    views = [make_episode_view(episode, number) for number, episode in enumerate(episodes, 1)]
    return {"episodes": [episode.model_dump(mode="json") for episode in views], "notes": notes}


def tools(arguments: dict[str, Any], report: ProgressCallback) -> list[dict[str, Any]]:
    """Start or connect to the confirmed servers of a file, list their tools, and stop them."""
    from TrainingFactory.tools.mcp_tools import MCPTools

    async def fetch_tools() -> list[dict[str, Any]]:
        async with MCPTools.load_from_config(arguments["path"]) as servers:
            return [asdict(offer.spec) | {"server": offer.server} for offer in servers.offers]

    return asyncio.run(fetch_tools())


def promote(arguments: dict[str, Any], report: ProgressCallback) -> dict[str, Any]:
    from TrainingFactory.promotion.model_registry import ModelRegistry
    from TrainingFactory.promotion.promotion import Promotion

    def play(model_name: str, evaluation: Any) -> None:
        text, numbers = f"{model_name} plays {evaluation.request.entry}", count(1)
        evaluation.run(lambda _: report({"text": text, "done": next(numbers), "of": evaluation.num_episodes}))

    options = [arguments[key] for key in ("version", "alias", "suite", "first")]
    registry = ModelRegistry(None, arguments["runs"])
    promotion = Promotion(registry, *options, runs=arguments["runs"], notify=ProgressWatcher(report).say)
    for line in promotion.criteria:
        report({"text": f"the gate: {line}"})
    decision = promotion.run(play)
    checks = [{"name": check.name, "holds": check.holds, "found": check.found} for check in decision.checks]
    return {"promoted": decision.promoted, "text": decision.text, "checks": checks}
