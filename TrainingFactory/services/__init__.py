"""What users call. Trainers are imported on first use, so that looking at a run costs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from TrainingFactory import __getattr__ as __getattr__

if TYPE_CHECKING:
    from TrainingFactory.services.reward_model import RewardModelTrainer
    from TrainingFactory.services.rl_trainer import GRPOTrainer, PPOTrainer, RFTTrainer
    from TrainingFactory.services.sft_trainer import DPOTrainer, KTOTrainer, SFTTrainer

__all__ = [
    "DPOTrainer", "GRPOTrainer", "KTOTrainer", "PPOTrainer", "RFTTrainer", "RewardModelTrainer", "SFTTrainer",
]  # fmt: skip
