"""`tfactory train`: from a config to a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Overrides
from TrainingFactory.trainers.notices import notices, unused

if TYPE_CHECKING:
    from TrainingFactory.trainers.training_run import Training


def train(config: str, /, *overrides: Overrides, name: str | None = None, replay: str | None = None) -> int:
    """Train a model as a config says; Ctrl-C or SIGTERM saves a checkpoint and prints the command that
    resumes the run.

    ```
    tfactory train configs/tiny_sft.yaml --name warm
    tfactory train configs/tiny_grpo.yaml model.name=runs/warm/checkpoints/step-000160
    tfactory train configs/qwen3_grpo_lora.yaml training.learning_rate=2e-6
    tfactory train configs/tiny_grpo.yaml --replay grpo-search-1
    ```

    Args:
        config: A config (a YAML file).
        name: Name of the run, a folder under logging.output_dir; made from algorithm, environment and time
            if not given.
        replay: A run whose recorded tool calls are served again, with no tool called and no server started.
    """
    from TrainingFactory.assembly.learner_processes import served
    from TrainingFactory.assembly.named_files import read_config

    options = read_config(config, overrides)
    if served(options) is not None:  # by rank 0, which also tells how it goes
        return 0
    # Imported here, so that help and a wrong config do not wait for it.
    from TrainingFactory.trainers.training_run import Training

    for text in [*notices(options), *unused(options)]:
        show.note(f"note: {text}")
    display = Display()
    return follow(Training(options, name=name, watcher=display, replay=replay), display)


def follow(training: Training, display: Display) -> int:
    """Train with the display around it and return the exit status."""
    run = training.run
    show.note(f"run {run.name} in {run.path}: {show.count(training.total, 'step')}")
    with display:
        report = training.train()
    if report.state == "interrupted":
        show.note(f"interrupted after {show.count(report.steps, 'step')}; go on with: {run.resume_command}")
        return show.INTERRUPTED
    if report.tools.get("tools/calls"):
        show.note(f"tool calls: {show.tool_text(report.tools)}")
    if report.checkpoint is not None:
        show.note(f"finished; the model is in {report.checkpoint}")
        use = f"evaluate it: tfactory eval {run.shown}"
        if training.config.training.algorithm == "reward_model":
            use = f"let it score: reward.type=learned reward.model={run.path}"
        show.note(f"look at it: tfactory runs show {run.shown}; {use}")
    return 0
