"""Models that score dialogues: their trainer, and a pool of workers."""

from TrainingFactory.assembly.reward_pool import DistributedRewardModel
from TrainingFactory.trainers.trainers import RewardModelTrainer

__all__ = ["DistributedRewardModel", "RewardModelTrainer"]
