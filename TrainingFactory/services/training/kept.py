"""What rejection sampling fine-tuning learned from: a dataset in the run's folder that a person can read, and that
`data.dataset` takes for sft."""

from __future__ import annotations

from TrainingFactory.protocols import Algorithm
from TrainingFactory.services.runs.folder import KEPT, RunFolder
from TrainingFactory.services.training.source import Groups


def record_kept(run: RunFolder, algorithm: Algorithm, groups: Groups) -> dict[str, float]:
    """Writes down the kept episodes of a step. `kept` is their share of all, `kept_tasks` the share of tasks that have
    any. Nothing for other algorithms, which learn from good and bad episodes."""
    from TrainingFactory.algorithms.rft import RFT

    if not isinstance(algorithm, RFT):
        return {}
    kept = [algorithm.kept(group) for group in groups]
    run.append_trajectories((trajectory for group in kept for trajectory in group), KEPT)
    episodes = sum(len(group) for group in groups)
    return {
        "kept": sum(len(group) for group in kept) / episodes,
        "kept_tasks": sum(bool(group) for group in kept) / len(groups),
    }
