"""The episodes of a run's step with their credit, from the files in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.apps.reports.credit_view import Credit, GroupCredit, coloured
from TrainingFactory.assembly.learner import make_algorithm
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.models.loading import load_tokenizer
from TrainingFactory.resolve.model_names import as_started_from
from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder
from TrainingFactory.types import Trajectory


def run_credit(
    run: RunFolder,
    step: int | None = None,
    task: str | None = None,
    episodes: Sequence[Trajectory] | None = None,
) -> tuple[int, Credit]:
    """Return the step (from 1; without one the last, or the last that took the task) and all its episodes, with the
    credit that the run's own algorithm gave. `episodes` are those of the step, where they have been read."""
    step = resolve_step(run, step, task)
    model = as_started_from(run).model
    place = str([model.name, *run.checkpoints()][-1])  # a checkpoint has the tokenizer, too
    tokenizer = load_tokenizer(place, model.revision, model.trust_remote_code)
    return step, coloured(episodes or run.episodes(step), make_algorithm(run.config), tokenizer)


def choose(
    credit: Credit, groups: Sequence[GroupCredit], best: int | None, worst: int | None
) -> list[GroupCredit]:
    """Keep the best and the worst of the scored episodes of these groups, in their order; all if neither is asked for,
    or where none is scored: then why is what there is to see. What is left out becomes a note."""
    if best is None and worst is None:
        return list(groups)
    scored = [group for group in groups if group.totals]
    if without := len(groups) - len(scored):
        credit.notes.append(
            f"{without} of {len(groups)} tasks have no scored episode, so that none is best or worst: all are shown"
        )
    if left := sum(len(group.episodes) - len(group.totals) for group in scored):
        credit.notes.append(
            f"best and worst are among scored episodes; {left} that could not be scored are not shown"
        )
    return [_chosen(group, best or 0, worst or 0) if group.totals else group for group in groups]


def _chosen(group: GroupCredit, best: int, worst: int) -> GroupCredit:
    totals = {place: each.total for place, each in enumerate(group.episodes) if each.total is not None}
    ranked = sorted(totals, key=lambda place: -totals[place])
    kept = {*ranked[:best], *ranked[max(0, len(ranked) - worst) :]}
    return replace(group, episodes=[group.episodes[place] for place in sorted(kept)])


def credit_title(run: RunFolder, step: int) -> str:
    """Say which episodes these are, and what gave them their credit."""
    name, grpo = run.config.training.algorithm, run.config.grpo
    how = f", credit {grpo.credit}, advantage {grpo.advantage}" if name == "grpo" else ""
    return f"Run {run.name}, step {step}: {name}{how}"


def resolve_step(run: RunFolder, step: int | None, task: str | None) -> int:
    """Return the step that is meant; raise if it has no episodes or did not take the task."""
    config, taken = run.config, run.consumed()
    name = config.training.algorithm
    if not KINDS[name].samples:
        raise ValueError(f"run {run.name} is {name}, which learns from examples: it sampled no episodes")
    if not taken:
        raise ValueError(f"run {run.name} has finished no step yet, so there are no episodes to show")
    if not (run.path / TRAJECTORIES).is_file():
        raise ValueError(
            f"run {run.name} kept no episodes: it ran with logging.save_trajectories=false, or they were removed"
        )
    if step is not None and step not in taken:
        raise ValueError(f"run {run.name} has no step {step}; it has steps {min(taken)} to {max(taken)}")
    steps = [number for number, ids in taken.items() if task is None or task in ids]
    if not steps:
        known = [name for ids in taken.values() for name in ids]
        near = did_you_mean(nearest(str(task), known)) or f"; there are for example {', '.join(known[:5])}"
        raise ValueError(f"run {run.name} took no task {task!r}{near}")
    if step is not None and step not in steps:
        told = ", ".join(map(str, steps))
        raise ValueError(f"step {step} of run {run.name} took no task {task!r}, which was in step {told}")
    return step or max(steps)
