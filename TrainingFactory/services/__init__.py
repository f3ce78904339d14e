"""What users call. Trainers are imported on first use, so that looking at a run costs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TrainingFactory.services.trainers import (
        DPOTrainer,
        GRPOTrainer,
        KTOTrainer,
        PPOTrainer,
        RewardModelTrainer,
        RFTTrainer,
        SFTTrainer,
    )

__all__ = [
    "DPOTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "PPOTrainer",
    "RFTTrainer",
    "RewardModelTrainer",
    "SFTTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from TrainingFactory.services import trainers

    return getattr(trainers, name)
