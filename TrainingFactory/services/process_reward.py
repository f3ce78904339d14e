"""Rewards of single turns: the face of `rewards/process_reward.py`."""

from TrainingFactory.rewards.process_reward import ProcessReward

__all__ = ["ProcessReward"]
