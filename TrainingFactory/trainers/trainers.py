"""One trainer per algorithm, with the keywords that the algorithm takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from TrainingFactory.trainers.inputs import EnvironmentLike, ModelLike
from TrainingFactory.trainers.trainer import Trainer

if TYPE_CHECKING:
    from TrainingFactory.trainers.keyword_types import (  # pyright: ignore[reportMissingModuleSource]
        DPOKeywords,
        GRPOKeywords,
        KTOKeywords,
        PPOKeywords,
        RewardModelKeywords,
        RFTKeywords,
        SFTKeywords,
    )


class SFTTrainer(Trainer):
    """Learn from demonstrations: those in `dataset` (a file, a hub id, or OpenAI-style conversations), or episodes
    played by the environment's expert."""

    algorithm = "sft"

    def __init__(
        self,
        model: ModelLike | None = None,
        environment: EnvironmentLike | None = None,
        **options: Unpack[SFTKeywords],
    ) -> None:
        super().__init__(model, environment, **options)


class DPOTrainer(Trainer):
    """Learn from pairs of a better and a worse dialogue: `DPOTrainer(dataset="pairs.jsonl", beta=0.2).train()`."""

    algorithm = "dpo"

    def __init__(
        self,
        model: ModelLike | None = None,
        environment: EnvironmentLike | None = None,
        **options: Unpack[DPOKeywords],
    ) -> None:
        super().__init__(model, environment, **options)


class KTOTrainer(Trainer):
    """Learn from dialogues in `dataset` that are labelled good or bad."""

    algorithm = "kto"

    def __init__(
        self,
        model: ModelLike | None = None,
        environment: EnvironmentLike | None = None,
        **options: Unpack[KTOKeywords],
    ) -> None:
        super().__init__(model, environment, **options)


class GRPOTrainer(Trainer):
    """Learn from rewards: `GRPOTrainer(model="qwen3-4b", environment="search", num_epochs=3).train()`."""

    algorithm = "grpo"

    def __init__(
        self,
        model: ModelLike | None = None,
        environment: EnvironmentLike | None = None,
        **options: Unpack[GRPOKeywords],
    ) -> None:
        super().__init__(model, environment, **options)


class PPOTrainer(Trainer):
    """Learn from rewards with a critic; one episode per task is enough: `PPOTrainer(..., group_size=1)`."""

    algorithm = "ppo"

    def __init__(
        self,
        model: ModelLike | None = None,
        environment: EnvironmentLike | None = None,
        **options: Unpack[PPOKeywords],
    ) -> None:
        super().__init__(model, environment, **options)


class RFTTrainer(Trainer):
    """Sample episodes, keep those that the reward accepts, and train on them as demonstrations."""

    algorithm = "rft"

    def __init__(
        self,
        model: ModelLike | None = None,
        environment: EnvironmentLike | None = None,
        **options: Unpack[RFTKeywords],
    ) -> None:
        super().__init__(model, environment, **options)


class RewardModelTrainer(Trainer):
    """Learn to score dialogues from pairs in `dataset`, or single turns from labels with `kind="process"`."""

    algorithm = "reward_model"

    def __init__(
        self,
        model: ModelLike | None = None,
        environment: EnvironmentLike | None = None,
        **options: Unpack[RewardModelKeywords],
    ) -> None:
        super().__init__(model, environment, **options)
