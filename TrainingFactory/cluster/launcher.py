"""What torchrun and `accelerate launch` tell a process by variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
SHARDED = "weights, gradients and optimiser are sharded over all processes by themselves"
# Variables of `accelerate launch`, and what to tell of those that ask for something.
UNUSED = {
    "ACCELERATE_USE_FSDP": f"its FSDP plug-in is not needed, and not used: {SHARDED}",
    "ACCELERATE_MIXED_PRECISION": "it is not used: model.dtype says what is computed in",
}


@dataclass(slots=True, frozen=True)
class Launched:
    """Says which of `count` processes this one is; `device` is its number on its machine."""

    rank: int
    count: int
    device: int


def launched() -> Launched | None:
    """Return what a launcher has said; None where there is none, or it has started one process alone."""
    given = {name: os.environ.get(name, "") for name in LAUNCHER}
    if given["WORLD_SIZE"] in ("", "1"):
        return None
    if (
        not all(given[name].isdigit() for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
        or not given["MASTER_ADDR"]
    ):
        told = ", ".join(f"{name} {text or 'is not set'}" for name, text in given.items())
        raise ValueError(
            f"WORLD_SIZE asks for several processes, and other variables are wrong ({told}): start them by torchrun or "
            "accelerate launch, or take compute.learners and unset WORLD_SIZE"
        )
    return Launched(int(given["RANK"]), int(given["WORLD_SIZE"]), int(given["LOCAL_RANK"] or given["RANK"]))


def launcher_notes() -> list[str]:
    """Return what to say of options of `accelerate launch` that are not used; raise for what cannot be."""
    asked = {name: text for name, text in os.environ.items() if text.lower() not in ("", "false", "no")}
    if "ACCELERATE_USE_DEEPSPEED" in asked:
        raise ValueError(
            "the launcher asks for DeepSpeed (ACCELERATE_USE_DEEPSPEED), which is not supported: leave --use_deepspeed "
            f"and deepspeed_config out. {SHARDED.capitalize()}, as many as the launcher or compute.learners start"
        )
    return [f"{name}={asked[name]}: {text}" for name, text in UNUSED.items() if name in asked]
