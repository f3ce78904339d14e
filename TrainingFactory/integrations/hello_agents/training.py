"""Training with the textbook's keys on our trainers, and the model folder that the textbook loads."""

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
from TrainingFactory.models.names import TINY_ID, resolve_model_name
from TrainingFactory.resolve.model_names import ADAPTER, find_model
from TrainingFactory.runs.tracking import PlainLines, format_metrics_line
from TrainingFactory.trainers.trl_keywords import VALUE_MAP

if TYPE_CHECKING:  # torch, which takes seconds
    from TrainingFactory.trainers.trainer import Trainer

RECORD_FILE = "training_result.json"  # in output_dir; lists the files of the model
# Key of the textbook -> ours. `_convert` converts the keys that need more than another name.
OPTION_KEYS = {
    **{key: f"training.{key}" for key in ("num_epochs", "batch_size", "learning_rate", "warmup_steps", "weight_decay",
                                          "max_grad_norm", "max_steps", "gradient_checkpointing", "seed")},
    "eval_steps": "training.eval_every", "num_generations": "training.group_size",
    "max_new_tokens": "sampling.max_tokens", "temperature": "sampling.temperature",
    "use_lora": "lora.enabled", "lora_r": "lora.r", "lora_rank": "lora.r", "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout", "lora_target_modules": "lora.target_modules",
    "max_length": "model.max_length", "model_revision": "model.revision", "thinking": "model.thinking",
    "dtype": "model.dtype", "save_steps": "logging.checkpoint_every",
}  # fmt: skip
SPECIAL_KEYS = ("optimizer", "warmup_ratio", "gradient_accumulation_steps", "kl_coef", "clip_range",
           "use_wandb", "use_tensorboard", "wandb_project", "logging_steps")  # fmt: skip
OPTIMIZERS = VALUE_MAP["optim"][1]
BATCH_SIZE = 4  # the textbook's default
# Key of our section `lora` -> key of PEFT's adapter config
PEFT_KEYS = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "target_modules"}


class DetailedLoggingCallback(PlainLines):
    """Prints epoch, step and metrics every `logging_steps` steps and after the last step."""

    def __init__(
        self, total_steps: int | None = None, num_epochs: int | None = None, logging_steps: int = 1
    ) -> None:
        self.total_steps, self.num_epochs, self.logging_steps = total_steps, num_epochs, logging_steps

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        total, epochs = self.total_steps or total, self.num_epochs or 1
        if step % self.logging_steps == 0 or step == total:
            epoch = min(epochs, max(1, math.ceil(epochs * step / total)))
            self.say(f"Epoch {epoch}/{epochs} | Step {step}/{total} | {format_metrics_line(metrics)}")


def pick_row_reader(algorithm: str) -> datasets.RowReader:
    """Return the function that reads the rows of an algorithm."""
    return datasets.read_tasks if KINDS[algorithm].samples else datasets.read_examples


def train(
    algorithm: str, model_name: str, rows: list[dict], output_dir: str | Path, settings: Mapping[str, Any],
    reward_fn: Callable[..., Any] | None = None, heldout_rows: Any = None
) -> tuple[Trainer, dict[str, Any]]:  # fmt: skip
    """Train a run in the folder `runs` of `output_dir`. Return the trainer and the results.

    `settings` have the textbook's keys, or ours in full (`grpo.scale_rewards`); `heldout_rows` are for `eval_steps`."""
    is_online = KINDS[algorithm].samples
    folder = Path(output_dir).expanduser()
    check_folder(folder)
    options: dict[str, Any] = {**make_config_sections(algorithm, settings, len(rows))}
    # The textbook points TensorBoard at the folder `runs`.
    options.setdefault("logging", {})["output_dir"] = str(folder / "runs")
    model = make_model_section(model_name, options.setdefault("lora", {}), folder)
    options["model"] = model | options.get("model", {})
    options |= {"tasks": rows, "environment": "conversation"} if is_online else {"dataset": rows}
    if heldout_rows is not None:
        options["heldout"] = pick_row_reader(algorithm)(heldout_rows)
    prefix = "RewardModel" if algorithm == "reward_model" else algorithm.upper()
    watcher = DetailedLoggingCallback(None, settings.get("num_epochs"), settings.get("logging_steps") or 1)
    trainer = getattr(services, f"{prefix}Trainer")(**options, reward_function=reward_fn, watcher=watcher)
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


def make_config_sections(algorithm: str, keys: Mapping[str, Any], num_rows: int) -> dict[str, dict[str, Any]]:
    """Convert the HelloAgents textbook's keys to config sections. The config validates the values."""
    options = {key: value for key, value in keys.items() if value is not None}
    if accumulation_steps := options.get("gradient_accumulation_steps"):
        options["batch_size"] = options.get("batch_size", BATCH_SIZE) * accumulation_steps
    option_rows = [
        (OPTION_KEYS.get(key, key), key, options[key]) for key in options if key in OPTION_KEYS or "." in key
    ]
    sections: dict[str, dict[str, Any]] = {}
    for full_key, key, value in (*option_rows, *_convert(algorithm, options, num_rows)):
        section, _, name = full_key.partition(".")
        current_value = sections.setdefault(section, {}).setdefault(name, value)
        if current_value != value:
            raise ValueError(f"{key} is {value!r}, but {full_key} is already {current_value!r}. Remove one.")
    return sections


def _convert(algorithm: str, options: Mapping[str, Any], num_rows: int) -> Iterator[tuple[str, str, Any]]:
    """Yield our key, the textbook's key and the converted value of each option that needs a conversion."""
    if "optimizer" in options:
        yield "training.optimizer", "optimizer", OPTIMIZERS.get(options["optimizer"], options["optimizer"])
    if "warmup_ratio" in options:
        num_steps = options.get("num_epochs", 1) * math.ceil(num_rows / options.get("batch_size", BATCH_SIZE))
        warmup_steps = math.ceil(options["warmup_ratio"] * options.get("max_steps", num_steps))
        yield "training.warmup_steps", "warmup_ratio", warmup_steps
    if "kl_coef" in options:
        yield f"{algorithm}.kl", "kl_coef", options["kl_coef"]
    if "clip_range" in options:
        # For algorithms without `clip` the config reports the key.
        for name in ("clip_low", "clip_high") if algorithm == "grpo" else ("clip",):
            yield f"{algorithm}.{name}", "clip_range", options["clip_range"]
    tensorboard, wandb = options.get("use_tensorboard"), options.get("use_wandb")
    if tensorboard is None:  # used if installed; requested explicitly, a missing package is an error
        tensorboard = importlib.util.find_spec("tensorboard") is not None
    if trackers := [name for name, is_used in (("tensorboard", tensorboard), ("wandb", wandb)) if is_used]:
        yield "logging.trackers", "use_wandb", trackers
    if "wandb_project" in options:
        if not wandb:
            raise ValueError("wandb_project is set, but use_wandb is not. Remove it, or set use_wandb: true.")
        yield "logging.wandb", "wandb_project", {"project": options["wandb_project"]}


def make_model_section(name: str, lora: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config section of the model to load. An adapter keeps its own LoRA settings: keys in `lora` with the
    same values are removed from it; the trainer rejects keys with other values."""
    resolved_model = find_model(name)
    if resolved_model.adapter is None or resolved_model.folder is None:
        if resolve_model_name(resolved_model.name) == TINY_ID and lora.get("enabled"):
            return {"name": str(_save_builtin_model(folder / "base"))}
        # Further keys that factories.yaml has for a name are resolved later, from the name.
        return resolved_model.section if resolved_model.query == name else {"name": name}
    if not lora.get("enabled", True):
        raise ValueError(
            f"use_lora is false, but {name} is an adapter. Remove use_lora, or merge the adapter first: "
            f"tfactory export {name} --out NEW --merge"
        )
    adapter_config = json.loads((resolved_model.folder / ADAPTER).read_text(encoding="utf-8"))
    for key, peft_key in PEFT_KEYS.items():
        if key in lora and _sort_if_list(lora[key]) == _sort_if_list(adapter_config.get(peft_key)):
            del lora[key]
    return resolved_model.section | {"adapter": str(resolved_model.folder.resolve())}


def _sort_if_list(setting: Any) -> Any:
    return sorted(setting) if isinstance(setting, list) else setting  # PEFT stores lists in any order


def _save_builtin_model(folder: Path) -> Path:
    """Save the built-in model to a folder, so that other programs can load an adapter on top of it."""
    from TrainingFactory.models.loading import load_model

    if not (folder / "config.json").is_file():
        loaded_model = load_model(TINY_ID, device="cpu")
        loaded_model.model.save_pretrained(folder)
        loaded_model.tokenizer.save_pretrained(folder)
    return folder.resolve()


def check_folder(folder: Path) -> None:
    """Raise ValueError if the folder contains a model that was not written by `write_model`."""
    existing_files = [name for name in ("config.json", ADAPTER) if (folder / name).is_file()]
    if existing_files and not (folder / RECORD_FILE).is_file():
        raise ValueError(
            f"output_dir {folder} holds a model ({existing_files[0]}) that was not trained here. Choose another folder."
        )


def write_model(trainer: Trainer, output_dir: str | Path, model_info: Mapping[str, Any]) -> None:
    """Write the trained model to a folder, in place of an earlier model; keep the runs' checkpoints."""
    folder = Path(output_dir).expanduser()
    check_folder(folder)
    temp_folder, record_path = folder / ".model", folder / RECORD_FILE
    shutil.rmtree(temp_folder, ignore_errors=True)  # left by a killed program
    trainer.save_model(temp_folder)
    old_names = json.loads(record_path.read_text(encoding="utf-8"))["files"] if record_path.is_file() else []
    file_names = sorted(path.name for path in temp_folder.iterdir())
    record_path.write_text(
        json.dumps({**model_info, "files": file_names}, indent=2, ensure_ascii=False), encoding="utf-8"
    )
    for name in set(old_names) - set(file_names):
        (folder / Path(name).name).unlink(missing_ok=True)
    for name in file_names:
        os.replace(temp_folder / name, folder / name)
    temp_folder.rmdir()
