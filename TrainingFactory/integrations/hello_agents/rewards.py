"""The textbook's reward functions. They take `completions` and the dataset's columns and return one number per
completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from TrainingFactory.rewards.rules.answers import find_marked_answer
from TrainingFactory.rewards.rules.numbers import find_last_number
from TrainingFactory.rewards.rules.numeric import as_number
from TrainingFactory.types import Trajectory

RewardFn = Callable[..., list[float]]
MAX_STEP_BONUS = 0.5  # maximum sum of the step bonuses


class MathRewardFunction:
    """Reward function that gives 1 if a completion's answer equals `ground_truth`, else 0."""

    def __init__(self, tolerance: float = 1e-4) -> None:
        self.tolerance = tolerance
        self.__name__ = type(self).__name__

    def extract_answer(self, text: Any) -> str | None:
        """Return the last marked answer (Final Answer:, ####, 答案, \\boxed), else the last number; None: neither."""
        text = _as_text(text)
        return find_marked_answer(text) or find_last_number(text)

    def normalize_answer(self, answer: Any) -> float | None:
        """Return an answer as number: 1/2, 1e3 and 1,234 are numbers, 50% is 0.5. None: not a number."""
        number = as_number(answer)
        return None if number is None else float(number.value)

    def compare_answers(self, pred: Any, truth: Any) -> bool:
        """Return whether two numbers differ by at most the tolerance, or two texts only in case."""
        number, true_number = self.normalize_answer(pred), self.normalize_answer(truth)
        if number is None or true_number is None:
            return str(pred).strip().lower() == str(truth).strip().lower()
        return abs(number - true_number) <= self.tolerance

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        truths = kwargs.get("ground_truth") or ()
        if len(truths) != len(completions):
            raise ValueError(
                f"{self.__name__} needs ground_truth with one entry for each of {len(completions)} completions, "
                f"but got {len(truths)}"
            )
        answers = [self.extract_answer(completion) for completion in completions]
        pairs = zip(answers, truths, strict=True)
        return [float(pred is not None and self.compare_answers(pred, truth)) for pred, truth in pairs]


def create_accuracy_reward(tolerance: float = 1e-4) -> MathRewardFunction:
    return MathRewardFunction(tolerance)


def create_length_penalty_reward(
    base_reward_fn: RewardFn, max_length: int = 1024, penalty_weight: float = 0.1
) -> RewardFn:
    """Return a reward function: the base reward minus `penalty_weight` times the fraction of characters beyond
    `max_length`, at least 0."""

    def length_penalty(completions: Sequence[Any], **kwargs: Any) -> list[float]:
        excess_fractions = [max(0, len(_as_text(text)) - max_length) / max_length for text in completions]
        pairs = zip(base_reward_fn(completions=completions, **kwargs), excess_fractions, strict=True)
        return [max(0.0, base - penalty_weight * excess) if excess else float(base) for base, excess in pairs]

    return length_penalty


def create_step_reward(
    base_reward_fn: RewardFn, step_bonus: float = 0.1, max_steps: int | None = None
) -> RewardFn:
    """Return a reward function: the base reward plus, if it is positive, a bonus for each non-empty line after the
    first. Wrong answers and empty lines earn no bonus. `max_steps` None: no limit on the counted lines."""

    def compute_bonus(completion: Any) -> float:
        steps = max(0, count_lines(_as_text(completion)) - 1)
        return min(step_bonus * (steps if max_steps is None else min(steps, max_steps)), MAX_STEP_BONUS)

    def step(completions: Sequence[Any], **kwargs: Any) -> list[float]:
        pairs = zip(base_reward_fn(completions=completions, **kwargs), completions, strict=True)
        return [float(base + compute_bonus(completion) if base > 0 else base) for base, completion in pairs]

    return step


def create_combined_reward(components: Sequence[Mapping[str, Any]]) -> RewardFn:
    """Return a reward function that sums components `{"type": ..., "weight": ..., and options of the type}`."""
    if not components:
        raise ValueError("reward combined has no components. Set reward_config.components.")
    functions = []
    for component in components:
        options = {key: value for key, value in component.items() if key not in ("type", "weight")}
        weight = float(component.get("weight", 1.0))
        functions.append((weight, make_reward(str(component.get("type")), options)))

    def combined(completions: Sequence[Any], **kwargs: Any) -> list[float]:
        weighted_rewards = [(weight, fn(completions=completions, **kwargs)) for weight, fn in functions]
        return [
            sum(weight * values[i] for weight, values in weighted_rewards) for i in range(len(completions))
        ]

    return combined


# reward_type -> its options with defaults; `tolerance` is that of the underlying accuracy reward
REWARD_OPTIONS: dict[str, dict[str, Any]] = {
    "accuracy": {"tolerance": 1e-4},
    "length_penalty": {"penalty_weight": 0.1, "max_length": 1024, "tolerance": 1e-4},
    "step": {"step_bonus": 0.1, "max_steps": None, "tolerance": 1e-4},
    "combined": {"components": ()},
}


def complete_options(reward_type: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` completed with the defaults of a reward type. Raise ValueError for unknown ones."""
    if reward_type not in REWARD_OPTIONS:
        raise ValueError(f"there is no reward {reward_type!r}. Available: {', '.join(REWARD_OPTIONS)}")
    options = {"max_length" if key == "target_length" else key: value for key, value in options.items()}
    if unknown_options := options.keys() - REWARD_OPTIONS[reward_type].keys():
        known_names = ", ".join(REWARD_OPTIONS[reward_type])
        raise ValueError(
            f"reward {reward_type} has no option {min(unknown_options)!r}. Available: {known_names}"
        )
    return REWARD_OPTIONS[reward_type] | options


def make_reward(reward_type: str, options: Mapping[str, Any]) -> RewardFn:
    """Create the reward function of a type."""
    full_options = complete_options(reward_type, options)
    if reward_type == "combined":
        return create_combined_reward(full_options["components"])
    accuracy_fn = create_accuracy_reward(full_options.pop("tolerance"))
    wrappers = {"length_penalty": create_length_penalty_reward, "step": create_step_reward}
    return wrappers[reward_type](accuracy_fn, **full_options) if reward_type in wrappers else accuracy_fn


def evaluate_rewards(
    completions: Sequence[Any], ground_truths: Sequence[Any], reward_fn: RewardFn
) -> dict[str, Any]:
    """Return mean, standard deviation, maximum and minimum of the rewards, and the fraction above 0.5 as accuracy."""
    if not completions:
        raise ValueError("completions is empty")
    rewards = reward_fn(completions=list(completions), ground_truth=list(ground_truths))
    reward_stats = {"std_reward": pstdev(rewards), "max_reward": max(rewards), "min_reward": min(rewards)}
    accuracy = fmean(reward > 0.5 for reward in rewards)
    return {"mean_reward": fmean(rewards), **reward_stats, "accuracy": accuracy, "num_samples": len(rewards)}


def count_lines(text: str) -> int:
    """Return the number of non-empty lines."""
    return sum(bool(line.strip()) for line in text.splitlines())


def _as_text(completion: Any) -> str:
    """Return a completion as text; for a conversation, its last message."""
    if isinstance(completion, list):
        return str(completion[-1].get("content") or "") if completion else ""
    return str(completion)


def accuracy_of(trajectory: Trajectory) -> float:
    """Return the accuracy of an episode, 0 if it was truncated. Evaluations use it as their reward function."""
    truth = trajectory.task.metadata["ground_truth"]
    [accuracy] = MathRewardFunction()([trajectory.answer], ground_truth=[truth])
    return accuracy
