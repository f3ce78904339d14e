"""Early warnings: checkpoints that will not fit on the disk, a run that takes too long to stop, rows of folded
episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from TrainingFactory.config.schema import ContextSection, LoggingSection

GRACE_SECONDS = 30.0  # seconds between SIGTERM and SIGKILL, Kubernetes' default
DISK_BYTES_PER_SECOND = 5e8  # bytes/s to write, sync and hash a checkpoint, until one has been measured


@dataclass(slots=True)
class StopForecast:
    """Estimates the time to stop after SIGTERM, and warns once if it exceeds Kubernetes' default grace period."""

    save_seconds: float  # seconds to write a checkpoint
    update_seconds: float = 0.0  # seconds of an update
    has_warned: bool = False

    def make_warning(self) -> str | None:
        seconds = self.update_seconds + self.save_seconds
        if self.has_warned or seconds <= GRACE_SECONDS:
            return None
        self.has_warned = True
        return (
            f"After SIGTERM this run needs about {seconds:.0f} s to stop without losing work (update "
            f"{self.update_seconds:.0f} s, checkpoint {self.save_seconds:.0f} s), but Kubernetes kills a pod after "
            f"{GRACE_SECONDS:.0f} s. Set terminationGracePeriodSeconds: {15 * math.ceil(seconds / 10)} (systemd: "
            "TimeoutStopSec, Docker: docker stop --time, Slurm: KillWait)"
        )


@dataclass(slots=True, frozen=True)
class CheckpointSpace:
    """Estimates the peak disk space of a run's checkpoints."""

    logging: LoggingSection
    num_steps: int
    model_bytes: int  # of the model in a checkpoint
    state_bytes: int  # of the training state in a checkpoint

    def count_checkpoints(self, logging: LoggingSection) -> int:
        """Return the peak number of checkpoints; an old one is deleted only when a new one is complete."""
        checkpoint_every, num_permanent = logging.checkpoint_every, 0
        if logging.keep_every is not None:
            num_permanent = self.num_steps // math.lcm(checkpoint_every, logging.keep_every)
        num_created = math.ceil(self.num_steps / checkpoint_every) + logging.keep_best
        return min(num_created, logging.keep_checkpoints + 1 + num_permanent + logging.keep_best)

    def compute_bytes(self, logging: LoggingSection) -> int:
        """Return the peak size of all checkpoints in bytes."""
        num_checkpoints = self.count_checkpoints(logging)
        num_states = min(num_checkpoints, 2) if logging.optimizer_state == "newest" else num_checkpoints
        return num_checkpoints * self.model_bytes + num_states * self.state_bytes

    def make_warning(self, free_bytes: int, folder: str) -> str | None:
        """Return a warning if the checkpoints do not fit into `free_bytes` bytes, with the largest settings that do."""
        needed_bytes, checkpoint_bytes = self.compute_bytes(self.logging), self.model_bytes + self.state_bytes
        if needed_bytes <= free_bytes:
            return None
        remedies = [
            self._find_overrides({}, free_bytes),
            self._find_overrides({"optimizer_state": "newest"}, free_bytes),
        ]
        if not any(remedies) and self.logging.keep_every is not None:
            remedies = [self._find_overrides({"keep_every": None, "optimizer_state": "newest"}, free_bytes)]
        remedy = f"Set {' or '.join(filter(None, remedies))}" if any(remedies) else "Free some"
        return (
            f"{folder} has {free_bytes / 1e9:.1f} GB of free disk space, but {self.count_checkpoints(self.logging)} "
            f"checkpoints of about {checkpoint_bytes / 1e9:.1f} GB need {needed_bytes / 1e9:.1f} GB. {remedy}, or "
            "choose another logging.output_dir"
        )

    def _find_overrides(self, changes: dict[str, object], free_bytes: int) -> str | None:
        """Return config overrides with which the checkpoints fit into `free_bytes` bytes: `changes`, with the largest
        possible `keep_checkpoints`. None: the checkpoints do not fit."""
        for num_checkpoints in range(self.logging.keep_checkpoints, 0, -1):
            logging_options = self.logging.model_copy(update={"keep_checkpoints": num_checkpoints} | changes)
            if self.compute_bytes(logging_options) <= free_bytes:
                if num_checkpoints < self.logging.keep_checkpoints:
                    changes = changes | {"keep_checkpoints": num_checkpoints}
                overrides = {key: "null" if value is None else value for key, value in changes.items()}
                return " with ".join(f"logging.{key}={text}" for key, text in overrides.items())
        return None


def forecast_rows(context: ContextSection, prompt_tokens: float, turn_tokens: float, num_turns: int) -> int:
    """Estimate the training rows of an episode whose turns each add `turn_tokens` to the first prompt. Assumed folds:
    window and summary restart from the prompt; other kinds remove half of the older turns."""
    num_rows, prompt_size, num_folds = 1, prompt_tokens, 0
    for _ in range(num_turns - 1):
        prompt_size += turn_tokens
        if prompt_size <= context.limit or num_folds >= context.max_folds:
            continue
        kept_tokens = context.keep_turns * turn_tokens
        new_sizes = {"window": prompt_tokens + kept_tokens, "summary": prompt_tokens + context.summary_tokens}
        older_tokens = max(0.0, prompt_size - prompt_tokens - kept_tokens)
        prompt_size = min(prompt_size, new_sizes.get(context.fold, prompt_size - older_tokens / 2))
        num_rows, num_folds = num_rows + 1, num_folds + 1
    return num_rows
