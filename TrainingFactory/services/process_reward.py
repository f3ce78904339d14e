"""Rewards of single turns."""

from TrainingFactory.rewards.process_reward import ProcessReward, calculate_process_reward

__all__ = ["ProcessReward", "calculate_process_reward"]
