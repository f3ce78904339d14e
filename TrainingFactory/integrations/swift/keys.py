"""Tables that map ms-swift's arguments to our config keys and back."""

from __future__ import annotations

# Their argument -> our key, with the same values.
KEY_BY_ARGUMENT = {
    "model": "model.name", "model_revision": "model.revision",
    "enable_thinking": "model.thinking", "learning_rate": "training.learning_rate",
    "warmup_steps": "training.warmup_steps", "weight_decay": "training.weight_decay",
    "max_grad_norm": "training.max_grad_norm", "max_steps": "training.max_steps",
    "num_train_epochs": "training.num_epochs", "gradient_checkpointing": "training.gradient_checkpointing",
    "seed": "training.seed", "system": "environment.system_prompt", "max_turns": "environment.max_turns",
    "dataset_shuffle": "data.shuffle", "data_seed": "data.seed", "num_generations": "training.group_size",
    "max_completion_length": "sampling.max_tokens", "temperature": "sampling.temperature",
    "num_iterations": "training.update_epochs", "beta": "@", "epsilon": "grpo.clip_low",
    "epsilon_high": "grpo.clip_high", "delta": "grpo.clip_dual", "importance_sampling_level": "grpo.ratio",
    "lora_rank": "lora.r", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout", "use_dora": "lora.dora",
    "use_rslora": "lora.rslora", "output_dir": "logging.output_dir", "save_steps": "logging.checkpoint_every",
    "save_total_limit": "logging.keep_checkpoints", "eval_steps": "training.eval_every",
}  # fmt: skip
# Their argument -> our key, and their values -> our values. On export, the first of their values is used.
VALUE_TRANSLATIONS: dict[str, tuple[str, dict[str, object]]] = {
    "rlhf_type": ("training.algorithm", {"grpo": "grpo", "dpo": "dpo", "kto": "kto", "rm": "reward_model"}),
    "torch_dtype": ("model.dtype", {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}),
    "lr_scheduler_type": ("training.schedule", {
        "constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}),
    "scale_rewards": ("grpo.scale_rewards", {"group": True, "none": False, "True": True, "False": False}),
    "advantage_estimator": ("grpo.advantage", {
        "grpo": "group", "rloo": "rloo", "reinforce_plus_plus": "reinforce_plus_plus"}),
    "loss_type": ("grpo.normalization", {
        "bnpo": "token", "grpo": "sequence", "dr_grpo": "constant", "dapo": "token"}),
    "tuner_type": ("lora.enabled", {"lora": True, "full": False}),
    "use_vllm": ("sampling.engine", {"False": "native", "True": "vllm"}),
    "overlong_filter": ("grpo.train_truncated", {"False": True, "True": False}),
}  # fmt: skip
NEW_NAME_BY_OLD = {
    "train_type": "tuner_type",
    "sft_type": "tuner_type",
    "model_id_or_path": "model",
}  # of ms-swift 3
LORA_ARGUMENTS = ("lora_rank", "lora_alpha", "lora_dropout", "use_dora", "use_rslora", "target_modules")
GRPO_ARGUMENTS = (
    "num_generations", "max_completion_length", "temperature", "num_iterations", "epsilon", "epsilon_high", "delta",
    "importance_sampling_level", "scale_rewards", "advantage_estimator", "loss_type", "max_turns", "use_vllm",
    "overlong_filter",
)  # fmt: skip
BETA_ALGORITHMS = ("grpo", "dpo", "kto")
# Defaults of ms-swift that differ from ours; an import writes them into the config.
SWIFT_DEFAULTS = {
    "num_train_epochs": 3,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "tuner_type": "lora",
    "seed": 42,
}
LORA_DEFAULTS = {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05}
GRPO_DEFAULTS = {
    "beta": 0.04, "temperature": 0.9, "max_completion_length": 512, "epsilon": 0.2, "loss_type": "grpo",
    "scale_rewards": "group",
}  # fmt: skip
LEARNING_RATES = {"lora": 1e-4, "full": 1e-5}

NOT_NEEDED, BY_HAND, NO_COUNTERPART = "not needed", "by hand", "no counterpart"
# Reasons not to translate an argument. The first prefix wins.
SKIP_REASONS: list[tuple[str | tuple[str, ...], str, str]] = [
    (("external_plugins", "custom_register_path"), BY_HAND, "name a reward of the plugin with reward.type=function"),
    ("reward_weights", BY_HAND, "give each part of reward.parts its weight"),
    (("reward_model", "reward_template"), BY_HAND, "use a trained reward model with reward.type=learned"),
    ("multi_turn_scheduler", BY_HAND, "write an environment: environment.environment_id"),
    (("use_gym_env", "gym_env"), BY_HAND, "write an environment: environment.environment_id"),
    (("model_type", "template", "agent_template"), NOT_NEEDED, "detected from the chat template, or model.family"),
    (("max_length", "vllm_max_model_len", "max_model_len"), BY_HAND,
     "model.max_length limits the whole conversation, prompt and turns together"),
    (("top_p", "top_k", "min_p"), BY_HAND, "training samples from the full softmax; sampling.top_p is for evaluation"),
    ("warmup_ratio", BY_HAND, "training.warmup_steps is a number of steps"),
    ("resume_from_checkpoint", BY_HAND, "start from its folder: model.name"),
    ("adapters", BY_HAND, "model.adapter continues an adapter"),
    ("columns", BY_HAND, "data.columns has our column first: {prompt: THEIRS}"),
    ("split_dataset_ratio", BY_HAND, "name a file of held-out tasks: data.heldout"),
    ("report_to", BY_HAND, "logging.trackers supports wandb, mlflow and tensorboard"),
    (("padding_free", "packing"), NOT_NEEDED, "rows are always packed without padding"),
    ("loss_scale", NOT_NEEDED, "only sampled tokens are trained"),
    ("dynamic_sample", NO_COUNTERPART, "tasks without learning signal are always replaced"),
    (("vllm_", "deepspeed", "fsdp", "sleep_level", "offload_", "move_model", "attn_impl", "tensor_parallel"),
     NOT_NEEDED, "it configures multi-GPU memory or another inference engine"),
    (("save_", "eval_", "logging_", "log_", "dataloader_", "dataset_num_proc", "per_device_eval", "do_", "ddp_",
      "remove_unused", "lazy_tokenize", "add_version", "load_from_cache", "streaming", "ignore_args", "use_hf",
      "create_checkpoint", "bf16", "fp16"), NOT_NEEDED, "it has no effect on training here"),
]  # fmt: skip


def find_reason(name: str) -> tuple[str, str]:
    """Return the reason why an argument is not translated, as (kind of reason, text)."""
    for prefix, status, text in SKIP_REASONS:
        if name.startswith(prefix):
            return status, text
    return NO_COUNTERPART, "this translation does not know the argument"
