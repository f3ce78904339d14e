"""The textbook's lower interface: a config, a wrapper for each trainer, and small functions around them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.integrations.hello_agents.results import Result
from TrainingFactory.integrations.hello_agents.rewards import create_accuracy_reward
from TrainingFactory.integrations.hello_agents.training import (
    DetailedLoggingCallback as DetailedLoggingCallback,
)
from TrainingFactory.integrations.hello_agents.training import Job, Trained, train, write_model

SAMPLED = ("max_new_tokens", "temperature")
# Fields of the config that are the same key of the tool under another name.
RENAMED = {"num_train_epochs": "num_epochs", "per_device_train_batch_size": "batch_size"}
NOT_KEYS = ("model_name", "output_dir", "top_p", "use_fp16", "use_bf16")


@dataclass
class TrainingConfig:
    """Holds the options of a wrapper. `use_fp16` is half precision where the device has it (bfloat16), without it and
    `use_bf16` weights are float32. `top_p` is for sampling outside training, which needs the whole distribution.
    `eval_steps` counts where the wrapper has an `eval_dataset`. `warmup_steps` left at its default is a tenth of
    the steps."""

    model_name: str = "Qwen/Qwen3-0.6B"
    model_revision: str | None = None
    output_dir: str = "./output"
    num_train_epochs: int = 3
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 4
    learning_rate: float = 5e-5
    warmup_steps: int = 100
    logging_steps: int = 10
    save_steps: int = 500
    eval_steps: int = 500
    max_new_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 0.9
    use_fp16: bool = True
    use_bf16: bool = False
    gradient_checkpointing: bool = True
    use_lora: bool = True
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])
    use_wandb: bool = False
    wandb_project: str | None = None
    use_tensorboard: bool = True
    seed: int = 42
    max_length: int = 2048

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def keys_for(self, algorithm: str, evaluated: bool) -> dict[str, Any]:
        """Return the keys of the tool that this config stands for."""
        keys = {RENAMED.get(key, key): value for key, value in self.to_dict().items() if key not in NOT_KEYS}
        unused = [] if KINDS[algorithm].samples else [*SAMPLED]
        unused += [] if evaluated else ["eval_steps"]
        unused += [] if self.use_lora else [key for key in keys if key.startswith("lora_")]
        default = {each.name: each.default for each in fields(self)}
        for name in ("warmup_steps", "use_tensorboard"):
            unused += [name] if getattr(self, name) == default[name] else []
        if self.warmup_steps == default["warmup_steps"]:
            keys["warmup_ratio"] = 0.1
        keys["dtype"] = "bfloat16" if self.use_bf16 else "auto" if self.use_fp16 else "float32"
        if self.top_p != default["top_p"]:
            print(
                f"note: top_p {self.top_p} does not change training, which samples from the whole distribution"
            )
        return {key: value for key, value in keys.items() if key not in unused}


def setup_training_environment(config: TrainingConfig) -> None:
    """Make the output folder, and seed Python, numpy and torch. A run seeds itself by `config.seed` anyway."""
    import numpy
    import torch

    Path(config.output_dir).expanduser().mkdir(parents=True, exist_ok=True)
    random.seed(config.seed)
    numpy.random.seed(config.seed)
    torch.manual_seed(config.seed)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def check_trl_installation() -> bool:
    """Return true: training here needs no TRL."""
    return True


def get_installation_guide() -> str:
    return "pip install training-factory"


def format_training_time(seconds: float) -> str:
    """Return a time such as 1h 2m 3s."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    shown = f"{hours}h {minutes}m " if hours else f"{minutes}m " if minutes else ""
    return f"{shown}{rest}s"


def get_device_info() -> dict[str, Any]:
    import torch

    there = torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if there else None
    return {"cuda_available": there, "cuda_device_count": torch.cuda.device_count(), "cuda_device_name": name}


def print_training_summary(
    algorithm: str, model_name: str, dataset_name: str, num_epochs: int, output_dir: str
) -> None:
    print(f"{algorithm}: {model_name}, {dataset_name}, {num_epochs} epochs -> {output_dir}")


class BaseTrainerWrapper:
    """Trains `dataset` as `config` says. Fields of the config can be given by themselves too."""

    algorithm: ClassVar[str]

    def __init__(
        self,
        config: TrainingConfig | None = None,
        dataset: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        *,
        eval_dataset: Any = None,
        **options: Any,
    ) -> None:
        names = {new: old for old, new in RENAMED.items()}
        self.config = replace(
            config or TrainingConfig(), **{names.get(key, key): value for key, value in options.items()}
        )
        self.dataset, self.eval_dataset, self.reward_fn = dataset, eval_dataset, reward_fn
        if reward_fn is not None and not KINDS[self.algorithm].samples:
            raise ValueError(f"{type(self).__name__} learns from its dataset and takes no reward_fn")
        self.trainer: Any = None
        self.model: Any = None
        self.tokenizer: Any = None
        self._trained: Trained | None = None

    def setup_model(self) -> None:
        """Load the model and its tokenizer, to look at; training loads its own."""
        from TrainingFactory.models.loading import load_model

        loaded = load_model(self.config.model_name, revision=self.config.model_revision)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer

    def train(self) -> Result:
        """Train, and return how it went. `save_model` writes the model."""
        if self.dataset is None:
            raise ValueError(f"{type(self).__name__} has no dataset: give dataset=")
        if self.reward_fn is None and KINDS[self.algorithm].samples:
            raise ValueError(f"{type(self).__name__} has no reward: give reward_fn=")
        evaluated = self.eval_dataset is not None
        job = Job(
            self.algorithm,
            self.config.model_name,
            self.dataset,
            self.config.output_dir,
            self.config.keys_for(self.algorithm, evaluated),
            self.reward_fn,
            heldout=(lambda: self.eval_dataset) if evaluated else None,
        )
        self._trained = train(job)
        self.trainer = self._trained.trainer
        return Result(report_of(job, self._trained))

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model (with LoRA its adapter) into `output_dir`, by default that of the config."""
        if self._trained is None:
            raise ValueError("there is no model to save yet: call train() first")
        job = Job(self.algorithm, self.config.model_name, None, output_dir or self.config.output_dir)
        write_model(self.trainer, job.output_dir, report_of(job, self._trained))


class SFTTrainerWrapper(BaseTrainerWrapper):
    algorithm = "sft"


class GRPOTrainerWrapper(BaseTrainerWrapper):
    algorithm = "grpo"


class PPOTrainerWrapper(BaseTrainerWrapper):
    """Trains with a critic; `reward_model` is the function that scores completions, by default accuracy."""

    algorithm = "ppo"

    def __init__(
        self,
        config: TrainingConfig | None = None,
        dataset: Any = None,
        reward_model: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, dataset, reward_model or create_accuracy_reward(), **options)


def report_of(job: Job, trained: Trained) -> dict[str, Any]:
    """Return what is told about a run that has ended."""
    report, config = trained.report, trained.trainer.config
    return {
        "status": "success" if report.state == "finished" else report.state,
        "algorithm": job.algorithm.upper(),
        "model": job.model_name,
        "model_name": job.model_name,
        "output_dir": str(job.output_dir),
        "model_path": str(job.output_dir),
        "num_epochs": config.training.num_epochs,
        "dataset_size": trained.size,
        "num_samples": trained.size,
        "use_lora": config.lora.enabled or config.model.adapter is not None,
        "learning_rate": config.training.learning_rate,
        "steps": report.steps,
        "final_loss": report.metrics.get("loss"),
        "average_reward": report.metrics.get("reward"),
        "run": str(report.run),
    }
