"""`tfactory train`: train a model from a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Overrides

if TYPE_CHECKING:
    from TrainingFactory.trainers.training_run import Training


def train(
    config: str,
    /,
    *overrides: Overrides,
    name: str | None = None,
    replay: str | None = None,
    agent: str | None = None,
) -> int:
    """Train a model from a config. Ctrl-C or SIGTERM saves a checkpoint and prints the command that resumes the run.

    ```
    tfactory train configs/tiny_sft.yaml --name warm
    tfactory train configs/tiny_grpo.yaml model.name=runs/warm/checkpoints/step-000160
    tfactory train configs/qwen3_grpo_lora.yaml training.learning_rate=2e-6
    tfactory train configs/tiny_grpo.yaml --replay grpo-search-1
    tfactory train repair.yaml --agent mini-swe-agent
    ```

    Args:
        config: Config file (YAML).
        name: Name of the run and of its folder under logging.output_dir. Default: algorithm, environment and time.
        replay: Run whose recorded tool results are replayed; no tool is called and no server started.
        agent: Agent program that plays the episodes: claude-code, codex, gemini-cli or mini-swe-agent. Sets
            environment.command and its options.
    """
    from TrainingFactory.agent_api.agents import find_agent
    from TrainingFactory.assembly.learner_processes import serve_rank
    from TrainingFactory.assembly.named_files import read_config
    from TrainingFactory.config.loading import key_value

    agent_keys = {} if agent is None else find_agent(agent).list_options()
    agent_options = [key_value(key, value) for key, value in agent_keys.items()]
    training_config = read_config(config, [*agent_options, *overrides])
    if serve_rank(training_config) is not None:  # a learner process of rank 0, which reports the progress
        return 0
    # Imported here because it is slow: --help and config errors should appear at once.
    from TrainingFactory.trainers.notices import list_notices, list_unused_options
    from TrainingFactory.trainers.training_run import Training

    for notice in [*list_notices(training_config), *list_unused_options(training_config)]:
        show.note(f"note: {notice}")
    display = Display()
    return train_with_display(Training(training_config, name=name, watcher=display, replay=replay), display)


def train_with_display(training: Training, display: Display) -> int:
    """Train with the display open, print the result and return the exit status."""
    run = training.run
    show.note(f"run {run.name} in {run.path}: {show.pluralize(training.num_steps, 'step')}")
    with display:
        report = training.train()
    if report.state == "interrupted":
        show.note(
            f"interrupted after {show.pluralize(report.steps, 'step')}; resume with: {run.resume_command}"
        )
        return show.INTERRUPTED_STATUS
    if report.tools.get("tools/calls"):
        show.note(f"tool calls: {show.format_tool_stats(report.tools)}")
    if report.checkpoint is not None:
        show.note(f"finished; the model is in {report.checkpoint}")
        next_step = f"evaluate it: tfactory eval {run.display_path}"
        if training.config.training.algorithm == "reward_model":
            next_step = f"use it as a reward: reward.type=learned reward.model={run.path}"
        show.note(f"see its metrics: tfactory runs show {run.display_path}; {next_step}")
    return 0
