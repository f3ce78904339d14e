"""What users call. Trainers are imported on first use, so that looking at a run costs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TrainingFactory.services.reward_model import RewardModelTrainer
    from TrainingFactory.services.rl_trainer import GRPOTrainer, PPOTrainer, RFTTrainer
    from TrainingFactory.services.sft_trainer import DPOTrainer, KTOTrainer, SFTTrainer

_HOMES = {
    "DPOTrainer": "sft_trainer",
    "GRPOTrainer": "rl_trainer",
    "KTOTrainer": "sft_trainer",
    "PPOTrainer": "rl_trainer",
    "RFTTrainer": "rl_trainer",
    "RewardModelTrainer": "reward_model",
    "SFTTrainer": "sft_trainer",
}
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
