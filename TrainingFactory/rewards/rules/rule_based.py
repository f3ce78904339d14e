"""`reward.type: rule_based`: rules by name. Each compares what the model itself said at the end with what is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from TrainingFactory.common.options import make_named
from TrainingFactory.protocols import RewardFunction
from TrainingFactory.rewards.rules.choice import Choice
from TrainingFactory.rewards.rules.code import CodeTests
from TrainingFactory.rewards.rules.form import Format, Length, Pattern
from TrainingFactory.rewards.rules.json_answers import JsonMatch, SchemaMatch
from TrainingFactory.rewards.rules.numeric import Auto, Maths, Numeric
from TrainingFactory.rewards.rules.sql import SqlResult
from TrainingFactory.rewards.rules.text import F1, Contains, Exact, ExactMatch, Normalised

_COMPARE_ANSWERS = (Auto, Exact, Normalised, Numeric, Choice, Contains, ExactMatch, F1, Maths, JsonMatch)
_LOOK_AT_FORM = (SchemaMatch, Pattern, Format, Length)
_ASK_A_TOOL = (CodeTests, SqlResult)
RULES: dict[str, Any] = {kind.rule: kind for kind in (*_COMPARE_ANSWERS, *_LOOK_AT_FORM, *_ASK_A_TOOL)}


def make_rule(rule: str = "auto", **options: Any) -> RewardFunction:
    """Return a reward by its name in RULES and its options."""
    return rule_from_options({"rule": rule, **options})


def rule_from_options(options: Mapping[str, Any] | str) -> RewardFunction:
    """Return the rule that a config asks for: `{}`, `numeric`, or `{rule: numeric, tolerance: 0.1}`."""
    if isinstance(options, Mapping):
        options = {"rule": "auto", **options}
    return make_named(RULES, options, "rule", "rule")
