"""`reward.type: rule_based`: rules by name. Each compares what the model itself said at the end with what is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from TrainingFactory.options import OptionError, make_named
from TrainingFactory.protocols import RewardFunction
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.rewards.rules.base import OnlyIf
from TrainingFactory.rewards.rules.choice import Choice
from TrainingFactory.rewards.rules.code import CodeTests
from TrainingFactory.rewards.rules.form import Format, Length, Pattern
from TrainingFactory.rewards.rules.json_answers import JsonMatch, SchemaMatch
from TrainingFactory.rewards.rules.maths import Maths
from TrainingFactory.rewards.rules.numeric import Auto, Numeric
from TrainingFactory.rewards.rules.sql import SqlResult
from TrainingFactory.rewards.rules.text import F1, Contains, Exact, ExactMatch, Normalised

_COMPARE_ANSWERS = (Auto, Exact, Normalised, Numeric, Choice, Contains, ExactMatch, F1, Maths, JsonMatch)
_LOOK_AT_FORM = (SchemaMatch, Pattern, Format, Length)
_ASK_A_TOOL = (CodeTests, SqlResult)
RULES: dict[str, Any] = {kind.rule: kind for kind in (*_COMPARE_ANSWERS, *_LOOK_AT_FORM, *_ASK_A_TOOL)}


def make_rule(rule: str = "auto", **options: Any) -> RewardFunction:
    """Return a reward by its name in RULES and the options of its class; ValueError with the nearest name for a wrong
    one. `only_if` is another rule: this one gives something only where that one gives all there is."""
    return rule_from_options({"rule": rule, **options})


def rule_from_options(options: Mapping[str, Any] | str) -> RewardFunction:
    """Return the rule that a config asks for: `{}`, `numeric`, or `{rule: numeric, only_if: exact}`."""
    if not isinstance(options, Mapping):
        return make_named(RULES, options, "rule", "rule")
    options = {"rule": "auto", **options}
    condition = options.pop("only_if", None)
    rule = make_named(RULES, options, "rule", "rule")
    if condition is None:
        return rule
    try:
        return OnlyIf(as_reward(rule), as_reward(rule_from_options(condition)))
    except OptionError as error:
        raise error.within("only_if") from None
