"""`reward.type: process_reward`: the outcome plus step rewards for single turns.

A step reward is fixed when its turn ends, which keeps turn-level credit unbiased. So a rule, `rule(trajectory, turn)`,
sees the trajectory as it was at that time; at the last turn, `trajectory.reward` is the outcome, if it was computed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from itertools import islice, zip_longest
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, InvalidOption, OptionError, show_choices
from TrainingFactory.common.user_code import describe_failure
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.adapt import (
    Unscored,
    as_finite,
    as_reward,
    check_scorable,
    environment_reward,
    validate_reward,
)
from TrainingFactory.rewards.combined import combine_rewards
from TrainingFactory.rewards.loading import find_callable
from TrainingFactory.tools.schema import check_arguments, make_validator
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Message, Reward, ToolCall, ToolResult, Trajectory, Turn

StepRule = Callable[[Trajectory, int], float | bool]
# Rule -> attribute of a step.
STEP_ATTRIBUTES = {"correct_tool": "tool_call_correct", "clear_reasoning": "reasoning_clear"}
STEP_REWARDS = {"correct_tool": 0.5, "clear_reasoning": 0.3, "efficient_path": 0.2}
MAX_EXPERT_TURNS = 100
CAP_TOLERANCE = 1e-9
CAPPED_PART, CLAWED_BACK_PART, OUTCOME = "capped", "clawed_back", "outcome"
MIN_WORDS = 5  # distinct words, without numbers, that a reasoning needs
MAX_VALUE_WORDS = 5  # a text of at most that many words is itself a value
MAX_SEARCHED_CHARS = 10_000  # characters of a tool result that are searched for values
# A word; in scripts without spaces (kana, Chinese) a character.
WORD_PATTERN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
# A number, a quoted text that is not a JSON key, or a name: a capitalised word that does not start a sentence, or a
# word with a digit or an underscore.
VALUE_PATTERN = re.compile(
    r"\d+(?:[.,]\d+)*"
    r"|(?<!\w)[\"'`“「《](\w[^\"'`”」》\n]{0,79})[\"'`”」》](?!\s*:)"
    r"|(?<![.!?:] )(?<!^)\b[A-ZÀ-ÞΑ-ΩА-Я]\w+|\b[a-z]\w*[\d_]\w*",
    re.MULTILINE,
)


def _check_claw_back(value: bool | str) -> bool | str:
    if not isinstance(value, bool) and value != "wrong":
        raise ValueError("must be true, false or wrong")
    return value


ClawBack = Annotated[Any, AfterValidator(_check_claw_back)]


def correct_tool(trajectory: Trajectory, turn: int) -> bool:
    """Return whether the turn has calls, and all are expected by the task and succeeded. The task's metadata
    `correct_tool` is a tool, a call ({"name": ..., "arguments": {...}}), or a list of these. Default: all tools."""
    calls = _pair_results(trajectory.turns[turn])
    targets = trajectory.task.metadata.get("correct_tool")
    if targets is None:
        targets = [spec.name for spec in trajectory.tools]
    targets = [targets] if isinstance(targets, str | Mapping) else list(targets)
    return bool(calls) and all(
        _succeeded(result) and any(_matches(call, target) for target in targets) for call, result in calls
    )


def valid_arguments(trajectory: Trajectory, turn: int) -> bool:
    """Return whether the turn has calls, and all of them are well-formed, name an offered tool and fit its schema."""
    specs = {spec.name: spec for spec in trajectory.tools}
    calls = _pair_results(trajectory.turns[turn])
    for call, result in calls:
        spec = specs.get(call.name)
        if spec is None or call.error or (result and result.error in ("schema", "malformed", "unknown")):
            return False
        if check_arguments(spec, make_validator(spec.parameters), call.arguments):
            return False
    return bool(calls)


def no_repeated_call(trajectory: Trajectory, turn: int) -> bool:
    """Return whether the turn has calls, and none repeats an earlier call with the same arguments."""
    earlier_calls = {
        _encode(call) for earlier_turn in trajectory.turns[:turn] for call in earlier_turn.message.tool_calls
    }
    call_keys = [_encode(call) for call in trajectory.turns[turn].message.tool_calls]
    return bool(call_keys) and len(set(call_keys)) == len(call_keys) and earlier_calls.isdisjoint(call_keys)


def error_recovered(trajectory: Trajectory, turn: int) -> bool:
    """Return whether a call of the turn succeeds with a tool whose last call had failed."""
    is_ok_by_tool: dict[str, bool] = {}
    for earlier_turn in trajectory.turns[:turn]:
        is_ok_by_tool |= {call.name: _succeeded(result) for call, result in _pair_results(earlier_turn)}
    current_calls = _pair_results(trajectory.turns[turn])
    return any(_succeeded(result) and is_ok_by_tool.get(call.name) is False for call, result in current_calls)


def clear_reasoning(trajectory: Trajectory, turn: int) -> bool:
    """Return whether the turn gives a reason, as reasoning or as text next to its calls: at least MIN_WORDS distinct
    words that do not repeat an earlier text and that cite a value from the task or from an earlier tool result."""
    words = _to_words(_get_reasoning(trajectory.turns[turn]))
    if len({word for word in words if not word.isdigit()}) < MIN_WORDS:
        return False
    earlier_turns = trajectory.turns[:turn]
    request = trajectory.task.prompt
    prompt = trajectory.prompt or ([Message("user", request)] if isinstance(request, str) else request)
    messages = [*prompt, *(reply for earlier_turn in earlier_turns for reply in earlier_turn.replies)]
    results = [
        result.content for earlier_turn in earlier_turns for result in earlier_turn.tool_results if result.ok
    ]
    texts = [message.content for message in messages if message.role == "user"]
    texts += [result[:MAX_SEARCHED_CHARS] for result in reversed(results)]
    if any(words == _to_words(text) for text in (*texts, *map(_get_reasoning, earlier_turns))):
        return False
    reason = f" {' '.join(words)} "
    return any(f" {' '.join(_to_words(value))} " in reason for text in texts for value in _find_values(text))


def efficient_path(trajectory: Trajectory, turn: int) -> float:
    """Return the outcome (at most 1) times the efficiency at the last turn of a successful episode; else 0. The
    efficiency is the task's `shortest` / turns, by default the share of turns without failed or repeated calls."""
    outcome = min(1.0, trajectory.reward.outcome) if trajectory.reward else 0.0
    if trajectory.status != "done" or turn != len(trajectory.turns) - 1 or outcome <= 0:
        return 0.0
    min_turns = trajectory.task.metadata.get("shortest")
    num_turns = sum(not earlier_turn.summary for earlier_turn in trajectory.turns)
    if min_turns is None:
        num_wasted_turns = sum(
            not all(_succeeded(result) for _, result in _pair_results(earlier_turn))
            or not no_repeated_call(trajectory, index)
            for index, earlier_turn in enumerate(trajectory.turns)
            if earlier_turn.message.tool_calls
        )
        return outcome * (1.0 - num_wasted_turns / num_turns)
    if not min_turns > 0:
        raise ValueError(f"the task's metadata shortest is {min_turns!r}; it must be a number above 0")
    return outcome * min(1.0, min_turns / num_turns)


_CALL_RULES = (correct_tool, valid_arguments, no_repeated_call, error_recovered)
_BUILT_IN_RULES = (*_CALL_RULES, clear_reasoning, efficient_path)
PROCESS_RULES: dict[str, StepRule] = {rule.__name__: rule for rule in _BUILT_IN_RULES}


def _pair_results(turn: Turn) -> list[tuple[ToolCall, ToolResult | None]]:
    """Return the calls with their results; None if the environment reported no result."""
    calls = turn.message.tool_calls
    return list(zip_longest(calls, turn.tool_results[: len(calls)]))


def _succeeded(result: ToolResult | None) -> bool:
    return result is not None and result.ok


def _matches(call: ToolCall, expected_call: str | Mapping[str, Any]) -> bool:
    """Return whether the call is to the expected tool and has at least the expected arguments."""
    if isinstance(expected_call, str):
        return call.name == expected_call
    arguments = expected_call.get("arguments") or {}
    return call.name == expected_call.get("name") and arguments.items() <= call.arguments.items()


def _to_words(text: str) -> list[str]:
    return WORD_PATTERN.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text.lower()))


def _find_values(text: str) -> list[str]:
    """Return the numbers, names and quoted texts in a text, and the text itself if it is short."""
    candidates = [text] if len(_to_words(text)) <= MAX_VALUE_WORDS else []
    return candidates + [match[1] or match[0] for match in VALUE_PATTERN.finditer(text)]


def _encode(call: ToolCall) -> str:
    return f"{call.name} {json.dumps(call.arguments, sort_keys=True, default=str)}"


def _get_reasoning(turn: Turn) -> str:
    message = turn.message
    return message.reasoning or (message.content if message.tool_calls else "")


@dataclass(config=STRICT, eq=False)
class ProcessReward:
    """Outcome plus step rewards. `step_rewards` maps rules (from PROCESS_RULES or `rules`) to their weights."""

    outcome_weight: float = 1.0
    step_rewards: Mapping[str, float] | None = None
    outcome: Any = None  # a reward; None: the environment's own; not computed if nothing depends on it
    _: KW_ONLY
    # once: a rule pays the first time it holds, a graded rule its improvement over the best value so far.
    pay: Literal["once", "per_turn"] = "once"
    # Limit of the sum of step rewards at any turn. None: the sum of the positive weights.
    cap: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    # Subtract the step rewards at the last turn. True: if the episode does not finish by itself; "wrong": also if its
    # outcome is 0 or less.
    claw_back: ClawBack = True
    rules: Mapping[str, StepRule] | None = None
    timeout: float | None = 60.0  # seconds for the outcome
    pool: Any = None  # worker processes that run `score`; None: a thread

    def __post_init__(self) -> None:
        available_rules = PROCESS_RULES | dict(self.rules or {})
        self._weights = dict(STEP_REWARDS if self.step_rewards is None else self.step_rewards)
        for name in self._weights:
            if name not in available_rules:
                raise OptionError(InvalidOption(f"step_rewards.{name}", show_choices(name, available_rules)))
        self._rules = {name: available_rules[name] for name in self._weights}
        positive_sum = sum(weight for weight in self._weights.values() if weight > 0)
        self._cap = positive_sum if self.cap is None else self.cap
        outcome = environment_reward if self.outcome is None else self.outcome
        self.outcome = as_reward(outcome, OUTCOME, self.timeout)

    async def __call__(self, episode: Episode) -> Reward:
        trajectory = await self._with_outcome(episode)
        if self.pool is not None:
            return await self.pool.compute(trajectory)
        return await in_thread(self.score, trajectory)

    async def _with_outcome(self, episode: Episode) -> Trajectory:
        """Return the input of `score`: the trajectory with the outcome and, if a rule needs it, the length of the
        expert's solution. Both need the open environment."""
        uses_efficient_path = bool(self._weights.get("efficient_path"))
        if not (self.outcome_weight or uses_efficient_path or self.claw_back == "wrong"):
            # An unused outcome is not computed, so that it costs nothing and cannot fail.
            return dataclasses.replace(episode.trajectory, reward=None)
        outcome = await self.outcome(episode)
        task = episode.task
        if uses_efficient_path and (num_expert_turns := _count_expert_turns(episode.environment)):
            task = dataclasses.replace(task, metadata={"shortest": num_expert_turns} | task.metadata)
        return dataclasses.replace(episode.trajectory, reward=outcome, task=task)

    def score(self, trajectory: Trajectory) -> Reward:
        """Add the step rewards to the trajectory's outcome; without an outcome, return the step rewards alone."""
        step_reward = self.reward_turns(trajectory, trajectory.reward)
        return step_reward if trajectory.reward is None else self.add_outcome(trajectory.reward, step_reward)

    def reward_turns(self, trajectory: Trajectory, outcome: Reward | None = None) -> Reward:
        """Return the step rewards; `parts` has the sum of each rule, and the capped and clawed back amounts."""
        check_scorable(trajectory)
        value_ranges = dict.fromkeys(self._rules, (0.0, 0.0))  # smallest and largest value of each rule
        parts = dict.fromkeys(self._rules, 0.0)
        step_rewards: list[float] = []
        reward_sum = capped_sum = clawed_back_sum = 0.0
        for turn in range(len(trajectory.turns)):
            step_reward = 0.0
            visible_trajectory = _truncate_trajectory(trajectory, turn, outcome)
            if trajectory.turns[turn].summary:  # no rule is about summaries
                step_rewards.append(0.0)
                continue
            for name, rule in self._rules.items():
                rule_value = _evaluate_rule(name, rule, visible_trajectory, turn)
                low, high = value_ranges[name]
                value_ranges[name] = (min(low, rule_value), max(high, rule_value))
                if self.pay == "once":  # only the amount outside the range so far
                    rule_value = max(rule_value - high, 0.0) + min(rule_value - low, 0.0)
                parts[name] += self._weights[name] * rule_value
                step_reward += self._weights[name] * rule_value
            excess = reward_sum + step_reward - self._cap
            excess = excess if excess > CAP_TOLERANCE else 0.0
            capped_sum += excess
            step_rewards.append(step_reward - excess)
            reward_sum += step_reward - excess
        has_failed = self.claw_back == "wrong" and outcome is not None and outcome.outcome <= 0
        if step_rewards and self.claw_back and (trajectory.status != "done" or has_failed) and reward_sum > 0:
            clawed_back_sum = reward_sum
            step_rewards[-1] -= reward_sum
        # Included even if zero, because the logged means are over all episodes.
        parts |= {CAPPED_PART: 0.0 - capped_sum, CLAWED_BACK_PART: 0.0 - clawed_back_sum}
        return Reward(0.0, step_rewards, parts)

    def add_outcome(self, outcome: Reward, process: Reward) -> Reward:
        """Return the sum of the weighted outcome and the step rewards, with the parts of both."""
        combined = combine_rewards({OUTCOME: outcome, "": process}, {OUTCOME: self.outcome_weight, "": 1.0})
        outcome_parts = {name: value for name, value in combined.parts.items() if name.startswith(OUTCOME)}
        return Reward(combined.outcome, combined.steps, outcome_parts | process.parts)


def calculate_process_reward(
    trajectory: Trajectory | Sequence[Any],
    step_rewards: Mapping[str, float] | None = None,
    *,
    outcome: float | Reward | None = None,
    outcome_weight: float = 1.0,
    **options: Any,
) -> Reward:
    """Return the process reward of a trajectory with the options of ProcessReward. `outcome` defaults to the
    trajectory's outcome, or 0 if it has none. A plain sequence of steps is scored by the fields `tool_call_correct` and
    `reasoning_clear` of its steps."""
    if not isinstance(trajectory, Trajectory):
        if isinstance(trajectory, Sequence) and not isinstance(trajectory, str):
            return _reward_flagged_steps(trajectory, step_rewards, outcome)
        kind = type(trajectory).__name__
        raise ValueError(f"trajectory is a {kind}; pass a Trajectory from a rollout, or a sequence of steps")
    if outcome is None:
        outcome = 0.0 if trajectory.reward is None else trajectory.reward.outcome
    process_reward = ProcessReward(outcome_weight, step_rewards, **options)
    outcome_reward = validate_reward(outcome, trajectory.turns, OUTCOME)
    return process_reward.score(dataclasses.replace(trajectory, reward=outcome_reward))


def _reward_flagged_steps(
    steps: Sequence[Any], step_rewards: Mapping[str, float] | None, outcome: float | Reward | None
) -> Reward:
    weights = {
        rule: weight for rule, weight in (step_rewards or STEP_REWARDS).items() if rule in STEP_ATTRIBUTES
    }
    rewards_by_step = [
        {rule: weight * _read_flag(step, STEP_ATTRIBUTES[rule], index) for rule, weight in weights.items()}
        for index, step in enumerate(steps)
    ]
    score = outcome.outcome if isinstance(outcome, Reward) else outcome or 0.0
    parts = {rule: sum(step[rule] for step in rewards_by_step) for rule in weights}
    return Reward(score, [sum(step.values()) for step in rewards_by_step], {"outcome": score, **parts})


def _read_flag(step: Any, field: str, index: int) -> bool:
    flag = step.get(field) if isinstance(step, Mapping) else getattr(step, field, None)
    if flag is None:
        raise ValueError(f"step {index} has no {field}; a step needs tool_call_correct and reasoning_clear")
    return bool(flag)


def make_scorer(options: Mapping[str, Any]) -> Callable[[Trajectory], Reward]:
    """Return `ProcessReward(**options).score`, for a worker process; `rules` are import paths of functions."""
    rules = {name: find_callable(target) for name, target in options["rules"].items()}
    return ProcessReward(**{**options, "rules": rules}).score


def _truncate_trajectory(trajectory: Trajectory, turn: int, outcome: Reward | None) -> Trajectory:
    """Return the trajectory as it was when this turn ended. Before the last turn, its status is not `done`."""
    is_last_turn = turn == len(trajectory.turns) - 1
    status = trajectory.status if is_last_turn else "max_turns"
    return dataclasses.replace(
        trajectory,
        turns=trajectory.turns[: turn + 1],
        status=status,
        reward=outcome if is_last_turn else None,
        error=None,
        seconds=0.0,
    )


def _evaluate_rule(rule_name: str, rule: StepRule, trajectory: Trajectory, turn: int) -> float:
    try:
        value = rule(trajectory, turn)
    except (Exception, SystemExit) as error:  # rules may be user code
        raise Unscored(describe_failure(error, f"the rule {rule_name} at turn {turn}")) from error
    return as_finite(value, f"the rule {rule_name}", f"at turn {turn}")


def _count_expert_turns(environment: Environment) -> int | None:
    """Return the number of turns of the environment's expert; None without an expert that needs no replies."""
    expert = getattr(environment, "expert", None)
    if expert is None:
        return None
    try:
        num_turns = sum(1 for _ in islice(expert(), MAX_EXPERT_TURNS))
    except Exception:  # the expert needs replies, and there are none here
        return None
    return num_turns if 0 < num_turns < MAX_EXPERT_TURNS else None
