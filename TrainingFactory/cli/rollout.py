"""`tfactory rollout`: run episodes with no training, show them, save them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.progress import Progress
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import key_value
from TrainingFactory.types import Trajectory

INTERRUPTED = 130


@Parameter(name="*")
@dataclass(slots=True)
class Flags:
    """What is set most often; each stands for a key of the config."""

    model: str | None = None
    """Short name, hub id, local folder, GGUF file, or builtin:tiny."""
    tasks: str | None = None
    """A JSONL file of tasks, or a number: so many of the environment's own."""
    split: str | None = None
    """Which of the environment's tasks: train or heldout."""
    group_size: int | None = None
    """Episodes per task; 1 if the config does not say."""
    max_turns: int | None = None
    """Turns after which an episode ends."""
    temperature: float | None = None
    """0 is greedy."""
    max_tokens: int | None = None
    """Longest turn, in tokens."""
    seed: int | None = None
    """For the random numbers of sampling; data.seed=N makes other tasks."""

    def overrides(self) -> list[str]:
        count = self.tasks is not None and self.tasks.removeprefix("-").isdecimal()
        values = {
            "model.name": self.model,
            "data.count": int(self.tasks) if self.tasks and count else None,
            "data.tasks": None if count else self.tasks,
            "data.split": self.split,
            "training.group_size": self.group_size,
            "environment.max_turns": self.max_turns,
            "sampling.temperature": self.temperature,
            "sampling.max_tokens": self.max_tokens,
            "training.seed": self.seed,
        }
        return [key_value(key, value) for key, value in values.items() if value is not None]


def rollout(
    source: Annotated[str | None, Parameter(name="env-or-config")] = None,
    /,
    *overrides: str,
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

    Parameters
    ----------
    source
        An environment (a name, or a Python file such as weather.py or weather.py:Weather), or a config
        that names one (a YAML file).
    overrides
        Options of the config, as key=value: sampling.top_p=0.9
    out
        JSONL file for the episodes; one in the runs folder if none is named.
    show_episodes
        How many episodes to print.
    replay
        A recording whose tool calls are served again: a run, or a file of episodes that was made with
        logging.record_tools=true.
    """
    from TrainingFactory.services.build.named_files import read_config

    given = [*overrides, *(flags or Flags()).overrides()]
    path = None
    if source is not None and source.endswith((".yaml", ".yml")):
        path = source
    elif source is not None:
        named = "=" in source and not Path(source).exists()  # an override, with nothing before it
        given.insert(0, source if named else key_value("environment.environment_id", source))
    config = read_config(path, given)
    group = config.training.group_size if "group_size" in config.training.model_fields_set else 1
    return run(config, out, show_episodes, group, replay)


def run(
    config: TrainingConfig, out: Path | None, shown: int, group_size: int = 1, replay: str | None = None
) -> int:
    """Runs what the config says and prints what came of it; the exit status."""
    # Imported here, so that help and a wrong config do not wait for it.
    from TrainingFactory.services.build.notices import notices
    from TrainingFactory.services.evaluation.rollouts import Rollouts

    for text in notices(config):
        show.note(f"note: {text}")
    rollouts = Rollouts(config, out, group_size, replay=replay)
    with Progress(rollouts.total) as progress:
        report = rollouts.run(progress.episode)
    count = len(report.trajectories)
    for number, trajectory in enumerate(report.trajectories[:shown], start=1):
        title = f"episode {number} of {count}: task {trajectory.task.id}, member {trajectory.member}"
        show.episode(trajectory, title)
    if report.interrupted:
        show.note(f"interrupted: {count} of {rollouts.total} episodes had ended")
    if count:
        show.table(_summary(report.metrics, report.trajectories))
        show.note(f"saved {show.count(count, 'episode')} to {rollouts.path}")
    return INTERRUPTED if report.interrupted else 0


def _summary(metrics: dict[str, float], trajectories: list[Trajectory]) -> list[tuple[str, str]]:
    rewards = [trajectory.reward.outcome for trajectory in trajectories if trajectory.reward]
    statuses = Counter(trajectory.status for trajectory in trajectories).most_common()
    rows = [("episodes", f"{len(trajectories)}: " + ", ".join(f"{count} {name}" for name, count in statuses))]
    if rewards:
        above = sum(reward > 0 for reward in rewards)
        rows.append(("reward", f"{metrics['reward']:.3f} on average, over 0 in {above} of {len(rewards)}"))
    for name in sorted(name for name in metrics if name.startswith("reward/")):
        rows.append((name, f"{metrics[name]:.3f}"))
    if unscored := int(metrics["episodes/unscored"]):
        reasons = Counter(trajectory.error for trajectory in trajectories if trajectory.reward is None)
        rows.append(("not scored", f"{unscored}, mostly: {reasons.most_common(1)[0][0]}"))
    rows += show.tool_rows(metrics)
    rows.append(("turns", f"{metrics['turns']:.1f} an episode"))
    tokens, speed = int(metrics["sampled_tokens"]), metrics["tokens_per_second"]
    rows.append(("tokens", f"{tokens} sampled in {metrics['seconds']:.1f} s, {speed:.0f} a second"))
    return rows
