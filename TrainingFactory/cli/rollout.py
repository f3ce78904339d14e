"""`tfactory rollout`: run, print and save episodes without training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Flags, Overrides
from TrainingFactory.config.loading import key_value
from TrainingFactory.types import Trajectory


def rollout(
    source: Annotated[str | None, Parameter(name="env-or-config")] = None, /, *overrides: Overrides,
    flags: Flags | None = None, out: Path | None = None,
    show_episodes: Annotated[int, Parameter(name="--show", validator=validators.Number(gte=0))] = 2,
    replay: str | None = None,
) -> int:  # fmt: skip
    """Run episodes without training; print the first ones and save all.

    ```
    tfactory rollout search
    tfactory rollout weather.py --model qwen3-4b --tasks 64
    tfactory rollout configs/qwen3_grpo.yaml model.name=tiny --temperature 0
    ```

    Args:
        source: Environment (a name, or a Python file such as weather.py or weather.py:Weather), or a config file
            (YAML) that names one.
        out: JSONL file for the episodes. Default: a new file in the runs folder.
        show_episodes: Number of episodes to print.
        replay: Recorded tool results to replay: a run, or a file of episodes written with logging.record_tools=true.
    """
    from TrainingFactory.assembly.named_files import read_config

    config_path, options = split_config_source(source, [*overrides, *(flags or Flags()).list_overrides()])
    config = read_config(config_path, options)
    # Imported here because it is slow: --help and config errors should appear at once.
    from TrainingFactory.evaluation.rollouts import Rollouts
    from TrainingFactory.trainers.notices import list_notices

    for notice in list_notices(config):
        show.note(f"note: {notice}")
    group_size = config.training.group_size if "group_size" in config.training.model_fields_set else 1
    rollouts = Rollouts(config, out, group_size, replay=replay, notify=show.note)
    with Display(rollouts.num_episodes, loads_model=rollouts.loads_model) as display:
        report = rollouts.run(display.episode)
    num_episodes = len(report.trajectories)
    for number, trajectory in enumerate(report.trajectories[:show_episodes], start=1):
        title = f"episode {number} of {num_episodes}: task {trajectory.task.id}, member {trajectory.member}"
        show.print_episode(trajectory, title)
    if report.interrupted:
        show.note(f"interrupted: {num_episodes} of {rollouts.num_episodes} episodes finished")
    if num_episodes:
        show.print_table(make_summary_rows(report.metrics, report.trajectories))
        show.note(f"saved {show.pluralize(num_episodes, 'episode')} to {rollouts.path}")
    return show.INTERRUPTED_STATUS if report.interrupted else 0


def split_config_source(env_or_config: str | None, overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the config file and the overrides for a source: an environment, a config file or an override."""
    if env_or_config is None or env_or_config.endswith((".yaml", ".yml")):
        return env_or_config, list(overrides)
    is_override = "=" in env_or_config and not Path(env_or_config).exists()
    option = env_or_config if is_override else key_value("environment.environment_id", env_or_config)
    return None, [option, *overrides]


def find_main_error(trajectories: Sequence[Trajectory]) -> str:
    """Return the most frequent reason why episodes have no reward."""
    reasons = Counter(trajectory.error for trajectory in trajectories if trajectory.reward is None)
    return str(reasons.most_common(1)[0][0])


def make_summary_rows(metrics: dict[str, float], trajectories: Sequence[Trajectory]) -> list[tuple[str, str]]:
    """Return table rows that summarise the episodes."""
    rewards = [trajectory.reward.outcome for trajectory in trajectories if trajectory.reward]
    statuses = Counter(trajectory.status for trajectory in trajectories).most_common()
    status_counts = ", ".join(f"{count} {name}" for name, count in statuses)
    rows = [("episodes", f"{len(trajectories)}: {status_counts}")]
    if rewards:
        num_positive = sum(reward > 0 for reward in rewards)
        rows.append(("reward", f"mean {metrics['reward']:.3f}, positive in {num_positive} of {len(rewards)}"))
    for name, value in sorted(metrics.items()):
        if name.startswith("reward/") or (name.startswith("proxy/") and value):
            rows.append((name, f"{value:.3f}" if value % 1 else f"{value:g}"))
    if num_unscored := int(metrics["episodes/unscored"]):
        rows.append(("unscored", f"{num_unscored}, most frequent reason: {find_main_error(trajectories)}"))
    rows += show.make_tool_rows(metrics)
    if "turns" in metrics:
        rows.append(("turns", f"{metrics['turns']:.1f} per episode"))
    tokens, speed = int(metrics["sampled_tokens"]), metrics["tokens_per_second"]
    rows.append(("tokens", f"{tokens} sampled in {metrics['seconds']:.1f} s, {speed:.0f} tokens/s"))
    return rows
