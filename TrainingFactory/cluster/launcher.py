"""Read what torchrun and `accelerate launch` tell a process by variables."""

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
SHARDED = "weights, gradients and optimiser are sharded over all learners by themselves"
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
    given = os.environ
    if "RANK" not in given or given.get("WORLD_SIZE", "1") == "1":
        return None
    return Launched(int(given["RANK"]), int(given["WORLD_SIZE"]), int(given.get("LOCAL_RANK", given["RANK"])))


def launcher_notes() -> list[str]:
    """Return what to say of options of `accelerate launch` that are not used; raise for what cannot be."""
    asked = {name: text for name, text in os.environ.items() if text.lower() not in ("", "false", "no")}
    if "ACCELERATE_USE_DEEPSPEED" in asked:
        text = "the launcher asks for DeepSpeed (ACCELERATE_USE_DEEPSPEED), which is not supported: leave it out, with"
        raise ValueError(
            f"{text} its deepspeed_config; {SHARDED} (compute.learners, or the launcher's processes)"
        )
    return [f"{name}={asked[name]}: {text}" for name, text in UNUSED.items() if name in asked]
