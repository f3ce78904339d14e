"""The names of `hello_agents.rl`: a config, a wrapper for each trainer, and utility functions."""

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

TRL_AVAILABLE = True  # for programs that check it: everything that training needs is installed
DetailedLoggingCallback = training.DetailedLoggingCallback
# Config fields that the tool knows under another name.
RENAMED_KEYS = {"num_train_epochs": "num_epochs", "per_device_train_batch_size": "batch_size"}
IGNORED_KEYS = {"model_name", "output_dir", "top_p", "use_fp16", "use_bf16"}


@dataclass
class TrainingConfig:
    """Options of a trainer wrapper. `use_fp16` selects bfloat16 if the device supports it; without `use_fp16` and
    `use_bf16` weights are float32. `top_p` does not affect training, which samples from the full distribution.
    `eval_steps` needs an `eval_dataset`. The default of `warmup_steps` means a tenth of all steps."""

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

    def convert_keys(self, algorithm: str, is_evaluated: bool) -> dict[str, Any]:
        """Return the config as keys of `RLTrainingTool`, without keys that the algorithm does not use. `is_evaluated`:
        the wrapper has an `eval_dataset`."""
        keys = {RENAMED_KEYS.get(key, key): value for key, value in self.to_dict().items()}
        keys["dtype"] = "bfloat16" if self.use_bf16 else "auto" if self.use_fp16 else "float32"
        unused_keys = IGNORED_KEYS | {key for key in keys if key.startswith("lora_") and not self.use_lora}
        unused_keys |= set() if KINDS[algorithm].samples else {"max_new_tokens", "temperature"}
        unused_keys |= set() if is_evaluated else {"eval_steps"}
        unused_keys |= {"use_tensorboard"} if self.use_tensorboard else set()  # used if it is installed
        if self.warmup_steps == TrainingConfig.warmup_steps:
            unused_keys |= {"warmup_steps"}
            keys["warmup_ratio"] = 0.1
        if self.top_p != TrainingConfig.top_p:
            print(f"note: top_p {self.top_p} is ignored: training samples from the full distribution")
        return {key: value for key, value in keys.items() if key not in unused_keys}


def setup_training_environment(config: TrainingConfig) -> None:
    """Create the output folder and seed Python, numpy and torch. Runs also seed themselves with `config.seed`."""
    from transformers import set_seed

    Path(config.output_dir).expanduser().mkdir(parents=True, exist_ok=True)
    set_seed(config.seed)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def check_trl_installation() -> bool:
    """Return True, because our trainers do not need TRL."""
    return True


def get_installation_guide() -> str:
    return "pip install training-factory"


def format_training_time(seconds: float) -> str:
    """Format seconds as a duration such as 1h 2m 3s."""
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    prefix = f"{hours}h {minutes}m " if hours else f"{minutes}m " if minutes else ""
    return f"{prefix}{seconds_left}s"


def get_device_info() -> dict[str, Any]:
    from torch import cuda

    gpu_name = cuda.get_device_name(0) if cuda.is_available() else None
    num_gpus = cuda.device_count()
    return {"cuda_available": num_gpus > 0, "cuda_device_count": num_gpus, "cuda_device_name": gpu_name}


def print_training_summary(
    algorithm: str, model_name: str, dataset_name: str, num_epochs: int, output_dir: str
) -> None:
    print(f"{algorithm}: {model_name}, {dataset_name}, {num_epochs} epochs -> {output_dir}")


class BaseTrainerWrapper:
    """Trainer wrapper for `dataset`; keyword arguments `options` override fields of `config`."""

    algorithm: ClassVar[str]

    def __init__(
        self, config: TrainingConfig | None = None, dataset: Any = None, reward_fn: Any = None, *,
        eval_dataset: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        field_by_key = {key: field_name for field_name, key in RENAMED_KEYS.items()}
        fields = {field_by_key.get(key, key): value for key, value in options.items()}
        self.config = replace(config or TrainingConfig(), **fields)
        self.dataset, self.eval_dataset, self.reward_fn = dataset, eval_dataset, reward_fn
        self.trainer = self.model = self.tokenizer = None
        self._training_result: dict[str, Any] = {}

    def setup_model(self) -> None:
        """Load the model and its tokenizer for inspection; `train` does not use them and loads its own copy."""
        from TrainingFactory.models.loading import load_model

        resolved_model = training.find_model(self.config.model_name)
        loaded_model = load_model(
            resolved_model.name, adapter=resolved_model.adapter, revision=self.config.model_revision
        )
        self.model, self.tokenizer = loaded_model.model, loaded_model.tokenizer

    def train(self) -> Result:
        """Train and return the results; the trained model is written by `save_model`."""
        if self.dataset is None:
            raise ValueError(f"{type(self).__name__} has no dataset. Pass dataset=.")
        if (self.reward_fn is not None) != KINDS[self.algorithm].samples:
            error_text = "has no reward. Pass" if self.reward_fn is None else "takes no reward. Remove"
            raise ValueError(f"{type(self).__name__} {error_text} reward_fn=.")
        rows = training.pick_row_reader(self.algorithm)(self.dataset)
        settings = self.config.convert_keys(self.algorithm, self.eval_dataset is not None)
        model, folder = self.config.model_name, self.config.output_dir
        self.trainer, self._training_result = training.train(
            self.algorithm, model, rows, folder, settings, self.reward_fn, self.eval_dataset
        )
        return Result(self._training_result)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model, or with LoRA its adapter, to `output_dir`; None: the config's `output_dir`."""
        if self.trainer is None:
            raise ValueError("there is no trained model to save. Call train() first.")
        folder = str(output_dir or self.config.output_dir)
        record = self._training_result | {"output_dir": folder, "model_path": folder}
        training.write_model(self.trainer, folder, record)


class SFTTrainerWrapper(BaseTrainerWrapper):
    algorithm = "sft"


class GRPOTrainerWrapper(BaseTrainerWrapper):
    algorithm = "grpo"


class PPOTrainerWrapper(BaseTrainerWrapper):
    """PPO trainer with a critic; `reward_model` is the reward function, by default accuracy."""

    algorithm = "ppo"

    def __init__(
        self, config: TrainingConfig | None = None, dataset: Any = None, reward_model: Any = None, **more: Any
    ) -> None:
        super().__init__(config, dataset, reward_model or create_accuracy_reward(), **more)
