"""Rewards that are handed to a rollout instead of the environment's own."""

from TrainingFactory.rewards.learned import LearnedReward
from TrainingFactory.rewards.process_reward import ProcessReward

__all__ = ["LearnedReward", "ProcessReward"]
