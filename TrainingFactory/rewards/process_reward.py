"""`reward.type: process_reward`: the outcome, and what single turns earn on the way to it.

A turn's entry is fixed when the turn ends. Limits and claw-backs are negative amounts on the turn that settles them;
earlier entries never change, which is what makes credit by turn unbiased.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.adapt import Unscored, as_float, as_reward, environment_reward
from TrainingFactory.rewards.checks import check_choice, check_flag, check_number
from TrainingFactory.rewards.combined import weighted
from TrainingFactory.rewards.process_rules import PROCESS_RULES, StepRule
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Trajectory
from TrainingFactory.user_code import failure

STEP_REWARDS = {"correct_tool": 0.5, "clear_reasoning": 0.3, "efficient_path": 0.2}
MAX_EXPERT_TURNS = 100
ROUNDING = 1e-9
CAPPED, CLAWED_BACK, OUTCOME = "capped", "clawed_back", "outcome"


class ProcessReward:
    """`ProcessReward(outcome_weight=1.0, step_rewards={"correct_tool": 0.5, "efficient_path": 0.2})`

    `step_rewards` are names of rules (process_rules.py, `register_rule`, or functions in `rules`) and what each pays.
    `outcome` is the reward of the whole episode: any callable, or None for the environment's own. With an
    `outcome_weight` of 0 it is not asked.
    `pay`: "once" pays a rule when it first holds (of a graded one, what is better than before), "per_turn" every time.
    `cap` limits what all rules together have paid at any time; None: as much as each of them once.
    `claw_back`: an episode that does not come to its own end gives back on its last turn what it was paid.
    """

    def __init__(
        self,
        outcome_weight: float = 1.0,
        step_rewards: Mapping[str, float] | None = None,
        outcome: Any = None,
        *,
        pay: str = "once",
        cap: float | None = None,
        claw_back: bool = True,
        rules: Mapping[str, StepRule] | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        check_number("outcome_weight", outcome_weight, low=-math.inf)
        self.outcome_weight = float(outcome_weight)
        self.outcome = as_reward(environment_reward if outcome is None else outcome, OUTCOME, timeout)
        self.plan = make_plan(step_rewards, pay, cap, claw_back, rules)

    async def __call__(self, episode: Episode) -> Reward:
        shortest = _expert_turns(episode.environment) if "efficient_path" in self.plan.rules else None
        turns = in_thread(self.plan.pay_turns, episode.trajectory, shortest)
        if not self.outcome_weight:  # what counts for nothing must not cost anything, nor fail
            return await turns
        outcome, process = await asyncio.gather(self.outcome(episode), turns)
        return _together(self.outcome_weight, outcome, process)


def calculate_process_reward(
    trajectory: Trajectory,
    step_rewards: Mapping[str, float] | None = None,
    *,
    outcome: float | Reward = 0.0,
    outcome_weight: float = 1.0,
    pay: str = "once",
    cap: float | None = None,
    claw_back: bool = True,
    rules: Mapping[str, StepRule] | None = None,
) -> Reward:
    """The same for a trajectory whose outcome is known already."""
    check_number("outcome_weight", outcome_weight, low=-math.inf)
    process = make_plan(step_rewards, pay, cap, claw_back, rules).pay_turns(trajectory)
    known = outcome if isinstance(outcome, Reward) else Reward(as_float(outcome, "the outcome"))
    return _together(float(outcome_weight), known, process)


def _together(outcome_weight: float, outcome: Reward, process: Reward) -> Reward:
    total = weighted({OUTCOME: outcome, "process": process}, {OUTCOME: outcome_weight, "process": 1.0})
    inner = (
        {f"{OUTCOME}/{name}": value for name, value in outcome.parts.items()}
        if len(outcome.parts) > 1
        else {}
    )
    parts = {OUTCOME: total.parts[OUTCOME]} | inner | process.parts
    return Reward(total.outcome, total.steps, parts)


@dataclass(slots=True, frozen=True)
class Plan:
    """Which rules pay how much, and when. Made by `make_plan`."""

    rules: dict[str, StepRule]
    weights: dict[str, float]
    per_turn: bool
    cap: float
    claw_back: bool

    def pay_turns(self, trajectory: Trajectory, shortest: int | None = None) -> Reward:
        """One entry per turn; `parts` say what each rule paid, and what was capped and clawed back."""
        if trajectory.status in ("error", "tool_failure"):
            raise Unscored(
                f"the episode ended with status {trajectory.status}: what it is worth is not known"
            )
        known = _with_shortest(trajectory, shortest)
        seen = dict.fromkeys(self.rules, (0.0, 0.0))  # least and most that a rule has said so far
        parts = dict.fromkeys(self.rules, 0.0)
        steps: list[float] = []
        total = capped = clawed_back = 0.0
        for turn in range(len(trajectory.turns)):
            paid = 0.0
            view = _as_it_was(known, turn)
            for name, rule in self.rules.items():
                value = _value(name, rule, view, turn)
                low, high = seen[name]
                seen[name] = (min(low, value), max(high, value))
                if not self.per_turn:  # only what goes beyond all that was said before
                    value = max(value - high, 0.0) + min(value - low, 0.0)
                parts[name] += self.weights[name] * value
                paid += self.weights[name] * value
            excess = total + paid - self.cap
            excess = excess if excess > ROUNDING else 0.0
            capped += excess
            steps.append(paid - excess)
            total += paid - excess
        if steps and self.claw_back and trajectory.status != "done" and total > 0:
            clawed_back = total
            steps[-1] -= total
        # Also where they are zero: a mean over episodes takes all of them.
        parts |= {CAPPED: 0.0 - capped, CLAWED_BACK: 0.0 - clawed_back}
        return Reward(0.0, steps, parts)


def make_plan(
    step_rewards: Mapping[str, float] | None,
    pay: str,
    cap: float | None,
    claw_back: bool,
    rules: Mapping[str, StepRule] | None,
) -> Plan:
    """What a user wrote, checked; ValueError that names what is wrong."""
    wanted = STEP_REWARDS if step_rewards is None else step_rewards
    if not isinstance(wanted, Mapping):
        raise ValueError(
            f"step_rewards is {wanted!r:.60}; it must be a mapping such as {{correct_tool: 0.5}}"
        )
    known = PROCESS_RULES | dict(rules or {})
    for name, weight in wanted.items():
        check_choice("a name in step_rewards", name, known)
        check_number(f"step_rewards.{name}", weight, low=-math.inf)
        if not callable(known[name]):
            raise ValueError(f"the rule {name} must be a function (trajectory, turn) -> number")
        if name in (CAPPED, CLAWED_BACK, OUTCOME):
            raise ValueError(f"a rule cannot be called {name}: the parts of a reward have that name already")
    check_choice("pay", pay, ("once", "per_turn"))
    check_flag("claw_back", claw_back)
    if cap is None:
        cap = math.fsum(weight for weight in wanted.values() if weight > 0)
    elif cap != math.inf:
        check_number("cap", cap)
    weights = {name: float(weight) for name, weight in wanted.items()}
    return Plan({name: known[name] for name in wanted}, weights, pay == "per_turn", float(cap), claw_back)


def _as_it_was(trajectory: Trajectory, turn: int) -> Trajectory:
    """The trajectory when this turn ended. Before the last turn an episode has not come to its end."""
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
    return dataclasses.replace(
        trajectory, task=dataclasses.replace(task, metadata=task.metadata | {"shortest": shortest})
    )


def _expert_turns(environment: Environment) -> int | None:
    """How many turns the environment's expert takes, if it has one that can be asked without playing."""
    expert = getattr(environment, "expert", None)
    if expert is None:
        return None
    try:
        turns = sum(1 for _ in islice(expert(), MAX_EXPERT_TURNS))
    except Exception:  # an expert that must see replies first is of no use here
        return None
    return turns if 0 < turns < MAX_EXPERT_TURNS else None
