"""`reward.type: rule_based`: table of the rules, which score the model's final text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from TrainingFactory.common.options import make_named
from TrainingFactory.protocols import RewardFunction
from TrainingFactory.rewards.rules.choice import ChoiceRule
from TrainingFactory.rewards.rules.code import CodeTests
from TrainingFactory.rewards.rules.form import FormatRule, LengthRule, PatternRule
from TrainingFactory.rewards.rules.json_answers import JsonRule, SchemaRule
from TrainingFactory.rewards.rules.numeric import AutoRule, MathRule, NumericRule
from TrainingFactory.rewards.rules.sql import SqlResult
from TrainingFactory.rewards.rules.text import (
    ContainsRule,
    ExactRule,
    NormalisedRule,
    SquadExactMatchRule,
    SquadF1Rule,
)

_ANSWER_RULES = (
    AutoRule,
    ExactRule,
    NormalisedRule,
    NumericRule,
    ChoiceRule,
    ContainsRule,
    SquadExactMatchRule,
    SquadF1Rule,
    MathRule,
    JsonRule,
)
_FORMAT_RULES = (SchemaRule, PatternRule, FormatRule, LengthRule)
_TOOL_RULES = (CodeTests, SqlResult)
RULES: dict[str, Any] = {cls.rule: cls for cls in (*_ANSWER_RULES, *_FORMAT_RULES, *_TOOL_RULES)}


def make_rule(rule: str = "auto", **options: Any) -> RewardFunction:
    """Return the rule with this name in RULES and these options."""
    return make_rule_from_options({"rule": rule, **options})


def make_rule_from_options(options: Mapping[str, Any] | str) -> RewardFunction:
    """Return the rule of a config value: `{}`, `numeric`, or `{rule: numeric, tolerance: 0.1}`. Default: auto."""
    if isinstance(options, Mapping):
        options = {"rule": "auto", **options}
    return make_named(RULES, options, "rule", "rule")
