"""How many problems a model solves: batched episodes of our evaluation, the textbook's figures."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.integrations.hello_agents.datasets import tasks
from TrainingFactory.integrations.hello_agents.rewards import MathRewardFunction
from TrainingFactory.integrations.hello_agents.training import model_section
from TrainingFactory.rewards.rules.answers import marked
from TrainingFactory.rollout.metrics import wilson
from TrainingFactory.services.evaluation.evaluation import Evaluation
from TrainingFactory.types import Trajectory

REWARD = f"{MathRewardFunction.__module__}:accuracy_of"
METRICS = (
    "accuracy",
    "accuracy_at_k",
    "average_reward",
    "average_length",
    "average_steps",
    "format_correctness",
)
DEFAULT_METRICS = ("accuracy", "average_reward")


def evaluate(
    model_path: str,
    rows: Sequence[Mapping[str, Any]],
    reward: Callable[..., Sequence[float]],
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    k: int = 1,
    details: bool = False,
    out: Path | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """Return the figures of a model on the rows; greedy unless each is tried `k` times. `out` keeps the episodes."""
    if unknown := [name for name in metrics if name not in METRICS]:
        raise ValueError(f"there is no metric {unknown[0]!r}; there are: {', '.join(METRICS)}")
    if k > 1 and not sampling.get("temperature"):
        raise ValueError(
            f"k is {k}, and tries at temperature 0 are all the same; give temperature, such as 0.7"
        )
    episodes = _played(model_path, rows, k, out, sampling)
    texts = [episode.answer for episode in episodes]  # none where the length limit cut it
    columns = {key: [episode.task.metadata.get(key) for episode in episodes] for key in _columns(episodes)}
    prompts = [episode.task.prompt for episode in episodes]
    right = MathRewardFunction()(texts, **columns)
    rewards = reward(completions=texts, prompts=prompts, **columns)
    tried = defaultdict(list)
    for episode, won in zip(episodes, right, strict=True):
        tried[episode.task.id].append(won)
    # Tries of one problem are not independent: the interval counts problems.
    low, high = wilson(round(fmean(right) * len(tried)), len(tried))
    figures = {
        "accuracy": fmean(right),
        "accuracy_at_k": fmean(max(each) for each in tried.values()),
        "average_reward": fmean(rewards),
        "average_length": fmean(map(len, texts)),
        "average_steps": fmean(sum(bool(line.strip()) for line in text.splitlines()) for text in texts),
        "format_correctness": fmean(marked(text) is not None for text in texts),
    }
    found: dict[str, Any] = {name: figures[name] for name in metrics}
    if "accuracy" in found:
        found |= {"accuracy_percent": f"{figures['accuracy']:.2%}", "interval_95": [low, high]}
    if details:
        found["details"] = [_detail(*each) for each in zip(episodes, texts, right, rewards, strict=True)]
        found["errors"] = [each for each in found["details"] if not each["correct"]]
    cut = sum(episode.status == "truncated" for episode in episodes)
    return {"num_samples": len(tried), "truncated": cut} | found


def _played(
    model_path: str, rows: Sequence[Mapping[str, Any]], k: int, out: Path | None, sampling: dict[str, Any]
) -> list[Trajectory]:
    with tempfile.TemporaryDirectory(prefix="tfactory-hello-") as folder:
        # As a file, because a task of an evaluation is named like one of a config.
        file = Path(folder, "tasks.jsonl")
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in tasks(list(rows)))
        file.write_text("".join(lines), encoding="utf-8")
        model: dict[str, Any] = {key: sampling.pop(key) for key in ("thinking",) if key in sampling}
        config = TrainingConfig(
            model=model_section(model_path, {}, Path(folder)) | model,
            environment={"environment_id": "conversation"},
            data={"tasks": str(file)},
            training={"group_size": k},
            reward={"type": "function", "options": {"function": REWARD}},
            sampling={"temperature": 0.0, "max_tokens": 512} | sampling,
        )
        report = Evaluation(config, out or Path(folder, "episodes.jsonl")).run()
    if report.interrupted:
        raise KeyboardInterrupt
    return report.trajectories


def _columns(episodes: Sequence[Trajectory]) -> list[str]:
    return sorted({key for episode in episodes for key in episode.task.metadata})


def _detail(episode: Trajectory, text: str, right: float, reward: float) -> dict[str, Any]:
    about = episode.task.metadata
    return {
        "question": about.get("question", episode.task.prompt),
        "prediction": text,
        "ground_truth": about.get("ground_truth"),
        "ground_truth_steps": max(
            0, len(str(about.get("full_answer") or episode.task.answer or "").splitlines()) - 1
        ),
        "correct": bool(right),
        "reward": float(reward),
        "truncated": episode.status == "truncated",
    }
