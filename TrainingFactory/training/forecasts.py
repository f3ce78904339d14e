"""Warn early of checkpoints that do not fit on the disk, and of a run that cannot stop in the time that it gets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from TrainingFactory.config.schema import LoggingSection

GRACE = 30.0  # seconds between SIGTERM and SIGKILL, Kubernetes' default
DISK_SPEED = 5e8  # bytes of a checkpoint written, synced and hashed in a second, until one was measured


@dataclass(slots=True)
class StopForecast:
    """Adds up what happens after SIGTERM, and warns once where that takes longer than Kubernetes waits by default."""

    saving: float  # seconds of a checkpoint
    updating: float = 0.0  # seconds of an update
    warned: bool = False

    def warning(self) -> str | None:
        seconds = self.updating + self.saving
        if self.warned or seconds <= GRACE:
            return None
        self.warned = True
        return (
            f"after SIGTERM this run takes about {seconds:.0f} s to stop without losing work (update "
            f"{self.updating:.0f} s, checkpoint {self.saving:.0f} s), but Kubernetes kills a pod after {GRACE:.0f} s: "
            f"set terminationGracePeriodSeconds: {15 * math.ceil(seconds / 10)}, or TimeoutStopSec in systemd, "
            "docker stop --time, KillWait in Slurm"
        )


@dataclass(slots=True, frozen=True)
class CheckpointSpace:
    """Tells how much disk space the checkpoints of a run take when they are most."""

    logging: LoggingSection
    steps: int
    model: int  # bytes of the model in a checkpoint
    state: int  # bytes that only training needs

    def count(self, logging: LoggingSection) -> int:
        """Return the largest number of checkpoints: an old one is removed when a new one is complete."""
        every, kept = logging.checkpoint_every, 0
        if logging.keep_every is not None:
            kept = self.steps // math.lcm(every, logging.keep_every)
        made = math.ceil(self.steps / every) + logging.keep_best
        return min(made, logging.keep_checkpoints + 1 + kept + logging.keep_best)

    def needed(self, logging: LoggingSection) -> int:
        """Return the bytes of all of them."""
        count = self.count(logging)
        states = min(count, 2) if logging.optimizer_state == "newest" else count
        return count * self.model + states * self.state

    def warning(self, free: int, folder: str) -> str | None:
        """Return a warning where they do not fit into the free bytes, with the largest settings that do."""
        needed, size = self.needed(self.logging), self.model + self.state
        if needed <= free:
            return None
        remedies = [self._fitting({}, free), self._fitting({"optimizer_state": "newest"}, free)]
        if not any(remedies) and self.logging.keep_every is not None:
            remedies = [self._fitting({"keep_every": None, "optimizer_state": "newest"}, free)]
        remedy = f"set {' or '.join(filter(None, remedies))}" if any(remedies) else "free some"
        return (
            f"{folder} has {free / 1e9:.1f} GB of free disk space, but {self.count(self.logging)} checkpoints of about "
            f"{size / 1e9:.1f} GB need {needed / 1e9:.1f} GB: {remedy}, or choose another logging.output_dir"
        )

    def _fitting(self, changes: dict[str, object], free: int) -> str | None:
        """Return these changes with the largest `keep_checkpoints` that makes them fit; None where none does."""
        for keep in range(self.logging.keep_checkpoints, 0, -1):
            changed = self.logging.model_copy(update={"keep_checkpoints": keep} | changes)
            if self.needed(changed) <= free:
                chosen = changes | (
                    {"keep_checkpoints": keep} if keep < self.logging.keep_checkpoints else {}
                )
                written = (
                    f"logging.{key}={'null' if value is None else value}" for key, value in chosen.items()
                )
                return " with ".join(written)
        return None
