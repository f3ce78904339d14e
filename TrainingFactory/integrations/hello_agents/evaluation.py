"""How many problems a model solves: a recorded evaluation of ours, the textbook's figures."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from TrainingFactory.config.loading import key_value
from TrainingFactory.evaluation.records import EvaluationRecord
from TrainingFactory.evaluation.requests import RecordedEvaluation, ask
from TrainingFactory.integrations.hello_agents.rewards import accuracy_of, lines_of
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.rewards.rules.answers import marked
from TrainingFactory.types import Trajectory

REWARD = f"{accuracy_of.__module__}:{accuracy_of.__name__}"
METRICS = "accuracy accuracy_at_k average_reward average_length average_steps format_correctness".split()


def evaluate(
    model_path: str, tasks: Sequence[Mapping[str, Any]], reward: Callable[..., Sequence[float]],
    options: Mapping[str, Any], metrics: Sequence[str], k: int, details: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of a model on tasks, each tried `k` times; `options` are those of a config, by full name."""
    if unknown := [name for name in metrics if name not in METRICS]:
        raise ValueError(f"there is no metric {unknown[0]!r}; there are: {', '.join(METRICS)}")
    if k > 1 and not options.get("sampling.temperature"):
        raise ValueError(
            f"k is {k}, and tries at temperature 0 are all the same; give temperature, such as 0.7"
        )
    if not all("ground_truth" in each for each in tasks):
        raise ValueError("evaluate needs rows with question and answer, or with prompt and ground_truth")
    recorded, episodes, adapter = _played(model_path, tasks, {"training.group_size": k, **options})
    texts = [episode.answer for episode in episodes]  # none where the length limit cut it
    rewards = reward(**as_reward(reward).columns(episodes) | {"completions": texts})
    record = recorded.metrics
    figures = {
        "accuracy": record["success"],
        "accuracy_at_k": record.get(f"pass@{k}", record["success"]),
        "average_reward": fmean(rewards),
        "average_length": fmean(map(len, texts)),
        "average_steps": fmean(map(lines_of, texts)),
        "format_correctness": fmean(marked(text) is not None for text in texts),
    }
    found: dict[str, Any] = {"num_samples": len(tasks), "truncated": int(record["episodes/truncated"])}
    found |= {name: figures[name] for name in metrics}
    if "accuracy" in found:
        found["accuracy_percent"] = f"{figures['accuracy']:.2%}"
        found["interval_95"] = [record["success_low"], record["success_high"]]
    if details:
        found["details"] = [_detail(*each) for each in zip(episodes, texts, rewards, strict=True)]
        found["errors"] = [each for each in found["details"] if not each["correct"]]
    return found | {"use_lora": adapter, "record": recorded.id}


def _played(
    model_path: str, tasks: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> tuple[EvaluationRecord, list[Trajectory], bool]:
    """Evaluate, and return the record, the episodes, and whether the model is an adapter."""
    with tempfile.TemporaryDirectory(prefix="tfactory-hello-") as folder:
        file = Path(folder, "tasks.jsonl")
        lines = (json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
        file.write_text("".join(lines), encoding="utf-8")
        given = {"data.tasks": str(file), "data.count": len(tasks), "reward.type": "function",
                 "reward.options": {"function": REWARD}, "sampling.temperature": 0.0, "sampling.max_tokens": 512,
                 **options}  # fmt: skip
        evaluation = RecordedEvaluation(
            ask(model_path, [key_value(*each) for each in given.items()], "conversation")
        )
        report = evaluation.run()
    if report.interrupted:
        raise KeyboardInterrupt
    if evaluation.record is None:
        raise ValueError(f"no episode could be scored; they are in {evaluation.path}")
    return evaluation.record, report.trajectories, evaluation.config.model.adapter is not None


def _detail(episode: Trajectory, text: str, reward: float) -> dict[str, Any]:
    about = episode.task.metadata
    full = str(about.get("full_answer") or episode.task.answer or "")
    return {
        "question": about.get("question", episode.task.prompt),
        "prediction": text,
        "ground_truth": about.get("ground_truth"),
        "ground_truth_steps": max(0, len(full.splitlines()) - 1),
        "correct": episode.reward is not None and episode.reward.outcome > 0,
        "reward": float(reward),
        "truncated": episode.status == "truncated",
    }
