"""`reward.type: rule_based`: rules by name. Each compares what the model itself said at the end with what is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from TrainingFactory.protocols import RewardFunction
from TrainingFactory.rewards.checks import check_choice
from TrainingFactory.rewards.rules.base import OnlyIf
from TrainingFactory.rewards.rules.code import CodeTests
from TrainingFactory.rewards.rules.form import Format, JsonMatch, Length, Pattern, SchemaMatch
from TrainingFactory.rewards.rules.sql import SqlResult
from TrainingFactory.rewards.rules.text import (
    F1,
    Auto,
    Choice,
    Contains,
    Exact,
    ExactMatch,
    Maths,
    Normalised,
    Numeric,
)
from TrainingFactory.tools.builtin.making import OptionError, call_with

RULES: dict[str, Any] = {
    kind.rule: kind
    for kind in (
        Auto,
        Exact,
        Normalised,
        Numeric,
        Choice,
        Contains,
        ExactMatch,
        F1,
        Maths,
        JsonMatch,
        SchemaMatch,
        Pattern,
        Format,
        Length,
        CodeTests,
        SqlResult,
    )
}


def make_rule(rule: str = "auto", **options: Any) -> RewardFunction:
    """A reward by its name in RULES and the options of its class; ValueError with the nearest name for a wrong one.
    `only_if` is the options of another rule: this one pays only where that one gives all there is."""
    check_choice("rule", rule, RULES)
    options = dict(options)
    condition = options.pop("only_if", None)
    made = call_with(RULES[rule], options, f"rule {rule}")
    if condition is None:
        return made
    try:
        return OnlyIf(made, rule_from_options(condition))
    except OptionError as error:
        raise error.within("only_if") from error


def rule_from_options(options: Mapping[str, Any] | str) -> RewardFunction:
    """What a config says: `{}`, `numeric`, or `{rule: numeric, tolerance: 0.01, extract: boxed}`."""
    if isinstance(options, str):
        options = {"rule": options}
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ValueError(
            f"a rule is its name or a mapping such as {{rule: numeric, extract: boxed}}, not {options!r}"
        )
    return make_rule(**options)
