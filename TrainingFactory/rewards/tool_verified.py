"""Rewards by executing the model's answer: `reward.type: tool_verified`."""

from TrainingFactory.rewards.rules.tool_verified import VERIFIERS, make_rule_or_verifier, make_verifier

__all__ = ["VERIFIERS", "make_rule_or_verifier", "make_verifier"]
