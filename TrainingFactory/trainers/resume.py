"""Where a run goes on: its last whole checkpoint, and its files as they were then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from TrainingFactory.protocols import Policy
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.training.ledger import Ledger
from TrainingFactory.training.loop import Progress
from TrainingFactory.training.task_order import Order


async def taken_up(
    run: RunFolder,
    policy: Policy,
    order: Order,
    total: int,
    resuming: bool,
    ahead: bool,
    say: Callable[[str], None],
) -> Progress:
    """Load the last whole checkpoint, if there is one, and cut the files of the run back to it. `ahead`: groups may be
    sampled before their step."""
    progress, offsets = Progress(Ledger(order)), dict[str, int]()
    if state := await _last_state(run, policy, say):
        try:
            ledger = Ledger.of_state(order, state)
        except ValueError as error:
            raise ValueError(f"run {run.name} {error}") from error
        if ledger.under_way and not ahead:
            raise ValueError(
                f"run {run.name} was sampled ahead, and {len(ledger.under_way)} of its groups were under way: it goes "
                "on with optimization.async_rollout=true and optimization.max_staleness above 0"
            )
        progress, offsets = (
            Progress(ledger, state["step"], state["seconds"], state.get("unlogged")),
            state["offsets"],
        )
    await in_thread(run.rewind, offsets)
    if resuming:
        say(
            f"going on after step {progress.done} of {total}"
            + ("" if state else ": there is no checkpoint yet")
        )
    return progress


async def _last_state(run: RunFolder, policy: Policy, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Load the last checkpoint that is whole and return its state; say which ones are not."""
    from TrainingFactory.learning.checkpoints import Damaged  # torch

    found = run.checkpoints()
    for path in reversed(found):
        try:
            return await policy.load(str(path))
        except Damaged as error:
            say(f"WARNING {error}" + ("; the one before it is used" if path != found[0] else ""))
    if found:
        raise ValueError(
            f"no checkpoint of run {run.name} is whole; put back one of {run.path / 'checkpoints'}, or remove that "
            "folder to begin anew"
        )
    return None
