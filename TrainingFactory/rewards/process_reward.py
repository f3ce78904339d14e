"""`reward.type: process_reward`: the outcome, and what single turns earn on the way to it.

A turn's entry is fixed when the turn ends. Limits and claw-backs are negative amounts on the turn that settles them;
earlier entries never change, which is what makes credit by turn unbiased.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from TrainingFactory.options import STRICT, OptionError, Wrong, one_of
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.adapt import Unscored, as_reward, environment_reward
from TrainingFactory.rewards.combined import weighted
from TrainingFactory.rewards.process_rules import PROCESS_RULES, StepRule
from TrainingFactory.rewards.values import as_float
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Trajectory
from TrainingFactory.user_code import failure

STEP_REWARDS = {"correct_tool": 0.5, "clear_reasoning": 0.3, "efficient_path": 0.2}
MAX_EXPERT_TURNS = 100
ROUNDING = 1e-9
CAPPED, CLAWED_BACK, OUTCOME = "capped", "clawed_back", "outcome"


@dataclass(config=STRICT, eq=False)
class ProcessReward:
    """`ProcessReward(outcome_weight=1.0, step_rewards={"correct_tool": 0.5, "efficient_path": 0.2})`

    `step_rewards` are names of rules (process_rules.py, `register_rule`, or functions in `rules`) and what a turn earns
    by each. `outcome` is the reward of the whole episode: any callable, or None for the environment's own. With an
    `outcome_weight` of 0 it is not asked.
    `pay`: "once" rewards a rule when it first holds (of a graded one, what is better than before), "per_turn" every
    time. `cap` limits what all rules together have earned at any time; None: as much as each of them once.
    `claw_back`: an episode that does not come to its own end gives back on its last turn what it has earned.
    """

    outcome_weight: float = 1.0
    step_rewards: Mapping[str, float] | None = None
    outcome: Any = None
    _: KW_ONLY
    pay: Literal["once", "per_turn"] = "once"
    cap: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    claw_back: bool = True
    rules: Mapping[str, StepRule] | None = None
    timeout: float | None = 60.0  # seconds for the outcome

    def __post_init__(self) -> None:
        known = PROCESS_RULES | dict(self.rules or {})
        self._weights = dict(STEP_REWARDS if self.step_rewards is None else self.step_rewards)
        for name in self._weights:
            if name not in known:
                raise OptionError(Wrong(f"step_rewards.{name}", one_of(name, known)))
            if name in (CAPPED, CLAWED_BACK, OUTCOME):
                raise OptionError(Wrong(f"rules.{name}", "is a name that the parts of a reward have already"))
        self._rules = {name: known[name] for name in self._weights}
        all_once = sum(weight for weight in self._weights.values() if weight > 0)
        self._cap = all_once if self.cap is None else self.cap
        self.outcome = as_reward(
            environment_reward if self.outcome is None else self.outcome, OUTCOME, self.timeout
        )

    async def __call__(self, episode: Episode) -> Reward:
        shortest = _expert_turns(episode.environment) if "efficient_path" in self._rules else None
        turns = in_thread(self.reward_turns, episode.trajectory, shortest)
        if not self.outcome_weight:  # what counts for nothing must not cost anything, nor fail
            return await turns
        outcome, process = await asyncio.gather(self.outcome(episode), turns)
        return self.add_outcome(outcome, process)

    def reward_turns(self, trajectory: Trajectory, shortest: int | None = None) -> Reward:
        """Return one entry per turn; `parts` say what each rule gave, and what was capped and clawed back."""
        if trajectory.status in ("error", "tool_failure"):
            raise Unscored(
                f"the episode ended with status {trajectory.status}: what it is worth is not known"
            )
        known = _with_shortest(trajectory, shortest)
        seen = dict.fromkeys(self._rules, (0.0, 0.0))  # least and most that a rule has said so far
        parts = dict.fromkeys(self._rules, 0.0)
        steps: list[float] = []
        total = capped = clawed_back = 0.0
        for turn in range(len(trajectory.turns)):
            earned = 0.0
            view = _as_it_was(known, turn)
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
        if steps and self.claw_back and trajectory.status != "done" and total > 0:
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
    trajectory: Trajectory,
    step_rewards: Mapping[str, float] | None = None,
    *,
    outcome: float | Reward = 0.0,
    outcome_weight: float = 1.0,
    **options: Any,
) -> Reward:
    """Return the same for a trajectory whose outcome is known already; options are those of ProcessReward."""
    reward = ProcessReward(outcome_weight, step_rewards, **options)
    known = outcome if isinstance(outcome, Reward) else Reward(as_float(outcome, "the outcome"))
    return reward.add_outcome(known, reward.reward_turns(trajectory))


def _as_it_was(trajectory: Trajectory, turn: int) -> Trajectory:
    """Return the trajectory as it was when this turn ended. Before the last turn an episode has not come to its end."""
    last = turn == len(trajectory.turns) - 1
    status = trajectory.status if last else "max_turns"
    return dataclasses.replace(
        trajectory, turns=trajectory.turns[: turn + 1], status=status, reward=None, error=None, seconds=0.0
    )


def _value(name: str, rule: StepRule, view: Trajectory, turn: int) -> float:
    try:
        value = rule(view, turn)
    except (Exception, SystemExit) as error:  # rules are foreign code
        raise Unscored(failure(error, f"the rule {name} at turn {turn}")) from error
    return as_float(value, f"the rule {name}", f"at turn {turn}")


def _with_shortest(trajectory: Trajectory, shortest: int | None) -> Trajectory:
    task = trajectory.task
    if not shortest or "shortest" in task.metadata:
        return trajectory
    task = dataclasses.replace(task, metadata=task.metadata | {"shortest": shortest})
    return dataclasses.replace(trajectory, task=task)


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
