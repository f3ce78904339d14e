"""`reward.type: rule_based`: rules by name. Each compares what the model itself said at the end with what is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from TrainingFactory.options import OptionError, make_named
from TrainingFactory.protocols import Episode, RewardFunction
from TrainingFactory.rewards.adapt import Adapted, as_reward
from TrainingFactory.rewards.rules.choice import Choice
from TrainingFactory.rewards.rules.code import CodeTests
from TrainingFactory.rewards.rules.form import Format, Length, Pattern
from TrainingFactory.rewards.rules.json_answers import JsonMatch, SchemaMatch
from TrainingFactory.rewards.rules.maths import Maths
from TrainingFactory.rewards.rules.numeric import Auto, Numeric
from TrainingFactory.rewards.rules.sql import SqlResult
from TrainingFactory.rewards.rules.text import F1, Contains, Exact, ExactMatch, Normalised
from TrainingFactory.types import Reward

_COMPARE_ANSWERS = (Auto, Exact, Normalised, Numeric, Choice, Contains, ExactMatch, F1, Maths, JsonMatch)
_LOOK_AT_FORM = (SchemaMatch, Pattern, Format, Length)
_ASK_A_TOOL = (CodeTests, SqlResult)
RULES: dict[str, Any] = {kind.rule: kind for kind in (*_COMPARE_ANSWERS, *_LOOK_AT_FORM, *_ASK_A_TOOL)}


@dataclass(slots=True, frozen=True)
class OnlyIf:
    """Gives what `rule` gives if `condition` gives all there is, else 0: no bonus for short wrong answers."""

    rule: Adapted
    condition: Adapted

    async def __call__(self, episode: Episode) -> Reward:
        condition, reward = await self.condition(episode), await self.rule(episode)
        outcome = reward.outcome if condition.outcome >= 1 else 0.0
        return Reward(outcome, reward.steps, reward.parts | condition.parts)


def make_rule(rule: str = "auto", **options: Any) -> RewardFunction:
    """Return a reward by its name in RULES and its options; with `only_if` 0 where that rule gives not all."""
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
