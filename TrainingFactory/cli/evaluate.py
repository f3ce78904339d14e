"""`tfactory eval`: how good a model or a run's result is on held-out tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Flags, Json, Overrides
from TrainingFactory.cli.rollout import summary, why_unscored
from TrainingFactory.config import load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.names import full_key

if TYPE_CHECKING:
    from TrainingFactory.services.evaluation.evaluation import Evaluation
    from TrainingFactory.services.evaluation.rollouts import Report

UNSCORED = 1  # exit status
OTHER_REWARD = ("reward.type", "reward.parts")  # who names one of these wants another reward than the run's


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
    tfactory eval qwen3-4b --env search --tasks 200
    tfactory eval runs/warm/checkpoints/step-000160 --env calculator --temperature 0 --json
    ```

    Args:
        model: A run (its name or folder; its last checkpoint is taken), a checkpoint, or a model.
        env: The environment; that of the run if none is named.
        out: JSONL file for the episodes; one in the runs folder if none is named.
        replay: A recording whose tool calls are served again: that of an earlier evaluation with
            logging.record_tools=true.
    """
    from TrainingFactory.services.evaluation.evaluation import Evaluation, model_of

    flags = flags or Flags()
    if flags.model is not None:
        raise ValueError("the model is named twice: give it once, without --model")
    sections = {"data": {"split": "heldout", "count": 64}} | model_of(model)
    other = any(full_key(each.partition("=")[0].strip()) in OTHER_REWARD for each in overrides)
    sections |= _reward(model, other)
    given = [key_value(f"{s}.{key}", value) for s, keys in sections.items() for key, value in keys.items()]
    if env is not None:
        given.append(key_value("environment.environment_id", env))
    config = load_config(None, [*given, *overrides, *flags.overrides()])
    evaluation = Evaluation(config, out, replay, show.note)
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


def _reward(model: str, other: bool) -> dict[str, dict[str, Any]]:
    """Return the reward section of the run, if the model is one of a run and no other reward is asked for."""
    from TrainingFactory.services.build.named_files import changed_files
    from TrainingFactory.services.evaluation.evaluation import checkpoint_of, reward_of

    if (found := checkpoint_of(model)) is None:
        return {}
    run, _ = found
    for name in changed_files(run.about):
        show.note(f"note: {name} has changed since run {run.name} was started")
    reward = None if other else reward_of(run)
    if reward is None and not other:
        show.note(
            f"note: run {run.name} was started from Python with a reward of its own, which cannot be restored here; "
            "the environment's own reward scores instead"
        )
    return {} if reward is None else {"reward": reward.model_dump()}
