"""Rewards by rules: `reward.type: rule_based`."""

from TrainingFactory.rewards.rules.rule_based import RULES, make_rule, make_rule_from_options

__all__ = ["RULES", "make_rule", "make_rule_from_options"]
