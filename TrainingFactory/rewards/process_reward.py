"""`reward.type: process_reward`: the outcome, and what single turns earn on the way to it.

A turn's entry is fixed when the turn ends, which makes credit by turn unbiased. So a rule, `rule(trajectory, turn)`,
sees the trajectory as it was then; at the last turn `trajectory.reward` is the outcome, if that is asked for."""

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

from TrainingFactory.common.options import STRICT, OptionError, Wrong, one_of
from TrainingFactory.common.user_code import failure
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.adapt import (
    Unscored,
    as_float,
    as_reward,
    check_known,
    checked,
    environment_reward,
)
from TrainingFactory.rewards.combined import weighted
from TrainingFactory.rewards.loading import find_callable
from TrainingFactory.tools.schema import schema_problems, validator_of
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Message, Reward, ToolCall, ToolResult, Trajectory, Turn

StepRule = Callable[[Trajectory, int], float | bool]
MARKS = {"correct_tool": "tool_call_correct", "clear_reasoning": "reasoning_clear"}  # rule -> mark of a step
STEP_REWARDS = {"correct_tool": 0.5, "clear_reasoning": 0.3, "efficient_path": 0.2}
MAX_EXPERT_TURNS = 100
ROUNDING = 1e-9
CAPPED, CLAWED_BACK, OUTCOME = "capped", "clawed_back", "outcome"
MIN_WORDS = 5  # different ones, numbers left out, of a reasoning that counts as one
MAX_VALUE_WORDS = 5  # of a tool result that is a value as a whole
MAX_SEARCHED = 10_000  # characters of a tool result in which values are looked for
# A word; in scripts without spaces (kana, Chinese) a character.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
# A number, a text in quotes that is no key of JSON, or a name: a word with a capital that begins no sentence, or with a
# digit or an underscore.
VALUE = re.compile(
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
    """Return whether all calls of the turn are expected by the task and succeeded. The task's metadata `correct_tool`
    names a tool, or a tool with arguments ({"name": ..., "arguments": {...}}), or lists several; without it every
    offered tool is expected."""
    calls = _answered(trajectory.turns[turn])
    expected = trajectory.task.metadata.get("correct_tool")
    if expected is None:
        expected = [spec.name for spec in trajectory.tools]
    expected = [expected] if isinstance(expected, str | Mapping) else list(expected)
    return bool(calls) and all(
        _went_well(result) and any(_matches(call, one) for one in expected) for call, result in calls
    )


def valid_arguments(trajectory: Trajectory, turn: int) -> bool:
    """Tell whether all calls of the turn could be read, name a tool, and fit its schema."""
    specs = {spec.name: spec for spec in trajectory.tools}
    calls = _answered(trajectory.turns[turn])
    for call, result in calls:
        spec = specs.get(call.name)
        if spec is None or call.error or (result and result.error in ("schema", "malformed", "unknown")):
            return False
        if schema_problems(spec, validator_of(spec.parameters), call.arguments):
            return False
    return bool(calls)


def no_repeated_call(trajectory: Trajectory, turn: int) -> bool:
    """Tell whether the turn calls something, and nothing that was called before with the same arguments."""
    seen = {_key(call) for one in trajectory.turns[:turn] for call in one.message.tool_calls}
    now = [_key(call) for call in trajectory.turns[turn].message.tool_calls]
    return bool(now) and len(set(now)) == len(now) and seen.isdisjoint(now)


def error_recovered(trajectory: Trajectory, turn: int) -> bool:
    """Tell whether a tool that had failed at its last use is used well."""
    last: dict[str, bool] = {}
    for one in trajectory.turns[:turn]:
        last |= {call.name: _went_well(result) for call, result in _answered(one)}
    now = _answered(trajectory.turns[turn])
    return any(_went_well(result) and last.get(call.name) is False for call, result in now)


def clear_reasoning(trajectory: Trajectory, turn: int) -> bool:
    """Return whether the turn gives a reason, as reasoning or as text beside its calls: MIN_WORDS different words that
    repeat no earlier text and cite a value from the task or from an earlier tool result."""
    words = _words(_reasoning(trajectory.turns[turn]))
    if len({word for word in words if not word.isdigit()}) < MIN_WORDS:
        return False
    earlier, prompt = trajectory.turns[:turn], trajectory.task.prompt
    given = trajectory.prompt or ([Message("user", prompt)] if isinstance(prompt, str) else prompt)
    asked = [*given, *(reply for one in earlier for reply in one.replies)]
    results = [result.content for one in earlier for result in one.tool_results if result.ok]
    shown = [message.content for message in asked if message.role == "user"]
    shown += [result[:MAX_SEARCHED] for result in reversed(results)]
    if any(words == _words(text) for text in (*shown, *map(_reasoning, earlier))):
        return False
    reason = f" {' '.join(words)} "
    return any(f" {' '.join(_words(value))} " in reason for text in shown for value in _values(text))


def efficient_path(trajectory: Trajectory, turn: int) -> float:
    """Return, for the turn that ends the episode right, the shortest number of turns over that taken; where it is not
    known, the share of turns that were no failure and no repetition; times an outcome between 0 and 1."""
    right = min(1.0, trajectory.reward.outcome) if trajectory.reward else 0.0
    if trajectory.status != "done" or turn != len(trajectory.turns) - 1 or right <= 0:
        return 0.0
    shortest = trajectory.task.metadata.get("shortest")
    if shortest is None:
        wasted = sum(
            not all(_went_well(result) for _, result in _answered(one))
            or not no_repeated_call(trajectory, number)
            for number, one in enumerate(trajectory.turns)
            if one.message.tool_calls
        )
        return right * (1.0 - wasted / (turn + 1))
    if not shortest > 0:
        raise ValueError(f"the task's metadata shortest is {shortest!r}; it must be a number of turns")
    return right * min(1.0, shortest / (turn + 1))


_ABOUT_CALLS = (correct_tool, valid_arguments, no_repeated_call, error_recovered)
_BUILT_IN = (*_ABOUT_CALLS, clear_reasoning, efficient_path)
PROCESS_RULES: dict[str, StepRule] = {rule.__name__: rule for rule in _BUILT_IN}


def _answered(turn: Turn) -> list[tuple[ToolCall, ToolResult | None]]:
    """Return the calls with their results; None where the environment did not report any."""
    calls = turn.message.tool_calls
    return list(zip_longest(calls, turn.tool_results[: len(calls)]))


def _went_well(result: ToolResult | None) -> bool:
    return result is not None and result.ok


def _matches(call: ToolCall, expected: str | Mapping[str, Any]) -> bool:
    """Return whether the call is to the expected tool, with the arguments that are named, if any."""
    if isinstance(expected, str):
        return call.name == expected
    named = expected.get("arguments") or {}
    return call.name == expected.get("name") and named.items() <= call.arguments.items()


def _words(text: str) -> list[str]:
    return WORD.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text.lower()))


def _values(text: str) -> list[str]:
    """Return the numbers, names and quoted texts in a text, and the text itself where it is short."""
    whole = [text] if len(_words(text)) <= MAX_VALUE_WORDS else []
    return whole + [found[1] or found[0] for found in VALUE.finditer(text)]


def _key(call: ToolCall) -> str:
    return f"{call.name} {json.dumps(call.arguments, sort_keys=True, default=str)}"


def _reasoning(turn: Turn) -> str:
    message = turn.message
    return message.reasoning or (message.content if message.tool_calls else "")


@dataclass(config=STRICT, eq=False)
class ProcessReward:
    """Reward the outcome, and turns by `step_rewards`: rules by name (PROCESS_RULES, or in `rules`), and weights."""

    outcome_weight: float = 1.0
    step_rewards: Mapping[str, float] | None = None
    outcome: Any = None  # any callable; None: the environment's own; not asked where nothing depends on it
    _: KW_ONLY
    pay: Literal["once", "per_turn"] = (
        "once"  # when a rule first holds, of a graded one what is better than before
    )
    cap: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = (
        None  # at any time; None: what all give once
    )
    # Takes the step rewards back on the last turn. True: where the episode does not come to its own end; "wrong": also
    # where its outcome is 0 or less.
    claw_back: ClawBack = True
    rules: Mapping[str, StepRule] | None = None
    timeout: float | None = 60.0  # seconds for the outcome
    pool: Any = None  # of worker processes that run `score`; None: a thread does

    def __post_init__(self) -> None:
        known = PROCESS_RULES | dict(self.rules or {})
        self._weights = dict(STEP_REWARDS if self.step_rewards is None else self.step_rewards)
        for name in self._weights:
            if name not in known:
                raise OptionError(Wrong(f"step_rewards.{name}", one_of(name, known)))
        self._rules = {name: known[name] for name in self._weights}
        all_once = sum(weight for weight in self._weights.values() if weight > 0)
        self._cap = all_once if self.cap is None else self.cap
        self.outcome = as_reward(
            environment_reward if self.outcome is None else self.outcome, OUTCOME, self.timeout
        )

    async def __call__(self, episode: Episode) -> Reward:
        trajectory = await self._with_outcome(episode)
        if self.pool is not None:
            return await self.pool.compute(trajectory)
        return await in_thread(self.score, trajectory)

    async def _with_outcome(self, episode: Episode) -> Trajectory:
        """Return what `score` takes: what only the environment knows is asked here."""
        efficient = bool(self._weights.get("efficient_path"))
        if not (self.outcome_weight or efficient or self.claw_back == "wrong"):
            # what counts for nothing must not cost anything, nor fail
            return dataclasses.replace(episode.trajectory, reward=None)
        outcome, task = await self.outcome(episode), episode.task
        if efficient and (shortest := _expert_turns(episode.environment)):
            task = dataclasses.replace(task, metadata={"shortest": shortest} | task.metadata)
        return dataclasses.replace(episode.trajectory, reward=outcome, task=task)

    def score(self, trajectory: Trajectory) -> Reward:
        """Return the reward of an episode whose outcome is its `reward`; None: the outcome counts for nothing."""
        process = self.reward_turns(trajectory, trajectory.reward)
        return process if trajectory.reward is None else self.add_outcome(trajectory.reward, process)

    def reward_turns(self, trajectory: Trajectory, outcome: Reward | None = None) -> Reward:
        """Return one entry per turn; `parts` say what each rule gave, and what was capped and clawed back."""
        check_known(trajectory)
        seen = dict.fromkeys(self._rules, (0.0, 0.0))  # least and most that a rule has said so far
        parts = dict.fromkeys(self._rules, 0.0)
        steps: list[float] = []
        total = capped = clawed_back = 0.0
        for turn in range(len(trajectory.turns)):
            earned = 0.0
            view = _as_it_was(trajectory, turn, outcome)
            for name, rule in self._rules.items():
                value = _value(name, rule, view, turn)
                low, high = seen[name]
                seen[name] = (min(low, value), max(high, value))
                if self.pay == "once":  # only what goes beyond all that was said before
                    value = max(value - high, 0.0) + min(value - low, 0.0)
                parts[name] += self._weights[name] * value
                earned += self._weights[name] * value
            excess = total + earned - self._cap
            excess = excess if excess > ROUNDING else 0.0
            capped += excess
            steps.append(earned - excess)
            total += earned - excess
        wrong = self.claw_back == "wrong" and outcome is not None and outcome.outcome <= 0
        if steps and self.claw_back and (trajectory.status != "done" or wrong) and total > 0:
            clawed_back = total
            steps[-1] -= total
        # Also where they are zero: a mean over episodes takes all of them.
        parts |= {CAPPED: 0.0 - capped, CLAWED_BACK: 0.0 - clawed_back}
        return Reward(0.0, steps, parts)

    def add_outcome(self, outcome: Reward, process: Reward) -> Reward:
        """Return the sum of both, with the parts of both."""
        both = weighted({OUTCOME: outcome, "": process}, {OUTCOME: self.outcome_weight, "": 1.0})
        of_outcome = {name: value for name, value in both.parts.items() if name.startswith(OUTCOME)}
        return Reward(both.outcome, both.steps, of_outcome | process.parts)


def calculate_process_reward(
    trajectory: Trajectory | Sequence[Any],
    step_rewards: Mapping[str, float] | None = None,
    *,
    outcome: float | Reward | None = None,
    outcome_weight: float = 1.0,
    **options: Any,
) -> Reward:
    """Reward the turns of a trajectory with known outcome: `outcome`, else its own reward's, else 0. Options are those
    of ProcessReward. A sequence of steps is rewarded by the marks that each step carries: `step.tool_call_correct` and
    `step.reasoning_clear`."""
    if not isinstance(trajectory, Trajectory):
        if isinstance(trajectory, Sequence) and not isinstance(trajectory, str):
            return _reward_marked_steps(trajectory, step_rewards, outcome)
        kind = type(trajectory).__name__
        raise ValueError(f"a process reward is of a Trajectory, as a rollout returns it, not of a {kind}")
    if outcome is None:
        outcome = 0.0 if trajectory.reward is None else trajectory.reward.outcome
    reward = ProcessReward(outcome_weight, step_rewards, **options)
    known = checked(outcome, len(trajectory.turns), OUTCOME)
    return reward.score(dataclasses.replace(trajectory, reward=known))


def _reward_marked_steps(
    steps: Sequence[Any], step_rewards: Mapping[str, float] | None, outcome: float | Reward | None
) -> Reward:
    weights = {rule: weight for rule, weight in (step_rewards or STEP_REWARDS).items() if rule in MARKS}
    earned = [
        {rule: weight * _mark(step, MARKS[rule], number) for rule, weight in weights.items()}
        for number, step in enumerate(steps)
    ]
    known = outcome.outcome if isinstance(outcome, Reward) else outcome or 0.0
    parts = {rule: sum(step[rule] for step in earned) for rule in weights}
    return Reward(known, [sum(step.values()) for step in earned], {"outcome": known, **parts})


def _mark(step: Any, name: str, number: int) -> bool:
    value = step.get(name) if isinstance(step, Mapping) else getattr(step, name, None)
    if value is None:
        raise ValueError(f"step {number} has no {name}; a step needs tool_call_correct and reasoning_clear")
    return bool(value)


def scorer_from_options(options: Mapping[str, Any]) -> Callable[[Trajectory], Reward]:
    """Return `ProcessReward.score` of these options, for a worker process; `rules` name the files of functions."""
    rules = {name: find_callable(target) for name, target in options["rules"].items()}
    return ProcessReward(**{**options, "rules": rules}).score


def _as_it_was(trajectory: Trajectory, turn: int, outcome: Reward | None) -> Trajectory:
    """Return the trajectory as it was when this turn ended. Before the last turn an episode has not come to its end."""
    last = turn == len(trajectory.turns) - 1
    status = trajectory.status if last else "max_turns"
    return dataclasses.replace(
        trajectory,
        turns=trajectory.turns[: turn + 1],
        status=status,
        reward=outcome if last else None,
        error=None,
        seconds=0.0,
    )


def _value(name: str, rule: StepRule, view: Trajectory, turn: int) -> float:
    try:
        value = rule(view, turn)
    except (Exception, SystemExit) as error:  # rules are foreign code
        raise Unscored(failure(error, f"the rule {name} at turn {turn}")) from error
    return as_float(value, f"the rule {name}", f"at turn {turn}")


def _expert_turns(environment: Environment) -> int | None:
    """Return how many turns the environment's expert takes, if it has one that can be asked without playing."""
    expert = getattr(environment, "expert", None)
    if expert is None:
        return None
    try:
        turns = sum(1 for _ in islice(expert(), MAX_EXPERT_TURNS))
    except Exception:  # an expert that must see replies first is of no use here
        return None
    return turns if 0 < turns < MAX_EXPERT_TURNS else None
