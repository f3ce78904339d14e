"""Trainers that learn from rewards of sampled episodes."""

from TrainingFactory.trainers.trainers import DPOTrainer, GRPOTrainer, PPOTrainer, RFTTrainer

__all__ = ["DPOTrainer", "GRPOTrainer", "PPOTrainer", "RFTTrainer"]
