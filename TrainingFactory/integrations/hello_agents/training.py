"""From the textbook's keys to a run of our trainers, and its model to the folder that the textbook loads."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.integrations.hello_agents import datasets
from TrainingFactory.models.names import BUILTIN, resolve
from TrainingFactory.services.export import ADAPTER
from TrainingFactory.services.reward_model import RewardModelTrainer
from TrainingFactory.services.rl_trainer import GRPOTrainer, PPOTrainer, RFTTrainer
from TrainingFactory.services.runs.folder import TrainingReport
from TrainingFactory.services.runs.tracking import PlainLines, in_short
from TrainingFactory.services.sft_trainer import DPOTrainer, KTOTrainer, SFTTrainer
from TrainingFactory.services.trainers import Trainer

KINDS_OF_TRAINER = (
    SFTTrainer,
    GRPOTrainer,
    PPOTrainer,
    DPOTrainer,
    KTOTrainer,
    RFTTrainer,
    RewardModelTrainer,
)
TRAINERS: dict[str, type[Trainer]] = {kind.algorithm: kind for kind in KINDS_OF_TRAINER}
RECORD = "training_result.json"  # in output_dir, with the names of the model's files
# A plain key of the textbook -> ours. What needs more than another name is in `sections_of`.
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
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "paged_adamw_8bit": "adamw_8bit"}
CLIPS = {"grpo": ("clip_low", "clip_high")}  # others have `clip`, or none, which the config tells
BATCH = 4
FORM = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "target_modules"}


class DetailedLoggingCallback(PlainLines):
    """Prints a line with epoch, step and figures every `logging_steps` steps, and after the last."""

    def __init__(
        self, total_steps: int | None = None, num_epochs: int | None = None, logging_steps: int = 1
    ) -> None:
        self.total_steps, self.num_epochs, self.logging_steps = total_steps, num_epochs, logging_steps

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        total = self.total_steps or total
        if step % self.logging_steps and step != total:
            return
        epochs = self.num_epochs or 1
        epoch = min(epochs, max(1, math.ceil(epochs * step / total)))
        self.say(f"Epoch {epoch}/{epochs} | Step {step}/{total} | {in_short(metrics)}")


@dataclass(slots=True)
class Job:
    """Says what to train: `keys` are the textbook's, or ours in full (`grpo.scale_rewards`)."""

    algorithm: str
    model_name: str
    rows: Any
    output_dir: str | Path
    keys: dict[str, Any] = field(default_factory=dict)
    reward: Callable[..., Any] | None = None
    split: str = "train"
    count: int | None = None
    heldout: Callable[[], Any] | None = None  # rows to evaluate on, where eval_steps asks for it


@dataclass(slots=True)
class Trained:
    trainer: Trainer
    report: TrainingReport
    size: int


def train(job: Job) -> Trained:
    """Run the job; the run's folder is in `runs` of `output_dir`."""
    samples, folder = KINDS[job.algorithm].samples, Path(job.output_dir).expanduser()
    check_folder(folder)
    rows = (datasets.tasks if samples else datasets.examples)(job.rows, job.split, job.count)
    sections: dict[str, Any] = {**sections_of(job.algorithm, job.keys, len(rows))}
    # The same for every algorithm; `runs` is also where TensorBoard looks in the textbook.
    sections.setdefault("logging", {})["output_dir"] = str(folder / "runs")
    model = model_section(job.model_name, sections.setdefault("lora", {}), folder)
    sections["model"] = model | sections.get("model", {})
    watcher = DetailedLoggingCallback(
        num_epochs=job.keys.get("num_epochs"), logging_steps=job.keys.get("logging_steps") or 1
    )
    given: dict[str, Any] = {"dataset": rows}
    if samples:
        given = {"tasks": rows, "environment": "conversation", "reward_function": job.reward}
    if "eval_every" in sections.get("training", {}):
        given |= _heldout(job, folder, samples)
    trainer: Trainer = TRAINERS[job.algorithm](**given, **sections, watcher=watcher)
    if trainer.notices:
        raise ValueError("; ".join(trainer.notices))
    return Trained(trainer, trainer.train(), len(rows))


def _heldout(job: Job, folder: Path, samples: bool) -> dict[str, Any]:
    if job.heldout is None:
        raise ValueError("eval_steps needs rows to evaluate on, and this dataset has no others")
    rows = job.heldout()
    if not samples:
        return {"heldout": datasets.examples(rows)}
    path = folder / "heldout.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in datasets.tasks(rows))
    path.write_text("".join(lines), encoding="utf-8")
    return {"heldout": str(path)}


def sections_of(algorithm: str, keys: Mapping[str, Any], size: int) -> dict[str, dict[str, Any]]:
    """Return the sections of a config that the keys stand for. Values are checked there, by name."""
    given = {key: value for key, value in keys.items() if value is not None}
    if times := given.get("gradient_accumulation_steps"):
        given["batch_size"] = given.get("batch_size", BATCH) * times
    named = [
        (OPTIONS.get(key, key), key, value) for key, value in given.items() if key in OPTIONS or "." in key
    ]
    sections: dict[str, dict[str, Any]] = {}
    for full, key, value in (*named, *_special(algorithm, given, size)):
        section, _, name = full.partition(".")
        there = sections.setdefault(section, {})
        if there.setdefault(name, value) != value:
            raise ValueError(
                f"{key} is {value!r}, and {full} is given as {there[name]!r} already; leave one out"
            )
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
        for name in CLIPS.get(algorithm, ("clip",)):
            yield f"{algorithm}.{name}", "clip_range", given["clip_range"]
    if trackers := _trackers(given):
        yield "logging.trackers", "use_wandb", trackers
    if "wandb_project" in given:
        if not given.get("use_wandb"):
            raise ValueError("wandb_project is for use_wandb: true; leave it out, or set that")
        yield "logging.wandb", "wandb_project", {"project": given["wandb_project"]}


def _trackers(keys: Mapping[str, Any]) -> list[str]:
    """Return where metrics go; TensorBoard by default where it is installed, by name whether it is or not."""
    board = keys.get("use_tensorboard")
    if board is None:
        board = importlib.util.find_spec("tensorboard") is not None
    return [*(["tensorboard"] if board else []), *(["wandb"] if keys.get("use_wandb") else [])]


def model_section(name: str, lora: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what to load: of a folder with an adapter the model under it, and the adapter to train on."""
    path = Path(name).expanduser()
    if (path / ADAPTER).is_file():
        about = json.loads((path / ADAPTER).read_text(encoding="utf-8"))
        if not lora.get("enabled", True):
            raise ValueError(
                f"use_lora is false, and {name} holds an adapter; leave use_lora out, or merge it first: "
                f"tfactory export {path} --out NEW --merge"
            )
        # It is trained on in the form that it has; what asks for another one is told by the trainer.
        for key, its in FORM.items():
            if key in lora and _plain(lora[key]) == _plain(about.get(its)):
                del lora[key]
        return {"name": about["base_model_name_or_path"], "adapter": str(path.resolve())}
    if resolve(name) == BUILTIN and lora.get("enabled"):
        return {"name": str(_builtin_in(folder / "base"))}
    return {"name": name}


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
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file; name a folder")
    there = [name for name in ("config.json", ADAPTER) if (folder / name).is_file()]
    if there and not (folder / RECORD).is_file():
        raise ValueError(
            f"output_dir {folder} holds a model ({there[0]}) that was not trained here; name another folder"
        )


def write_model(trainer: Trainer, folder: str | Path, about: Mapping[str, Any]) -> None:
    """Put the trained model into the folder, in place of the one that was trained there before; its run keeps its own
    checkpoints."""
    folder = Path(folder).expanduser()
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
