"""Evaluation of a model on held-out tasks, and the config of such an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.assembly import rewards as assemble_rewards
from TrainingFactory.assembly.environment import make_environment
from TrainingFactory.assembly.named_files import with_original_files, with_original_paths
from TrainingFactory.assembly.rewards import get_heldout_reward, name_scorer
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.schema import RewardSection
from TrainingFactory.evaluation.rollouts import RolloutReport, Rollouts
from TrainingFactory.resolve.factories import resolve_ids
from TrainingFactory.resolve.model_names import ResolvedModel, TrainedBy
from TrainingFactory.rollout.metrics import Z95, compute_evaluation_metrics, wilson_interval  # noqa: F401
from TrainingFactory.training.dataset import generates_tasks
from TrainingFactory.types import Trajectory


class Evaluation(Rollouts):
    """Runs episodes of a model on held-out tasks, scored like the evaluations during training."""

    def __init__(
        self,
        config: TrainingConfig,
        path: Path | None = None,
        replay: str | Path | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        config = resolve_ids(config, notify)
        self.scored_by = name_scorer(
            config, get_heldout_reward(assemble_rewards.check_reward(config), notify)
        )
        group_size = config.training.group_size if "group_size" in config.training.model_fields_set else 1
        super().__init__(config, path, group_size, (), replay, get_heldout_reward, notify)

    async def run_async(self, on_episode: Callable[[Trajectory], None] = lambda _: None) -> RolloutReport:
        report = await super().run_async(on_episode)
        report.metrics |= compute_evaluation_metrics(report.trajectories)
        return report


def make_sections(resolved_model: ResolvedModel) -> dict[str, dict[str, Any]]:
    """Return the config sections for evaluating a model; for a run's checkpoint these include the run's own options."""
    if resolved_model.run is None:
        return {"model": resolved_model.section}
    training_config = with_original_paths(resolved_model.run.config, resolved_model.run.run_info)
    checkpoint_options = {"tools_format", "chat_template"}
    model_options = training_config.model.model_dump(exclude_unset=True, exclude=checkpoint_options)
    sections = {"model": model_options | resolved_model.section}
    for section in ("environment", "data", "sampling"):
        sections[section] = getattr(training_config, section).model_dump()
    if training_config.tools:
        sections["tools"] = {str(i): entry.model_dump() for i, entry in enumerate(training_config.tools)}
    data_options = sections["data"]
    data_options |= {
        "split": "heldout",
        "tasks": data_options["heldout"] if data_options["dataset"] is None else None,
        "dataset_split": data_options["heldout_split"],
        "count": data_options["heldout_count"],
        "dataset": None,
    }
    return sections


def make_overrides(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the options of sections as overrides for `load_config`."""
    return [key_value(f"{s}.{key}", value) for s, keys in sections.items() for key, value in keys.items()]


def get_task_options(run: TrainedBy) -> dict[str, Any]:
    """Return the data options that select a run's training tasks. The result is empty if the run has no file of tasks,
    if it has held-out tasks or a dataset, or if its environment generates tasks."""
    config = with_original_paths(run.config, run.run_info)
    data = config.data
    if data.tasks is None or data.heldout or data.dataset:
        return {}
    if config.environment.environment_id is not None and generates_tasks(make_environment(config)):
        return {}
    return {"tasks": data.tasks, "dataset_split": data.dataset_split}


def load_run_reward(run: TrainedBy) -> RewardSection | None:
    """Return the reward section of a run with absolute file paths; None if its reward was a Python object."""
    if "reward" in run.run_info.get("objects", []):
        return None
    config = with_original_files(run.config, run)

    def with_model_folder(model: Any) -> dict[str, str]:  # resolves the name of a run to its folder
        return {"model": str(assemble_rewards.find_reward_model(model, config).folder)}

    reward = config.reward
    if reward.type == "learned" and not reward.parts:
        return reward.model_copy(update=with_model_folder(reward.model))
    learned_parts = {name: part for name, part in reward.parts.items() if part.get("type") == "learned"}
    new_parts = {name: part | with_model_folder(part.get("model")) for name, part in learned_parts.items()}
    return reward.model_copy(update={"parts": reward.parts | new_parts})
