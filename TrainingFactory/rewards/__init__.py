"""Rewards that are handed to a rollout instead of the environment's own."""

from TrainingFactory.rewards.learned import LearnedReward

__all__ = ["LearnedReward"]
