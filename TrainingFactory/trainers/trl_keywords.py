"""TRL's option names for our trainers. Each name is translated into our option, or rejected with the option to use
instead. Options that a program does not set keep our defaults, except those in `ALWAYS_READ`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import ceil
from typing import Any, get_args

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.common.options import show_value
from TrainingFactory.config.names import ALIASES
from TrainingFactory.config.schema import ALGORITHMS, RewardType
from TrainingFactory.rewards.adapt import NoReward, Unscored
from TrainingFactory.rewards.combined import Combined
from TrainingFactory.trainers.keywords import TRL_NAMES, find_sections, merge_into_section
from TrainingFactory.types import Reward

PLAIN_TYPES = (str, int, float, list, tuple, set, dict)  # TRL's config creates values of other types itself
# Read from a config object even if they equal the class's default, because programs rely on these defaults.
ALWAYS_READ = (
    "per_device_train_batch_size", "num_generations", "num_train_epochs", "learning_rate", "lr_scheduler_type",
    "max_completion_length", "scale_rewards", "epsilon", "beta", "seed", "r", "lora_alpha", "lora_dropout",
)  # fmt: skip

# Their name -> our key: the same meaning, the same values.
RENAMED_OPTIONS = {
    "num_generations": "training.group_size", "max_completion_length": "sampling.max_tokens",
    "num_iterations": "training.update_epochs", "seed": "training.seed", "shuffle_dataset": "data.shuffle",
    "save_total_limit": "logging.keep_checkpoints", "epsilon_high": "grpo.clip_high", "delta": "grpo.clip_dual",
    "importance_sampling_level": "grpo.ratio",
}  # fmt: skip
# The same for integers, which TRL may write as 1.0.
INTEGER_OPTIONS = {
    "num_train_epochs": "training.num_epochs", "save_steps": "logging.checkpoint_every",
    "eval_steps": "training.eval_every", "max_tool_calling_iterations": "environment.max_turns",
}  # fmt: skip
BATCH_OPTIONS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
)  # fmt: skip
# Fields of `peft.LoraConfig`, and those that can be ignored.
LORA_FIELDS = {
    "r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_dora": "dora",
    "use_rslora": "rslora",
}
IGNORED_LORA_FIELDS = {"task_type", "inference_mode", "base_model_name_or_path", "peft_type"}
# Their name -> our key, and their values -> our values.
VALUE_MAP: dict[str, tuple[str, dict[Any, Any]]] = {
    "lr_scheduler_type": ("training.schedule", {
        "constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}),
    "optim": ("training.optimizer", {
        "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_8bit": "adamw_8bit",
        "adamw_bnb_8bit": "adamw_8bit"}),
    "bf16": ("model.dtype", {True: "bfloat16", False: "float32"}),
    "use_cpu": ("model.device", {True: "cpu", False: "auto"}),
    "use_vllm": ("sampling.engine", {True: "vllm", False: "native"}),
    "mask_truncated_completions": ("grpo.train_truncated", {True: False, False: True}),
    "scale_rewards": ("grpo.scale_rewards", {"group": True, True: True, "none": False, False: False}),
    "precompute_ref_log_probs": ("dpo.reference", {True: "precomputed", False: "live"}),
    "loss_type": ("grpo.normalization", {
        "grpo": "sequence", "dapo": "token", "bnpo": "token", "cispo": "token", "dr_grpo": "constant"}),
}  # fmt: skip
# Options without effect on training: reported and ignored.
IGNORED_OPTIONS = {
    "logging_steps": "every step is logged",
    "max_prompt_length": "prompts are never truncated; model.max_length limits the whole conversation",
    "processing_class": "tokenizer and chat template come from the model's folder",
    "packing": "rows are always packed, and none attends to another",
    "save_strategy": "logging.checkpoint_every counts steps; the end of a run always has a checkpoint",
    "eval_strategy": "training.eval_every counts steps, as eval_steps does",
    "completion_only_loss": "only assistant tokens are trained",
    "assistant_only_loss": "only assistant tokens are trained",
}
IGNORED_PREFIXES = (
    "log_", "logging_", "dataloader_", "vllm_", "ddp_", "hub_", "per_device_eval", "num_completions", "disable_tqdm",
    "remove_unused", "pad_to", "do_", "tf32", "dataset_num_proc", "overwrite_", "save_safetensors", "save_only",
    "gradient_checkpointing_kwargs",
)  # fmt: skip
TRL_REMEDIES = {
    "callbacks": "give an object with the methods phase, step, episode and say: watcher=",
    "optimizers": "set training.optimizer and training.schedule",
    "rollout_func": "write an environment: environment=",
    "environment_factory": "give the environment itself: environment=, a class with tools and a reward",
    "ref_model": "the reference is the model that training starts from",
    "quantization_config": "write model.quantization=4bit or 8bit",
    "model_init_kwargs": "write model.dtype and model.revision",
    "chat_template_kwargs": "only enable_thinking=True or False is supported, which is model.thinking",
    "warmup_ratio": "write warmup_steps, a number of steps",
    "formatting_func": "give rows with messages, or with prompt and completion",
    "dataset_text_field": "give rows with prompt and completion: data.columns={completion: NAME}",
    "data_collator": "rows are packed here without padding",
    "compute_metrics": "evaluation uses the reward: reward_function=",
    "reward_processing_classes": "a reward model has its own tokenizer: reward.type=learned",
    "deepspeed": "DeepSpeed is not supported",
    "push_to_hub": "save_model writes a folder; upload that",
}


class TRLTranslation:
    """Translation of TRL's names in a trainer's options to ours. It raises one ValueError for all names without a
    counterpart. `group_size` is the config's value, used if no option sets it."""

    def __init__(self, options: dict[str, Any], algorithm: str, group_size: int) -> None:
        self.algorithm, self.is_sampling = algorithm, KINDS[algorithm].samples
        self.parameters: dict[str, Any] = {}  # of the trainer
        self.keys: dict[str, Any] = {}  # of the config, by full name
        self.notes: list[str] = []
        keywords = {
            name: options.pop(name) for name in [*options] if self._is_trl_argument(name, options[name])
        }
        args = _list_changed_fields(keywords.pop("args", None))
        if duplicate_keys := args.keys() & (keywords.keys() | options.keys()):
            names = ", ".join(sorted(duplicate_keys))
            raise ValueError(f"{names} is given twice, by itself and in args; leave one of them out")
        self.trl_options = {name: value for name, value in (args | keywords).items() if value is not None}
        training = options.get("training")
        flat_options = {**options, **(training if isinstance(training, Mapping) else {})}
        self._translate_objects()
        self._translate_batch(
            self.trl_options.get("num_generations", flat_options.get("group_size", group_size))
        )
        self._translate_loss()
        messages = [self._translate_option(name, value, options) for name, value in self.trl_options.items()]
        if problems := [message for message in messages if message]:
            raise ValueError("\n".join(["these options of TRL have no counterpart here:", *problems]))
        for key, value in self.keys.items():
            section, name = key.split(".")
            section_keys = options.get(section) or {}
            options[section] = dict(section_keys) if isinstance(section_keys, Mapping) else section_keys
            merge_into_section(options, section, {name: value})

    def resolve_objects(self, **user_objects: Any) -> list[Any]:
        """Return the values of the trainer's own parameters, in the given order. A parameter that is None gets the
        value that TRL's arguments set."""
        for name in self.parameters.keys() & {
            name for name, value in user_objects.items() if value is not None
        }:
            raise ValueError(
                f"{name} is given twice, by itself and by its name in TRL; leave one of them out"
            )
        return [self.parameters.get(name, value) for name, value in user_objects.items()]

    def _is_trl_argument(self, name: str, value: Any) -> bool:
        """Return whether a keyword has TRL's meaning."""
        if name in ("scale_rewards", "beta"):
            return isinstance(value, str) if name == "scale_rewards" else self.algorithm == "grpo"
        return name in {*TRL_NAMES, *TRL_REMEDIES, *IGNORED_OPTIONS, "per_device_train_batch_size"}

    def _translate_objects(self) -> None:
        """Translate TRL's arguments for data, rewards and adapters into the trainer's parameters and config keys."""
        options, data_parameter = self.trl_options, "tasks" if self.is_sampling else "dataset"
        for trl_name, parameter in {
            "train_dataset": data_parameter,
            "eval_dataset": "heldout",
            "run_name": "name",
        }.items():
            if trl_name in options:
                self.parameters[parameter] = options.pop(trl_name)
        weights = options.pop("reward_weights", None)
        if "reward_funcs" in options:
            self.parameters["reward_function"] = combine_reward_funcs(options.pop("reward_funcs"), weights)
        elif weights is not None:
            raise ValueError("reward_weights goes with reward_funcs, a list with as many functions")
        if "peft_config" in options:
            self.keys |= _translate_adapter(options.pop("peft_config"))

    def _translate_batch(self, group_size: int) -> None:
        """Translate batch sizes: TRL counts completions, we count tasks with `group_size` completions each."""
        trl_options = self.trl_options
        sizes = {name: trl_options.pop(name) for name in BATCH_OPTIONS if name in trl_options}
        if not sizes:
            return
        update_size = _get_update_size(sizes)
        if not self.is_sampling:
            self.keys["training.batch_size"] = update_size
            return
        accumulation_steps = sizes.get("steps_per_generation", sizes.get("gradient_accumulation_steps", 1))
        generation_size = sizes.get(
            "generation_batch_size", sizes.get("per_device_train_batch_size", 8) * accumulation_steps
        )
        trl_arguments = ", ".join(f"{name}={value}" for name, value in sizes.items())
        if generation_size % group_size or generation_size % update_size:
            raise ValueError(
                f"{trl_arguments} makes steps of {generation_size} completions, {update_size} per update, which is "
                f"not a multiple of {group_size} (num_generations); set training.batch_size, the tasks per step, and "
                "training.group_size"
            )
        num_tasks, num_updates = generation_size // group_size, generation_size // update_size
        self.keys["training.batch_size"] = num_tasks
        if num_updates > 1:
            self.keys["training.minibatches"] = num_updates
        if trl_options.get("max_steps", -1) > 0:  # TRL counts updates
            trl_options["max_steps"] = ceil(
                trl_options["max_steps"] / (num_updates * trl_options.get("num_iterations", 1))
            )
        translation = f"training.batch_size={num_tasks} tasks with {group_size} episodes each"
        self.notes.append(f"{trl_arguments} counts completions: {translation}")

    def _translate_loss(self) -> None:
        """Translate TRL's loss options, one of which may set several of our keys."""
        options, loss = self.trl_options, self.trl_options.get("loss_type")
        if self.algorithm == "dpo" and loss is not None:
            options.pop("loss_type")
            self.keys["dpo.loss_kind"] = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        if loss == "cispo":
            self.keys["grpo.loss_kind"] = loss
        if loss == "dr_grpo":
            self.keys["grpo.constant_length"] = options.get("max_completion_length", 512)
        if self.algorithm == "grpo" and "beta" in options:
            self.keys["grpo.kl"] = options.pop("beta")
        if self.algorithm == "grpo" and "epsilon" in options:
            epsilon = options.pop("epsilon")
            self.keys |= {"grpo.clip_low": epsilon, "grpo.clip_high": options.pop("epsilon_high", epsilon)}

    def _translate_option(self, name: str, value: Any, options: dict[str, Any]) -> str | None:
        """Translate one name; return the problem if it has no counterpart."""
        key, our_value = _translate_value(name, getattr(value, "value", value))  # an enum's value
        other_algorithms = {*ALGORITHMS} - {self.algorithm}
        if key is not None and key.split(".")[0] not in other_algorithms:
            self.keys[key] = our_value
        elif name in IGNORED_OPTIONS or name.startswith(IGNORED_PREFIXES):
            self.notes.append(f"{name}: {IGNORED_OPTIONS.get(name, 'it has no effect here')}")
        elif name not in VALUE_MAP and (name in ALIASES or find_sections(name, self.algorithm)):
            options[name] = value  # the same name here
        else:
            hint = f"only {', '.join(map(str, VALUE_MAP[name][1]))}" if name in VALUE_MAP else "leave it out"
            return f"  {name}={show_value(name, value)}: {TRL_REMEDIES.get(name, hint)}"
        return None


def _translate_value(name: str, value: Any) -> tuple[str | None, Any]:
    """Return our config key for a name of TRL (None if there is none), and its value for that key."""
    if name in VALUE_MAP:
        key, value_map = VALUE_MAP[name]
        return (key, value_map[value]) if value in [*value_map] else (None, value)
    if name in INTEGER_OPTIONS and isinstance(value, int | float) and float(value).is_integer():
        # One more: the turn that answers.
        return INTEGER_OPTIONS[name], int(value) + (name == "max_tool_calling_iterations")
    if name == "chat_template_kwargs":
        thinking = value.get("enable_thinking") if isinstance(value, Mapping) and len(value) == 1 else None
        return ("model.thinking", thinking) if isinstance(thinking, bool) else (None, value)
    if name == "report_to":
        trackers: Any = [value] if isinstance(value, str) else value
        return "logging.trackers", [tracker for tracker in trackers if tracker != "none"]
    return RENAMED_OPTIONS.get(name), value


def _list_changed_fields(args: Any) -> dict[str, Any]:
    """Return the attributes of a `GRPOConfig` or the like that differ from its defaults, or are in `ALWAYS_READ`."""
    if args is None or isinstance(args, Mapping):
        return {name: value for name, value in (args or {}).items() if value is not None}
    if not is_dataclass(args):
        attributes = {name: value for name, value in vars(args).items() if not name.startswith("_")}
        return {
            name: attributes[name]
            for name in attributes
            if attributes[name] not in (None, getattr(type(args), name, None))
        }
    # Some defaults depend on the machine, and on some machines the default config cannot be created.
    try:
        defaults: Any = type(args)()
    except Exception:  # foreign code
        defaults = type(args)
    values = {entry.name: getattr(args, entry.name) for entry in fields(args) if entry.init}
    changed_fields = {
        name: value
        for name, value in values.items()
        if name in ALWAYS_READ or value != getattr(defaults, name, ...)
    }
    if changed_fields.get("generation_batch_size") == _get_update_size(values):  # which TRL fills in itself
        del changed_fields["generation_batch_size"]
    return {
        name: value
        for name, value in changed_fields.items()
        if value not in ([], "") and isinstance(value, PLAIN_TYPES)
    }


def _get_update_size(sizes: Mapping[str, Any]) -> int:
    return sizes.get("per_device_train_batch_size", 8) * sizes.get("gradient_accumulation_steps", 1)


def _translate_adapter(config: Any) -> dict[str, Any]:
    """Translate a `peft.LoraConfig` into the section `lora`; raise for fields without a counterpart."""
    adapter = _list_changed_fields(config)
    modules = adapter.pop("target_modules", None)
    keys: dict[str, Any] = {
        f"lora.{LORA_FIELDS[name]}": adapter.pop(name) for name in [*adapter] if name in LORA_FIELDS
    }
    unknown_fields = sorted(adapter.keys() - IGNORED_LORA_FIELDS)
    if unknown_fields or getattr(config, "peft_type", "LORA") != "LORA":
        unsupported_names = ", ".join(unknown_fields) or f"type {config.peft_type}"
        supported_keys = f"{', '.join(LORA_FIELDS.values())} and target_modules"
        raise ValueError(
            f"peft_config has {unsupported_names}, which has no counterpart here; the section lora has {supported_keys}"
        )
    if modules:
        keys["lora.target_modules"] = modules if isinstance(modules, str) else sorted(modules)
    return keys | {"lora.enabled": True}


class SumOfRewards(Combined):
    """The weighted sum of reward functions, as in TRL: if a function returns None for an episode, its term is
    omitted."""

    def _sum_results(self, results: Mapping[str, Reward | Exception]) -> Reward | Exception:
        terms = {name: result for name, result in results.items() if not isinstance(result, NoReward)}
        if not terms:
            return Unscored("none of the reward functions applies to it")
        return super()._sum_results(terms)


def combine_reward_funcs(functions: Any, weights: Sequence[float] | None = None) -> Any:
    """Return one reward for TRL's `reward_funcs` and `reward_weights`."""
    rewards = [*functions] if isinstance(functions, list | tuple) else [functions]
    for reward in rewards:
        if not callable(reward) and reward not in get_args(RewardType):
            raise ValueError(
                f"reward_funcs has {reward!r:.60}; give functions. For a reward model that was trained here, write "
                'reward={"type": "learned", "model": RUN}; name other rewards with reward_function'
            )
    if len(rewards) == 1 and weights is None:
        return rewards[0]
    weights = [1.0] * len(rewards) if weights is None else weights
    if len(weights) != len(rewards) or not all(callable(reward) for reward in rewards):
        raise ValueError(
            f"reward_weights has {len(weights)} numbers and reward_funcs {len(rewards)} rewards; give a list of "
            "functions and one weight for each"
        )
    weighted_rewards: dict[str, tuple[float, Any]] = {}
    for weight, function in zip(weights, rewards, strict=True):
        name = str(getattr(function, "__name__", type(function).__name__))
        name = name if name not in weighted_rewards else f"{name}_{len(weighted_rewards) + 1}"
        weighted_rewards[name] = (weight, function)
    return SumOfRewards(weighted_rewards, timeout=None)
