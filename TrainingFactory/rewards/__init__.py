"""Rewards that replace the environment's own reward in a rollout. Import rules, verifiers and judges from
rule_based.py, tool_verified.py and model_judge.py."""

from TrainingFactory.rewards.adapt import Unscored, as_reward
from TrainingFactory.rewards.combined import Combined
from TrainingFactory.rewards.learned import LearnedReward
from TrainingFactory.rewards.process_reward import ProcessReward, calculate_process_reward

__all__ = ["Combined", "LearnedReward", "ProcessReward", "Unscored", "as_reward", "calculate_process_reward"]
