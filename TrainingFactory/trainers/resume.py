"""Restore a run from its last intact checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from TrainingFactory.protocols import Policy
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.training.ledger import Ledger
from TrainingFactory.training.loop import Progress
from TrainingFactory.training.task_order import TaskOrder


async def restore_progress(
    run: RunFolder,
    policy: Policy,
    order: TaskOrder,
    num_steps: int,
    is_resumed: bool,
    is_async: bool,
    notify: Callable[[str], None],
) -> Progress:
    """Load the last intact checkpoint, if any, into the policy, and truncate the run's files to its step. `is_async`:
    groups may be sampled before their step."""
    progress = Progress(Ledger(order))
    file_offsets: dict[str, int] = {}
    state = await _load_last_checkpoint(run, policy, notify)
    if state:
        try:
            ledger = Ledger.from_state(order, state)
        except ValueError as error:
            raise ValueError(f"run {run.name} {error}") from error
        if ledger.unfinished_groups and not is_async:
            raise ValueError(
                f"run {run.name} used async rollouts and has {len(ledger.unfinished_groups)} unfinished groups: "
                "resume it with optimization.async_rollout=true and optimization.max_staleness above 0"
            )
        progress = Progress(ledger, state["step"], state["seconds"], state.get("unlogged"))
        file_offsets = state["offsets"]
    await in_thread(run.rewind, file_offsets)
    if is_resumed:
        suffix = "" if state else ": no checkpoint yet"
        notify(f"resuming after step {progress.steps} of {num_steps}{suffix}")
    return progress


async def _load_last_checkpoint(
    run: RunFolder, policy: Policy, notify: Callable[[str], None]
) -> dict[str, Any] | None:
    """Load the last intact checkpoint and return its state; warn of damaged ones."""
    from TrainingFactory.learning.checkpoints import DamagedCheckpoint  # torch

    checkpoints = run.checkpoints()
    for path in reversed(checkpoints):
        try:
            return await policy.load(str(path))
        except DamagedCheckpoint as error:
            notify(f"WARNING {error}" + ("; the previous one is used" if path != checkpoints[0] else ""))
    if checkpoints:
        raise ValueError(
            f"All checkpoints of run {run.name} are damaged. Restore one of {run.path / 'checkpoints'}, or delete that "
            "folder to start again."
        )
    return None
