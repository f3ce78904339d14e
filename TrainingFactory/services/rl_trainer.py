"""The trainers that learn from rewards of the episodes which they sample."""

from __future__ import annotations

from typing import Any, Unpack

from TrainingFactory.services.keywords import GRPOKeywords, PPOKeywords, RFTKeywords
from TrainingFactory.services.sft_trainer import DPOTrainer
from TrainingFactory.services.trainers import Trainer

__all__ = ["DPOTrainer", "GRPOTrainer", "PPOTrainer", "RFTTrainer"]


class GRPOTrainer(Trainer):
    """Learn from rewards: `GRPOTrainer(model="qwen3-4b", environment="search", num_epochs=3).train()`."""

    algorithm = "grpo"

    def __init__(self, model: Any = None, environment: Any = None, **options: Unpack[GRPOKeywords]) -> None:
        super().__init__(model, environment, **options)


class PPOTrainer(Trainer):
    """Learn from rewards with a critic; one episode of a task is enough: `PPOTrainer(..., group_size=1)`."""

    algorithm = "ppo"

    def __init__(self, model: Any = None, environment: Any = None, **options: Unpack[PPOKeywords]) -> None:
        super().__init__(model, environment, **options)


class RFTTrainer(Trainer):
    """Sample, keep the episodes that the reward accepts, and learn them as demonstrations."""

    algorithm = "rft"

    def __init__(self, model: Any = None, environment: Any = None, **options: Unpack[RFTKeywords]) -> None:
        super().__init__(model, environment, **options)
