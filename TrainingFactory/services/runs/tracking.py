"""Where metrics go besides the run's own file, and who is told how a run is going."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from TrainingFactory.config import TrainingConfig
from TrainingFactory.protocols import Tracker
from TrainingFactory.texts import clean
from TrainingFactory.types import Trajectory

log = logging.getLogger(__name__)


class TensorBoard:
    def __init__(self, run: Path, config: TrainingConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    def __init__(self, run: Path, config: TrainingConfig) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project="training-factory", name=run.name, id=run.name, resume="allow",
            dir=str(run), config=config.model_dump(),
        )  # fmt: skip

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, run: Path, config: TrainingConfig) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow = mlflow
        mlflow.set_experiment("training-factory")
        mlflow.start_run(run_name=run.name)
        flat = {
            f"{s}.{k}": v for s, keys in config.model_dump(exclude={"tools"}).items() for k, v in keys.items()
        }
        mlflow.log_params(flat)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # Its file store makes folders of names, and `episodes` is a metric beside `episodes/done`.
        named = {name.replace("/", "."): value for name, value in metrics.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_trackers(names: Sequence[str]) -> None:
    """Raise before anything slow if a package is not there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"logging.trackers: {name} is not installed; pip install 'training-factory[{name}]', "
                "or leave it out: the run's folder has all metrics anyway"
            )


class Trackers:
    """All of them as one. They are foreign code: one that fails is said once and left out, and the run goes on."""

    def __init__(self, run: Path, config: TrainingConfig) -> None:
        self._open: list[tuple[str, Tracker]] = []
        for name in config.logging.trackers:
            try:
                self._open.append((name, TRACKERS[name](run, config)))
            except Exception as error:  # foreign code
                raise ValueError(f"logging.trackers: {name} could not be started: {error}") from error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, do: Any) -> None:
        for entry in list(self._open):
            try:
                do(entry[1])
            except Exception as error:  # foreign code
                log.warning("tracker %s failed and is left out from now on: %s", entry[0], error)
                self._open.remove(entry)


class Watcher(Protocol):
    """Who looks on while a run goes. Nothing of the run depends on it."""

    def phase(self, name: str) -> None:
        """Note that load, generate, update, evaluate or checkpoint begins."""
        ...

    def episode(self, trajectory: Trajectory) -> None: ...
    def step(self, step: int, total: int, metrics: dict[str, float]) -> None: ...
    def say(self, text: str) -> None: ...


class PlainLines:
    """A line per step on stderr, for logs and scripts."""

    def phase(self, name: str) -> None: ...
    def episode(self, trajectory: Trajectory) -> None: ...

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self.say(f"step {step}/{total}  {in_short(metrics)}")

    def say(self, text: str) -> None:
        print(clean(text), file=sys.stderr, flush=True)


# metric -> how it is told in a line
SHORT = {
    "loss": "loss {:.4f}",
    "reward": "reward {:.3f}",
    "accuracy": "accuracy {:.2f}",
    "tool_success": "tools {:.0%}",
    "eval/success": "held-out {:.3f}",
    "eval/loss": "held-out loss {:.4f}",
    "eval/accuracy": "held-out accuracy {:.2f}",
    "tokens_per_second": "{:.0f} tokens/s",
    "seconds/step": "{:.1f} s",
}


def in_short(metrics: dict[str, float]) -> str:
    told = [text.format(metrics[name]) for name, text in SHORT.items() if name in metrics]
    if "episodes/unscored" in metrics and "reward" not in metrics:
        told.insert(0, "no episode could be scored")
    elif "episodes/unscored" in metrics:
        if unscored := int(metrics["episodes/unscored"]):
            told.append(f"{unscored} of {int(metrics['episodes'])} unscored")
        if not metrics.get("rows"):
            equal = "no two scored ones of a task differ" if unscored else "all groups equal"
            told.append(f"{equal}, nothing to learn")
    if lost := int(metrics.get("episodes/tool_failure", 0)):
        told.append(f"{lost} episodes lost to tools that are down")
    return "  ".join(told)
