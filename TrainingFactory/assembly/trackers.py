"""Experiment trackers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from TrainingFactory.common.texts import escape_control
from TrainingFactory.config import TrainingConfig
from TrainingFactory.protocols import Tracker
from TrainingFactory.runs.episode_texts import format_ending, list_conversation_lines, pick_best_and_worst
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Trajectory

log = logging.getLogger(__name__)


class TensorBoard:
    def __init__(self, run_folder: Path, config: TrainingConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_folder / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        for label, text in _format_episodes(episodes).items():
            # TensorBoard renders Markdown; indented lines are shown literally.
            self._writer.add_text(f"episodes/{label}", indent(text, "    ", lambda _: True), step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    def __init__(self, run_folder: Path, config: TrainingConfig) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        settings = {"project": os.environ.get("WANDB_PROJECT", "training-factory")} | config.logging.wandb
        run_id = RunFolder(run_folder).run_info.get("id", run_folder.name)
        init_options = {"dir": str(run_folder), "config": config.model_dump()}
        self._table = wandb.Table
        self._run = wandb.init(name=run_folder.name, id=run_id, resume="allow", **settings, **init_options)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        rows = [[step, label, text] for label, text in _format_episodes(episodes).items()]
        self._run.log({"episodes": self._table(columns=["step", "which", "episode"], data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, run_folder: Path, config: TrainingConfig) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "training-factory"))
        mlflow.start_run(run_name=run_folder.name)
        parameters = {
            f"{section}.{key}": value
            for section, keys in config.model_dump(exclude={"tools"}).items()
            for key, value in keys.items()
        }
        mlflow.log_params(parameters)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # MLflow's file store turns names into folders, and both `episodes` and `episodes/done` are metrics.
        dotted_metrics = {name.replace("/", "."): value for name, value in metrics.items()}
        self._mlflow.log_metrics(dotted_metrics, step=step)

    def episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        for label, text in _format_episodes(episodes).items():
            self._mlflow.log_text(text, f"episodes/{step:06d}-{label.replace(' ', '-')}.txt")

    def close(self) -> None:
        self._mlflow.end_run()


def _format_episodes(episodes: Sequence[Trajectory]) -> dict[str, str]:
    """Return the best and the worst episode as text."""
    text_by_label = {}
    for label, episode in pick_best_and_worst(episodes).items():
        lines = [
            f"task {episode.task.id}",
            *map(": ".join, list_conversation_lines(episode)),
            format_ending(episode),
        ]
        text_by_label[label] = "\n".join(map(escape_control, lines))
    return text_by_label


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_trackers(names: Sequence[str]) -> None:
    """Raise if the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"logging.trackers: {name} is not installed; run pip install 'training-factory[{name}]', or leave it "
                "out: the run folder has all metrics anyway"
            )


class Trackers:
    """All trackers of a run. A tracker that fails is reported once and disabled; the run continues."""

    def __init__(self, run_folder: Path, config: TrainingConfig) -> None:
        self._trackers: list[tuple[str, Tracker]] = []
        for name in config.logging.trackers:
            try:
                self._trackers.append((name, TRACKERS[name](run_folder, config)))
            except Exception as error:  # foreign code
                raise ValueError(f"logging.trackers: {name} could not be started: {error}") from error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._call_trackers(lambda tracker: tracker.log(step, metrics))

    def episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        self._call_trackers(lambda tracker: tracker.episodes(step, episodes))

    def close(self) -> None:
        self._call_trackers(lambda tracker: tracker.close())

    def _call_trackers(self, tracker_call: Any) -> None:
        for named_tracker in list(self._trackers):
            try:
                tracker_call(named_tracker[1])
            except Exception as error:  # foreign code
                log.warning("tracker %s failed and is disabled: %s", named_tracker[0], error)
                self._trackers.remove(named_tracker)
