"""The names of `hello_agents.rl`: a config, a wrapper for each trainer, and small functions around them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.integrations.hello_agents import training
from TrainingFactory.integrations.hello_agents.datasets import (  # noqa: F401
    GSM8KDataset,
    create_math_dataset,
    create_rl_dataset,
    create_sft_dataset,
    format_math_dataset,
    preview_dataset,
)
from TrainingFactory.integrations.hello_agents.rewards import (  # noqa: F401
    MathRewardFunction,
    create_accuracy_reward,
    create_length_penalty_reward,
    create_step_reward,
    evaluate_rewards,
)
from TrainingFactory.integrations.hello_agents.tool import Result

TRL_AVAILABLE = True  # what it stands for: everything that training needs is here
DetailedLoggingCallback = training.DetailedLoggingCallback
# Fields of the config that are the same key of the tool under another name.
RENAMED = {"num_train_epochs": "num_epochs", "per_device_train_batch_size": "batch_size"}
NOT_KEYS = {"model_name", "output_dir", "top_p", "use_fp16", "use_bf16"}


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
        keys = {RENAMED.get(key, key): value for key, value in self.to_dict().items()}
        keys["dtype"] = "bfloat16" if self.use_bf16 else "auto" if self.use_fp16 else "float32"
        unused = NOT_KEYS | {key for key in keys if key.startswith("lora_") and not self.use_lora}
        unused |= set() if KINDS[algorithm].samples else {"max_new_tokens", "temperature"}
        unused |= set() if evaluated else {"eval_steps"}
        unused |= {"use_tensorboard"} if self.use_tensorboard else set()  # it is used where it is installed
        if self.warmup_steps == TrainingConfig.warmup_steps:
            unused |= {"warmup_steps"}
            keys["warmup_ratio"] = 0.1
        if self.top_p != TrainingConfig.top_p:
            print(
                f"note: top_p {self.top_p} does not change training: that samples from the whole distribution"
            )
        return {key: value for key, value in keys.items() if key not in unused}


def setup_training_environment(config: TrainingConfig) -> None:
    """Make the output folder, and seed Python, numpy and torch. A run seeds itself by `config.seed` anyway."""
    from transformers import set_seed

    Path(config.output_dir).expanduser().mkdir(parents=True, exist_ok=True)
    set_seed(config.seed)
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
    from torch import cuda

    name = cuda.get_device_name(0) if cuda.is_available() else None
    count = cuda.device_count()
    return {"cuda_available": count > 0, "cuda_device_count": count, "cuda_device_name": name}


def print_training_summary(
    algorithm: str, model_name: str, dataset_name: str, num_epochs: int, output_dir: str
) -> None:
    print(f"{algorithm}: {model_name}, {dataset_name}, {num_epochs} epochs -> {output_dir}")


class BaseTrainerWrapper:
    """Trains `dataset` as `config` says. Fields of the config can be given by themselves too."""

    algorithm: ClassVar[str]

    def __init__(
        self, config: TrainingConfig | None = None, dataset: Any = None, reward_fn: Any = None, *,
        eval_dataset: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        names = {new: old for old, new in RENAMED.items()}
        given = {names.get(key, key): value for key, value in options.items()}
        self.config = replace(config or TrainingConfig(), **given)
        self.dataset, self.eval_dataset, self.reward_fn = dataset, eval_dataset, reward_fn
        self.trainer = self.model = self.tokenizer = None
        self._about: dict[str, Any] = {}

    def setup_model(self) -> None:
        """Load the model and its tokenizer, to look at; training loads its own."""
        from TrainingFactory.models.loading import load_model

        found = training.find_model(self.config.model_name)
        loaded = load_model(found.name, adapter=found.adapter, revision=self.config.model_revision)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer

    def train(self) -> Result:
        """Train, and return how it went. `save_model` writes the model."""
        if self.dataset is None:
            raise ValueError(f"{type(self).__name__} has no dataset: give dataset=")
        if (self.reward_fn is not None) != KINDS[self.algorithm].samples:
            wrong = "has no reward: give reward_fn=" if self.reward_fn is None else "takes no reward_fn"
            raise ValueError(f"{type(self).__name__} {wrong}")
        config, rows = self.config, training.reader(self.algorithm)(self.dataset)
        keys = config.keys_for(self.algorithm, self.eval_dataset is not None)
        told = self.algorithm, config.model_name, rows, config.output_dir, keys
        self.trainer, self._about = training.train(*told, self.reward_fn, self.eval_dataset)
        return Result(self._about)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model (with LoRA its adapter) into `output_dir`, by default that of the config."""
        if self.trainer is None:
            raise ValueError("there is no model to save yet: call train() first")
        folder = str(output_dir or self.config.output_dir)
        about = self._about | {"output_dir": folder, "model_path": folder}
        training.write_model(self.trainer, folder, about)


class SFTTrainerWrapper(BaseTrainerWrapper):
    algorithm = "sft"


class GRPOTrainerWrapper(BaseTrainerWrapper):
    algorithm = "grpo"


class PPOTrainerWrapper(BaseTrainerWrapper):
    """Trains with a critic; `reward_model` is the function that scores completions, by default accuracy."""

    algorithm = "ppo"

    def __init__(
        self, config: TrainingConfig | None = None, dataset: Any = None, reward_model: Any = None, **more: Any
    ) -> None:
        super().__init__(config, dataset, reward_model or create_accuracy_reward(), **more)
