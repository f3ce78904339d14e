"""The credit of a recorded step's episodes, from the files of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.apps.reports.credit_view import Credit, GroupCredit, compute_credit
from TrainingFactory.assembly.learner import make_algorithm
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.models.loading import load_tokenizer
from TrainingFactory.resolve.model_names import with_original_model
from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder
from TrainingFactory.training.filters import without_dropped_reward
from TrainingFactory.types import Trajectory


def compute_run_credit(
    run: RunFolder,
    step: int | None = None,
    task: str | None = None,
    episodes: Sequence[Trajectory] | None = None,
) -> tuple[int, Credit]:
    """Return the step, counted from 1, and the credit that the run's algorithm gave to its episodes. `step` None: the
    last step, or the last one with `task`. `episodes`: the step's episodes, if the caller has read them."""
    step = resolve_step(run, step, task)
    model = with_original_model(run).model
    model_name = str([model.name, *run.checkpoints()][-1])  # a checkpoint includes the tokenizer
    tokenizer = load_tokenizer(model_name, model.revision, model.trust_remote_code)
    scored_episodes = [without_dropped_reward(episode) for episode in episodes or run.episodes(step)]
    return step, compute_credit(scored_episodes, make_algorithm(run.config), tokenizer)


def select_episodes(
    credit: Credit, groups: Sequence[GroupCredit], num_best: int | None, num_worst: int | None
) -> list[GroupCredit]:
    """Keep the `num_best` and the `num_worst` scored episodes of each group in their order; if both are None, keep all.
    A group without scored episodes is kept whole, so that the page shows why none is scored. Add notes about omitted
    episodes to `credit`."""
    if num_best is None and num_worst is None:
        return list(groups)
    scored_groups = [group for group in groups if group.rewards]
    if num_unscored_groups := len(groups) - len(scored_groups):
        credit.notes.append(
            f"{num_unscored_groups} of {len(groups)} tasks have no scored episode: all of their episodes are shown"
        )
    if num_unscored := sum(len(group.episodes) - len(group.rewards) for group in scored_groups):
        credit.notes.append(
            f"only scored episodes are ranked; {num_unscored} episodes without a reward are not shown"
        )
    return [
        _select_best_and_worst(group, num_best or 0, num_worst or 0) if group.rewards else group
        for group in groups
    ]


def _select_best_and_worst(group: GroupCredit, num_best: int, num_worst: int) -> GroupCredit:
    rewards = {
        index: episode.reward for index, episode in enumerate(group.episodes) if episode.reward is not None
    }
    ranking = sorted(rewards, key=lambda index: -rewards[index])
    indices = {*ranking[:num_best], *ranking[max(0, len(ranking) - num_worst) :]}
    return replace(group, episodes=[group.episodes[index] for index in sorted(indices)])


def make_credit_title(run: RunFolder, step: int) -> str:
    """Return a title with the run, the step and the algorithm's credit options."""
    algorithm, grpo = run.config.training.algorithm, run.config.grpo
    settings_text = f", credit {grpo.credit}, advantage {grpo.advantage}" if algorithm == "grpo" else ""
    return f"Run {run.name}, step {step}: {algorithm}{settings_text}"


def resolve_step(run: RunFolder, step: int | None, task: str | None) -> int:
    """Return `step`; if it is None, the last step with `task`. Raise ValueError if the step has no episodes of the
    task."""
    config, tasks_by_step = run.config, run.read_consumed_tasks()
    algorithm = config.training.algorithm
    if not KINDS[algorithm].samples:
        raise ValueError(f"run {run.name} uses {algorithm}, which trains on a dataset: it has no episodes")
    if not tasks_by_step:
        raise ValueError(f"run {run.name} has not finished a step yet: it has no episodes")
    if not (run.path / TRAJECTORIES).is_file():
        raise ValueError(
            f"run {run.name} has no {TRAJECTORIES}: logging.save_trajectories was false, or the file was deleted"
        )
    if step is not None and step not in tasks_by_step:
        known_steps = f"{min(tasks_by_step)} to {max(tasks_by_step)}"
        raise ValueError(f"run {run.name} has no step {step}; it has steps {known_steps}")
    steps = [step_number for step_number, ids in tasks_by_step.items() if task is None or task in ids]
    if not steps:
        task_ids = [task_id for ids in tasks_by_step.values() for task_id in ids]
        hint = did_you_mean(nearest(str(task), task_ids)) or f"; some of its tasks: {', '.join(task_ids[:5])}"
        raise ValueError(f"run {run.name} has no task {task!r}{hint}")
    if step is not None and step not in steps:
        step_list = ", ".join(map(str, steps))
        raise ValueError(f"step {step} of run {run.name} has no task {task!r}; it is in step {step_list}")
    return step or max(steps)
