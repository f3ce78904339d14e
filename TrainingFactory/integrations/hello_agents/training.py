"""From the textbook's keys to a run of our trainers, and its model to the folder that the textbook loads."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory import services
from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.integrations.hello_agents import datasets
from TrainingFactory.models.names import BUILTIN, resolve
from TrainingFactory.resolve.model_names import ADAPTER, find_model
from TrainingFactory.runs.tracking import PlainLines, in_short
from TrainingFactory.trainers.trl_keywords import VALUES

if TYPE_CHECKING:  # torch, which takes seconds
    from TrainingFactory.trainers.trainer import Trainer

RECORD = "training_result.json"  # in output_dir, with the names of the model's files
# A plain key of the textbook -> ours. What needs more than another name is in `_special`.
OPTIONS = {
    **{key: f"training.{key}" for key in ("num_epochs", "batch_size", "learning_rate", "warmup_steps", "weight_decay",
                                          "max_grad_norm", "max_steps", "gradient_checkpointing", "seed")},
    "eval_steps": "training.eval_every", "num_generations": "training.group_size",
    "max_new_tokens": "sampling.max_tokens", "temperature": "sampling.temperature",
    "use_lora": "lora.enabled", "lora_r": "lora.r", "lora_rank": "lora.r", "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout", "lora_target_modules": "lora.target_modules",
    "max_length": "model.max_length", "model_revision": "model.revision", "thinking": "model.thinking",
    "dtype": "model.dtype", "save_steps": "logging.checkpoint_every",
}  # fmt: skip
SPECIAL = ("optimizer", "warmup_ratio", "gradient_accumulation_steps", "kl_coef", "clip_range",
           "use_wandb", "use_tensorboard", "wandb_project", "logging_steps")  # fmt: skip
OPTIMIZERS = VALUES["optim"][1]
BATCH = 4
FORM = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "target_modules"}


class DetailedLoggingCallback(PlainLines):
    """Prints a line with epoch, step and figures every `logging_steps` steps, and after the last."""

    def __init__(
        self, total_steps: int | None = None, num_epochs: int | None = None, logging_steps: int = 1
    ) -> None:
        self.total_steps, self.num_epochs, self.logging_steps = total_steps, num_epochs, logging_steps

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        total, epochs = self.total_steps or total, self.num_epochs or 1
        if step % self.logging_steps == 0 or step == total:
            epoch = min(epochs, max(1, math.ceil(epochs * step / total)))
            self.say(f"Epoch {epoch}/{epochs} | Step {step}/{total} | {in_short(metrics)}")


def reader(algorithm: str) -> datasets.Reader:
    """Return what reads rows for the algorithm."""
    return datasets.tasks if KINDS[algorithm].samples else datasets.examples


def train(
    algorithm: str, model_name: str, rows: list[dict], output_dir: str | Path, keys: Mapping[str, Any],
    reward: Callable[..., Any] | None = None, heldout: Any = None,
) -> tuple[Trainer, dict[str, Any]]:  # fmt: skip
    """Train in a run in `runs` of `output_dir`; return the trainer and what is told about it. `keys` are the
    textbook's, or ours in full (`grpo.scale_rewards`); `heldout` is what eval_steps evaluates on."""
    samples, folder = KINDS[algorithm].samples, Path(output_dir).expanduser()
    check_folder(folder)
    given: dict[str, Any] = {**sections_of(algorithm, keys, len(rows))}
    # The same for every algorithm; `runs` is also where TensorBoard looks in the textbook.
    given.setdefault("logging", {})["output_dir"] = str(folder / "runs")
    model = model_section(model_name, given.setdefault("lora", {}), folder)
    given["model"] = model | given.get("model", {})
    given |= {"tasks": rows, "environment": "conversation"} if samples else {"dataset": rows}
    if heldout is not None:
        given["heldout"] = reader(algorithm)(heldout)
    name = "RewardModel" if algorithm == "reward_model" else algorithm.upper()
    watcher = DetailedLoggingCallback(None, keys.get("num_epochs"), keys.get("logging_steps") or 1)
    trainer = getattr(services, f"{name}Trainer")(**given, reward_function=reward, watcher=watcher)
    if trainer.notices:
        raise ValueError("; ".join(trainer.notices))
    report, config = trainer.train(), trainer.config
    return trainer, {
        "status": "success" if report.state == "finished" else report.state, "algorithm": algorithm.upper(),
        "model": model_name, "model_name": model_name, "output_dir": str(output_dir), "model_path": str(output_dir),
        "num_epochs": config.training.num_epochs, "dataset_size": len(rows), "num_samples": len(rows),
        "use_lora": config.lora.enabled or config.model.adapter is not None,
        "learning_rate": config.training.learning_rate, "steps": report.steps, "run": str(report.run),
        "final_loss": report.metrics.get("loss"), "average_reward": report.metrics.get("reward"),
    }  # fmt: skip


def sections_of(algorithm: str, keys: Mapping[str, Any], size: int) -> dict[str, dict[str, Any]]:
    """Return the sections of a config that the keys stand for. Values are checked there, by name."""
    given = {key: value for key, value in keys.items() if value is not None}
    if times := given.get("gradient_accumulation_steps"):
        given["batch_size"] = given.get("batch_size", BATCH) * times
    plain = [(OPTIONS.get(key, key), key, given[key]) for key in given if key in OPTIONS or "." in key]
    sections: dict[str, dict[str, Any]] = {}
    for full, key, value in (*plain, *_special(algorithm, given, size)):
        section, _, name = full.partition(".")
        there = sections.setdefault(section, {}).setdefault(name, value)
        if there != value:
            raise ValueError(f"{key} is {value!r}, and {full} is given as {there!r} already; leave one out")
    return sections


def _special(algorithm: str, given: Mapping[str, Any], size: int) -> Iterator[tuple[str, str, Any]]:
    """Yield our name, the textbook's and the value of keys that differ in more than their names."""
    if "optimizer" in given:
        yield "training.optimizer", "optimizer", OPTIMIZERS.get(given["optimizer"], given["optimizer"])
    if "warmup_ratio" in given:
        epochs = given.get("num_epochs", 1) * math.ceil(size / given.get("batch_size", BATCH))
        steps = math.ceil(given["warmup_ratio"] * given.get("max_steps", epochs))
        yield "training.warmup_steps", "warmup_ratio", steps
    if "kl_coef" in given:
        yield f"{algorithm}.kl", "kl_coef", given["kl_coef"]
    if "clip_range" in given:
        # Others have `clip`, or none, which the config tells.
        for name in ("clip_low", "clip_high") if algorithm == "grpo" else ("clip",):
            yield f"{algorithm}.{name}", "clip_range", given["clip_range"]
    board, wandb = given.get("use_tensorboard"), given.get("use_wandb")
    if board is None:  # by name it is used whether it is installed or not, which is told
        board = importlib.util.find_spec("tensorboard") is not None
    if trackers := [name for name, used in (("tensorboard", board), ("wandb", wandb)) if used]:
        yield "logging.trackers", "use_wandb", trackers
    if "wandb_project" in given:
        if not wandb:
            raise ValueError("wandb_project is for use_wandb: true; leave it out, or set that")
        yield "logging.wandb", "wandb_project", {"project": given["wandb_project"]}


def model_section(name: str, lora: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what to load. An adapter is trained on in the form that it has: keys of `lora` that say the same go, and
    of others the trainer tells."""
    found = find_model(name)
    if found.adapter is None or found.folder is None:
        if resolve(found.name) == BUILTIN and lora.get("enabled"):
            return {"name": str(_builtin_in(folder / "base"))}
        # What factories.yaml says more of a name is read with it, later on.
        return found.section if found.written == name else {"name": name}
    if not lora.get("enabled", True):
        raise ValueError(
            f"use_lora is false, and {name} holds an adapter; leave use_lora out, or merge it first: "
            f"tfactory export {name} --out NEW --merge"
        )
    about = json.loads((found.folder / ADAPTER).read_text(encoding="utf-8"))
    for key, its in FORM.items():
        if key in lora and _plain(lora[key]) == _plain(about.get(its)):
            del lora[key]
    return found.section | {"adapter": str(found.folder.resolve())}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value  # PEFT keeps lists in any order


def _builtin_in(folder: Path) -> Path:
    """Write the built-in model into a folder, so that other programs can load an adapter over it."""
    from TrainingFactory.models.loading import load_model

    if not (folder / "config.json").is_file():
        loaded = load_model(BUILTIN, device="cpu")
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    return folder.resolve()


def check_folder(folder: Path) -> None:
    """Raise where a model of others would be written over."""
    there = [name for name in ("config.json", ADAPTER) if (folder / name).is_file()]
    if there and not (folder / RECORD).is_file():
        raise ValueError(
            f"output_dir {folder} holds a model ({there[0]}) that was not trained here; name another folder"
        )


def write_model(trainer: Trainer, output_dir: str | Path, about: Mapping[str, Any]) -> None:
    """Put the trained model into the folder, in place of the one that was trained there before; its run keeps its own
    checkpoints."""
    folder = Path(output_dir).expanduser()
    check_folder(folder)
    part, record = folder / ".model", folder / RECORD
    shutil.rmtree(part, ignore_errors=True)  # of a program that was killed
    trainer.save_model(part)
    old = json.loads(record.read_text(encoding="utf-8"))["files"] if record.is_file() else []
    files = sorted(path.name for path in part.iterdir())
    record.write_text(json.dumps({**about, "files": files}, indent=2, ensure_ascii=False), encoding="utf-8")
    for name in set(old) - set(files):
        (folder / Path(name).name).unlink(missing_ok=True)
    for name in files:
        os.replace(part / name, folder / name)
    part.rmdir()
