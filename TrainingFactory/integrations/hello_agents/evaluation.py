"""Evaluation of a model with the textbook's metrics; the evaluation is saved as a TrainingFactory evaluation record."""

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
from TrainingFactory.integrations.hello_agents.rewards import accuracy_of, count_lines
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.rewards.rules.answers import find_marked_answer
from TrainingFactory.types import Trajectory

REWARD_NAME = f"{accuracy_of.__module__}:{accuracy_of.__name__}"
METRIC_NAMES = "accuracy accuracy_at_k average_reward average_length average_steps format_correctness".split()


def evaluate(
    model_path: str, tasks: Sequence[Mapping[str, Any]], reward_fn: Callable[..., Sequence[float]],
    options: Mapping[str, Any], metrics: Sequence[str], k: int, with_details: bool
) -> dict[str, Any]:  # fmt: skip
    """Return the metrics of a model on tasks, with `k` attempts each. `options` are config values by full key."""
    if unknown_metrics := [name for name in metrics if name not in METRIC_NAMES]:
        raise ValueError(f"there is no metric {unknown_metrics[0]!r}. Available: {', '.join(METRIC_NAMES)}")
    if k > 1 and not options.get("sampling.temperature"):
        raise ValueError(f"k is {k}, but at temperature 0 all attempts are the same. Set temperature.")
    if not all("ground_truth" in task for task in tasks):
        raise ValueError("tasks have no ground_truth. Provide rows with question and answer.")
    record, episodes, is_adapter = _run_evaluation(model_path, tasks, {"training.group_size": k, **options})
    answers = [episode.answer for episode in episodes]  # "" if the episode was truncated
    rewards = reward_fn(**as_reward(reward_fn).make_columns(episodes) | {"completions": answers})
    scores = record.metrics
    metric_values = {
        "accuracy": scores["success"],
        "accuracy_at_k": scores.get(f"pass@{k}", scores["success"]),
        "average_reward": fmean(rewards),
        "average_length": fmean(map(len, answers)),
        "average_steps": fmean(map(count_lines, answers)),
        "format_correctness": fmean(find_marked_answer(text) is not None for text in answers),
    }
    result: dict[str, Any] = {"num_samples": len(tasks), "truncated": int(scores["episodes/truncated"])}
    result |= {name: metric_values[name] for name in metrics}
    if "accuracy" in result:
        result["accuracy_percent"] = f"{metric_values['accuracy']:.2%}"
        result["interval_95"] = [scores["success_low"], scores["success_high"]]
    if with_details:
        samples = zip(episodes, answers, rewards, strict=True)
        result["details"] = [_make_episode_detail(*sample) for sample in samples]
        result["errors"] = [detail for detail in result["details"] if not detail["correct"]]
    return result | {"use_lora": is_adapter, "record": record.id}


def _run_evaluation(
    model_path: str, tasks: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> tuple[EvaluationRecord, list[Trajectory], bool]:
    """Run the evaluation and return its record, the episodes, and whether the model is an adapter."""
    with tempfile.TemporaryDirectory(prefix="tfactory-hello-") as folder:
        tasks_file = Path(folder, "tasks.jsonl")
        lines = (json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
        tasks_file.write_text("".join(lines), encoding="utf-8")
        config = {"data.tasks": str(tasks_file), "data.count": len(tasks), "reward.type": "function",
                  "reward.options": {"function": REWARD_NAME}, "sampling.temperature": 0.0, "sampling.max_tokens": 512,
                  **options}  # fmt: skip
        overrides = [key_value(key, value) for key, value in config.items()]
        evaluation = RecordedEvaluation(ask(model_path, overrides, "conversation"))
        report = evaluation.run()
    if report.interrupted:
        raise KeyboardInterrupt
    if evaluation.record is None:
        raise ValueError(f"no episode could be scored. See the episodes in {evaluation.path}")
    return evaluation.record, report.trajectories, evaluation.config.model.adapter is not None


def _make_episode_detail(episode: Trajectory, answer: str, reward: float) -> dict[str, Any]:
    metadata = episode.task.metadata
    full_answer = str(metadata.get("full_answer") or episode.task.answer or "")
    return {
        "question": metadata.get("question", episode.task.prompt),
        "prediction": answer,
        "ground_truth": metadata.get("ground_truth"),
        "ground_truth_steps": max(0, len(full_answer.splitlines()) - 1),
        "correct": episode.reward is not None and episode.reward.outcome > 0,
        "reward": float(reward),
        "truncated": episode.status == "truncated",
    }
