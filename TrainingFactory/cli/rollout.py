"""`tfactory rollout`: run episodes with no training, show them, save them."""

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
from TrainingFactory.trainers.notices import notices
from TrainingFactory.types import Trajectory


def rollout(
    source: Annotated[str | None, Parameter(name="env-or-config")] = None,
    /,
    *overrides: Overrides,
    flags: Flags | None = None,
    out: Path | None = None,
    show_episodes: Annotated[int, Parameter(name="--show", validator=validators.Number(gte=0))] = 2,
    replay: str | None = None,
) -> int:
    """Run episodes with no training, show them and save them.

    ```
    tfactory rollout search
    tfactory rollout weather.py --model qwen3-4b --tasks 64
    tfactory rollout configs/qwen3_grpo.yaml model.name=tiny --temperature 0
    ```

    Args:
        source: An environment (a name, or a Python file such as weather.py or weather.py:Weather), or a
            config that names one (a YAML file).
        out: JSONL file for the episodes; one in the runs folder if none is named.
        show_episodes: How many episodes to print.
        replay: A recording whose tool calls are served again: a run, or a file of episodes that was made
            with logging.record_tools=true.
    """
    from TrainingFactory.assembly.named_files import read_config

    given = [*overrides, *(flags or Flags()).overrides()]
    path = None
    if source is not None and source.endswith((".yaml", ".yml")):
        path = source
    elif source is not None:
        named = "=" in source and not Path(source).exists()  # an override, with nothing before it
        given.insert(0, source if named else key_value("environment.environment_id", source))
    config = read_config(path, given)
    # Imported here, so that help and a wrong config do not wait for it.
    from TrainingFactory.evaluation.rollouts import Rollouts

    for text in notices(config):
        show.note(f"note: {text}")
    group = config.training.group_size if "group_size" in config.training.model_fields_set else 1
    rollouts = Rollouts(config, out, group, replay=replay, say=show.note)
    with Display(rollouts.total) as display:
        report = rollouts.run(display.episode)
    count = len(report.trajectories)
    for number, trajectory in enumerate(report.trajectories[:show_episodes], start=1):
        title = f"episode {number} of {count}: task {trajectory.task.id}, member {trajectory.member}"
        show.episode(trajectory, title)
    if report.interrupted:
        show.note(f"interrupted: {count} of {rollouts.total} episodes had ended")
    if count:
        show.table(summary(report.metrics, report.trajectories))
        show.note(f"saved {show.count(count, 'episode')} to {rollouts.path}")
    return show.INTERRUPTED if report.interrupted else 0


def why_unscored(trajectories: Sequence[Trajectory]) -> str:
    """Return the most frequent reason."""
    reasons = Counter(trajectory.error for trajectory in trajectories if trajectory.reward is None)
    return str(reasons.most_common(1)[0][0])


def summary(metrics: dict[str, float], trajectories: Sequence[Trajectory]) -> list[tuple[str, str]]:
    """Sum up episodes, one thing a row."""
    rewards = [trajectory.reward.outcome for trajectory in trajectories if trajectory.reward]
    statuses = Counter(trajectory.status for trajectory in trajectories).most_common()
    ended = ", ".join(f"{count} {name}" for name, count in statuses)
    rows = [("episodes", f"{len(trajectories)}: {ended}")]
    if rewards:
        above = sum(reward > 0 for reward in rewards)
        rows.append(("reward", f"{metrics['reward']:.3f} on average, over 0 in {above} of {len(rewards)}"))
    for name, value in sorted(metrics.items()):
        if name.startswith("reward/") or (name.startswith("proxy/") and value):
            rows.append((name, f"{value:.3f}" if value % 1 else f"{value:g}"))
    if unscored := int(metrics["episodes/unscored"]):
        rows.append(("not scored", f"{unscored}, mostly: {why_unscored(trajectories)}"))
    rows += show.tool_rows(metrics)
    if "turns" in metrics:
        rows.append(("turns", f"{metrics['turns']:.1f} an episode"))
    tokens, speed = int(metrics["sampled_tokens"]), metrics["tokens_per_second"]
    rows.append(("tokens", f"{tokens} sampled in {metrics['seconds']:.1f} s, {speed:.0f} a second"))
    return rows
