"""Environment variables set by torchrun and `accelerate launch`."""

from __future__ import annotations

import os
from dataclasses import dataclass

LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
SHARDING_NOTE = "TrainingFactory shards weights, gradients and optimizer states over all learners itself"
# Variable of `accelerate launch` -> note that it is ignored.
IGNORED_VARIABLES = {
    "ACCELERATE_USE_FSDP": f"ignored, Accelerate's FSDP plug-in is not needed: {SHARDING_NOTE}",
    "ACCELERATE_MIXED_PRECISION": "ignored: model.dtype sets the precision",
}


@dataclass(slots=True, frozen=True)
class LaunchedProcess:
    """The rank of this process among `num_processes` processes of a launcher."""

    rank: int
    num_processes: int
    local_rank: int


def find_launched_process() -> LaunchedProcess | None:
    """Return this process's rank as set by a launcher; None without a launcher or with a single process."""
    env = os.environ
    if "RANK" not in env or env.get("WORLD_SIZE", "1") == "1":
        return None
    return LaunchedProcess(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", env["RANK"])))


def list_launcher_notes() -> list[str]:
    """Return a note for each ignored option of `accelerate launch`; raise ValueError for an unsupported one."""
    options = {name: text for name, text in os.environ.items() if text.lower() not in ("", "false", "no")}
    if "ACCELERATE_USE_DEEPSPEED" in options:
        raise ValueError(
            "DeepSpeed is not supported (ACCELERATE_USE_DEEPSPEED is set). Remove it and its deepspeed_config from the "
            f"launcher's config; {SHARDING_NOTE} (compute.learners, or the launcher's processes)"
        )
    return [f"{name}={options[name]}: {text}" for name, text in IGNORED_VARIABLES.items() if name in options]
