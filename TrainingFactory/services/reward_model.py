"""The trainer of models that score dialogues."""

from __future__ import annotations

from typing import Any, Unpack

from TrainingFactory.services.keywords import RewardModelKeywords
from TrainingFactory.services.trainers import Trainer


class RewardModelTrainer(Trainer):
    """Learn to score dialogues from pairs in `dataset`, or with `kind="process"` their turns from labels."""

    algorithm = "reward_model"

    def __init__(
        self, model: Any = None, environment: Any = None, **options: Unpack[RewardModelKeywords]
    ) -> None:
        super().__init__(model, environment, **options)
