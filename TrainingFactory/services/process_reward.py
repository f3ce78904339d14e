"""Rewards of single turns: the face of `rewards/process_reward.py`."""

from TrainingFactory.rewards.process_reward import ProcessReward, calculate_process_reward

__all__ = ["ProcessReward", "calculate_process_reward"]
