"""Trainers that learn from existing dialogues: demonstrations, pairs and labels."""

from TrainingFactory.trainers.trainers import DPOTrainer, KTOTrainer, SFTTrainer

__all__ = ["DPOTrainer", "KTOTrainer", "SFTTrainer"]
