"""`tfactory eval`: how good a model or a run's result is on held-out tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Flags, Json, Overrides, places
from TrainingFactory.cli.rollout import summary, why_unscored
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.names import full_key

if TYPE_CHECKING:
    from TrainingFactory.services.build.model_names import Maker
    from TrainingFactory.services.evaluation.evaluation import Evaluation
    from TrainingFactory.services.evaluation.rollouts import Report

UNSCORED = 1  # exit status
OTHER_REWARD = ("reward.type", "reward.parts")  # who names one of these wants another reward than the run's
# kind of Python object -> how a command names what stands for it
NAMED_BY = {
    "environment": "--env FILE.py",
    "tools": "'tools=[\"FILE.py:NAME\"]'",
    "tasks": "data.tasks=FILE",
}


def evaluate(
    model: Annotated[str, Parameter(name="model-or-run")],
    /,
    *overrides: Overrides,
    env: str | None = None,
    flags: Flags | None = None,
    out: Path | None = None,
    as_json: Json = False,
    replay: str | None = None,
) -> int:
    """Evaluate a model, or what a run has made, on held-out tasks. A run is scored by its own reward, as in its
    evaluations on the way; reward.type=environment asks for that of the environment.

    ```
    tfactory eval runs/grpo-search-1
    tfactory eval runs/grpo-search-1 reward.type=environment
    tfactory eval agent@champion
    tfactory eval qwen3-4b --env search --tasks 200
    tfactory eval runs/warm/checkpoints/step-000160 --env calculator --temperature 0 --json
    ```

    Args:
        model: A run (its name or folder; its last checkpoint is taken, or sft@step-40), a checkpoint, a
            registered model (agent, agent:3, agent@champion), or a model.
        env: The environment; that of the run if none is named.
        out: JSONL file for the episodes; one in the runs folder if none is named.
        replay: A recording whose tool calls are served again: that of an earlier evaluation with
            logging.record_tools=true.
    """
    from TrainingFactory.services.build.model_names import find_model
    from TrainingFactory.services.evaluation import evaluation as evaluations

    flags = flags or Flags()
    if flags.model is not None:
        raise ValueError("the model is named twice: give it once, without --model")
    found, learned = find_model(model, *places(overrides)), {}
    sections = {"data": {"split": "heldout", "count": 64}} | evaluations.sections_of(found)
    other = any(full_key(each.partition("=")[0].strip()) in OTHER_REWARD for each in overrides)
    if found.maker is not None:
        sections |= _reward(found.maker, other)
        learned = evaluations.learned_tasks(found.maker) if env is None else {}
        sections["data"] |= learned
    given = [key_value(f"{s}.{key}", value) for s, keys in sections.items() for key, value in keys.items()]
    if env is not None:
        given.append(key_value("environment.environment_id", env))
    config = load_config(None, [*given, *overrides, *flags.overrides()])
    if found.maker is not None:
        _check_objects(found.maker, config, env is not None)
    if learned and config.data.tasks == learned["tasks"]:
        show.note(
            "note: the run has no held-out tasks, so these are those it learned from; name others: --tasks FILE"
        )
    evaluation = evaluations.Evaluation(config, out, replay, show.note)
    with Display(evaluation.total) as display:
        result = evaluation.run(display.episode)
    return _report(evaluation, result, as_json)


def _report(evaluation: Evaluation, result: Report, as_json: bool) -> int:
    """Print what came of it and return the exit status."""
    config, scored_by = evaluation.config, evaluation.scored_by
    metrics, played = result.metrics, result.trajectories
    if as_json:
        model, environment = config.model.adapter or config.model.name, config.environment.environment_id
        print(json.dumps({"model": model, "environment": environment, "scored_by": scored_by} | metrics))
    else:
        rows = [*summary(metrics, played), ("scored by", scored_by)]
        if "success" in metrics:
            interval = f"{metrics['success_low']:.3f} to {metrics['success_high']:.3f}"
            rows.insert(0, ("success", f"{metrics['success']:.3f} (95 % interval {interval})"))
        show.table(rows)
    if played:
        show.note(f"saved {show.count(len(played), 'episode')} to {evaluation.path}")
    if result.interrupted:
        return show.INTERRUPTED
    if "success" not in metrics:
        show.fail(f"no episode could be scored; mostly: {why_unscored(played)}")
        return UNSCORED
    return 0


def _reward(run: Maker, other: bool) -> dict[str, dict[str, Any]]:
    """Return the reward section of the run, if no other reward is asked for."""
    from TrainingFactory.services.build.named_files import changed_files
    from TrainingFactory.services.evaluation.evaluation import reward_of

    for name in changed_files(run.about):
        show.note(f"note: {name} has changed since run {run.name} was started")
    reward = None if other else reward_of(run)
    if reward is None and not other:
        show.note(
            f"note: run {run.name} was started from Python with a reward of its own, which cannot be restored here; "
            "the environment's own reward scores instead"
        )
    return {} if reward is None else {"reward": reward.model_dump()}


def _check_objects(run: Maker, config: TrainingConfig, other_environment: bool) -> None:
    """Raise where a run was started with Python objects in whose place the config names nothing."""
    environment = config.environment.environment_id
    named = {
        "environment": environment,
        "tools": config.tools or other_environment,
        "tasks": config.data.tasks or environment,
    }
    given = [kind for kind in run.about.get("objects", []) if kind in named]
    if missing := [kind for kind in given if not named[kind]]:
        raise ValueError(
            f"run {run.name} was started from Python with its own {' and '.join(given)}, which its folder does not "
            f"hold; name what is missing: {' '.join(NAMED_BY[kind] for kind in missing)}"
        )
