"""Public names of the first release. Trainers are imported on first use, because they import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from TrainingFactory import __getattr__ as __getattr__

if TYPE_CHECKING:
    from TrainingFactory.trainers.trainers import (
        DPOTrainer,
        GRPOTrainer,
        KTOTrainer,
        PPOTrainer,
        RewardModelTrainer,
        RFTTrainer,
        SFTTrainer,
    )

__all__ = [
    "DPOTrainer", "GRPOTrainer", "KTOTrainer", "PPOTrainer", "RFTTrainer", "RewardModelTrainer", "SFTTrainer",
]  # fmt: skip
