"""The textbook's rewards: functions of `completions` and the columns of the dataset, one number for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from TrainingFactory.rewards.rules.answers import marked
from TrainingFactory.rewards.rules.numbers import last_number_text
from TrainingFactory.rewards.rules.numeric import as_number
from TrainingFactory.types import Trajectory

RewardFn = Callable[..., list[float]]
STEP_CAP = 0.5  # of all bonuses for steps together


class MathRewardFunction:
    """Rewards a completion by 1 if it states the number in `ground_truth`, else by 0."""

    def __init__(self, tolerance: float = 1e-4) -> None:
        self.tolerance = tolerance
        self.__name__ = type(self).__name__

    def extract_answer(self, text: Any) -> str | None:
        """Return the last marked answer (Final Answer:, ####, 答案, a box), else the last number; None without one."""
        text = _text(text)
        return marked(text) or last_number_text(text)

    def normalize_answer(self, answer: Any) -> float | None:
        """Return the number that an answer states: 1/2, 1e3 and 1,234 are numbers, 50% is 0.5."""
        number = as_number(answer)
        return None if number is None else float(number.value)

    def compare_answers(self, pred: Any, truth: Any) -> bool:
        """Tell whether two answers are within the tolerance, or where one is no number the same text."""
        given, right = self.normalize_answer(pred), self.normalize_answer(truth)
        if given is None or right is None:
            return str(pred).strip().lower() == str(truth).strip().lower()
        return abs(given - right) <= self.tolerance

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        truths = kwargs.get("ground_truth") or ()
        if len(truths) != len(completions):
            raise ValueError(
                f"{self.__name__} needs ground_truth with one entry for each of {len(completions)} completions, "
                f"and got {len(truths)}"
            )
        found = [self.extract_answer(each) for each in completions]
        pairs = zip(found, truths, strict=True)
        return [float(pred is not None and self.compare_answers(pred, truth)) for pred, truth in pairs]


def create_accuracy_reward(tolerance: float = 1e-4) -> MathRewardFunction:
    return MathRewardFunction(tolerance)


def create_length_penalty_reward(
    base_reward_fn: RewardFn, max_length: int = 1024, penalty_weight: float = 0.1
) -> RewardFn:
    """Return the base reward less `penalty_weight` times the share of characters over `max_length`, at least 0."""

    def length_penalty(completions: Sequence[Any], **kwargs: Any) -> list[float]:
        over = [max(0, len(_text(each)) - max_length) / max_length for each in completions]
        pairs = zip(base_reward_fn(completions=completions, **kwargs), over, strict=True)
        return [max(0.0, base - penalty_weight * share) if share else float(base) for base, share in pairs]

    return length_penalty


def create_step_reward(
    base_reward_fn: RewardFn, step_bonus: float = 0.1, max_steps: int | None = None
) -> RewardFn:
    """Return the base reward, and where that is over 0 a bonus for each line of text after the first: a wrong answer
    earns nothing by being long, and neither do empty lines."""

    def bonus(completion: Any) -> float:
        steps = max(0, lines_of(_text(completion)) - 1)
        return min(step_bonus * (steps if max_steps is None else min(steps, max_steps)), STEP_CAP)

    def step(completions: Sequence[Any], **kwargs: Any) -> list[float]:
        pairs = zip(base_reward_fn(completions=completions, **kwargs), completions, strict=True)
        return [float(base + bonus(each) if base > 0 else base) for base, each in pairs]

    return step


def create_combined_reward(components: Sequence[Mapping[str, Any]]) -> RewardFn:
    """Return the weighted sum of rewards, each `{"type": ..., "weight": ..., and the options of its type}`."""
    if not components:
        raise ValueError(
            'combined needs reward_config: {"components": [{"type": "accuracy", "weight": 1.0}]}'
        )
    parts = []
    for each in components:
        options = {key: value for key, value in each.items() if key not in ("type", "weight")}
        parts.append((float(each.get("weight", 1.0)), make_reward(str(each.get("type")), options)))

    def combined(completions: Sequence[Any], **kwargs: Any) -> list[float]:
        found = [(weight, reward(completions=completions, **kwargs)) for weight, reward in parts]
        return [sum(weight * values[n] for weight, values in found) for n in range(len(completions))]

    return combined


# reward_type -> its options with their defaults; `tolerance` is that of the accuracy under each
OPTIONS: dict[str, dict[str, Any]] = {
    "accuracy": {"tolerance": 1e-4},
    "length_penalty": {"penalty_weight": 0.1, "max_length": 1024, "tolerance": 1e-4},
    "step": {"step_bonus": 0.1, "max_steps": None, "tolerance": 1e-4},
    "combined": {"components": ()},
}


def reward_options(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a reward; raise ValueError for one that it has not."""
    if kind not in OPTIONS:
        raise ValueError(f"there is no reward {kind!r}; there are: {', '.join(OPTIONS)}")
    given = {"max_length" if key == "target_length" else key: value for key, value in given.items()}
    if unknown := given.keys() - OPTIONS[kind].keys():
        known = ", ".join(OPTIONS[kind])
        raise ValueError(f"the reward {kind} has no option {min(unknown)!r}; it has: {known}")
    return OPTIONS[kind] | given


def make_reward(kind: str, given: Mapping[str, Any]) -> RewardFn:
    """Return the reward of that type with these options."""
    options = reward_options(kind, given)
    if kind == "combined":
        return create_combined_reward(options["components"])
    base = create_accuracy_reward(options.pop("tolerance"))
    over = {"length_penalty": create_length_penalty_reward, "step": create_step_reward}
    return over[kind](base, **options) if kind in over else base


def evaluate_rewards(
    completions: Sequence[Any], ground_truths: Sequence[Any], reward_fn: RewardFn
) -> dict[str, Any]:
    """Return mean, deviation and bounds of the rewards, and the share over 0.5 as accuracy."""
    if not completions:
        raise ValueError("there are no completions to evaluate")
    rewards = reward_fn(completions=list(completions), ground_truth=list(ground_truths))
    spread = {"std_reward": pstdev(rewards), "max_reward": max(rewards), "min_reward": min(rewards)}
    accuracy = fmean(reward > 0.5 for reward in rewards)
    return {"mean_reward": fmean(rewards), **spread, "accuracy": accuracy, "num_samples": len(rewards)}


def lines_of(text: str) -> int:
    """Return how many lines have text."""
    return sum(bool(line.strip()) for line in text.splitlines())


def _text(completion: Any) -> str:
    """Return a completion as text; of a conversation its last message."""
    if isinstance(completion, list):
        return str(completion[-1].get("content") or "") if completion else ""
    return str(completion)


def accuracy_of(trajectory: Trajectory) -> float:
    """Score an episode by accuracy, one that the length limit has cut by 0: the reward that evaluations name."""
    [right] = MathRewardFunction()(
        [trajectory.answer], ground_truth=[trajectory.task.metadata["ground_truth"]]
    )
    return right
