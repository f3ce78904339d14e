"""The trainers that learn from dialogues which exist: demonstrations, pairs and labels."""

from __future__ import annotations

from typing import Any, Unpack

from TrainingFactory.services.keywords import DPOKeywords, KTOKeywords, SFTKeywords
from TrainingFactory.services.trainers import Trainer


class SFTTrainer(Trainer):
    """Learn from demonstrations: those in `dataset` (a file, a hub id, or OpenAI-style conversations), or those that
    the environment's own expert plays."""

    algorithm = "sft"

    def __init__(self, model: Any = None, environment: Any = None, **options: Unpack[SFTKeywords]) -> None:
        super().__init__(model, environment, **options)


class DPOTrainer(Trainer):
    """Learn from pairs of a better and a worse dialogue: `DPOTrainer(dataset="pairs.jsonl", beta=0.2).train()`."""

    algorithm = "dpo"

    def __init__(self, model: Any = None, environment: Any = None, **options: Unpack[DPOKeywords]) -> None:
        super().__init__(model, environment, **options)


class KTOTrainer(Trainer):
    """Learn from single dialogues in `dataset` that are labelled good or bad."""

    algorithm = "kto"

    def __init__(self, model: Any = None, environment: Any = None, **options: Unpack[KTOKeywords]) -> None:
        super().__init__(model, environment, **options)
