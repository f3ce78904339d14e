"""Tables that map RL-Factory's overrides to our config keys, with the reasons for those that have no counterpart.

Keys omit the prefix `actor_rollout_ref.`, whose sections are `actor`, `rollout`, `model`, `env` and `ref`."""

from __future__ import annotations

from TrainingFactory.common.starters import find_docs

# Values copied unchanged; `@` stands for the section of the algorithm, grpo or ppo.
UNCHANGED_KEYS = {
    "model.path": "model.name", "env.enable_thinking": "model.thinking", "model.lora_alpha": "lora.alpha",
    "model.enable_gradient_checkpointing": "training.gradient_checkpointing",
    "model.target_modules": "lora.target_modules", "actor.optim.lr": "training.learning_rate",
    "actor.optim.lr_warmup_steps": "training.warmup_steps", "actor.optim.weight_decay": "training.weight_decay",
    "actor.optim.warmup_style": "training.schedule", "actor.grad_clip": "training.max_grad_norm",
    "actor.ppo_epochs": "training.update_epochs", "actor.ppo_max_token_len_per_gpu": "training.token_budget",
    "actor.entropy_coeff": "@.entropy", "actor.clip_ratio_c": "@.clip_dual", "rollout.n": "training.group_size",
    "rollout.temperature": "sampling.temperature", "rollout.max_turns": "environment.max_turns",
    "rollout.multi_turn.max_assistant_turns": "environment.max_turns",
    "rollout.tool_response_length": "sampling.max_reply_tokens", "data.train_batch_size": "training.batch_size",
    "data.train_max_samples": "data.count", "data.val_max_samples": "data.heldout_count",
    "data.shuffle": "data.shuffle", "trainer.total_epochs": "training.num_epochs",
    "trainer.total_training_steps": "training.max_steps", "trainer.default_local_dir": "logging.output_dir",
}  # fmt: skip
# Defaults of RL-Factory's own config that differ from ours.
RL_FACTORY_CONFIG, DEFAULTS = "rl_factory_ppo_trainer", {"rollout.max_turns": 2, "rollout.temperature": 0.7}
# Values copied for one algorithm only.
KEYS_BY_ALGORITHM = {
    "grpo": {
        "algorithm.norm_adv_by_std_in_grpo": "grpo.scale_rewards", "actor.clip_ratio_low": "grpo.clip_low",
        "actor.clip_ratio_high": "grpo.clip_high",
    },
    "ppo": {
        "algorithm.gamma": "ppo.gamma", "algorithm.lam": "ppo.lam", "critic.optim.lr": "ppo.critic_learning_rate",
        "critic.cliprange_value": "ppo.value_clip", "trainer.critic_warmup": "ppo.critic_warmup",
        "actor.clip_ratio": "ppo.clip",
    },
}  # fmt: skip
# algorithm.adv_estimator -> training.algorithm and grpo.advantage
ALGORITHM_BY_ESTIMATOR = {"grpo": ("grpo", "group"), "gae": ("ppo", "")} | {
    name: ("grpo", name) for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
}
# Values with other names: override -> our key, and their value -> our value
RENAMED_VALUES: dict[str, tuple[str, dict[str, str]]] = {
    "actor.loss_agg_mode": ("grpo.normalization", {
        "token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}),
    "actor.policy_loss.loss_mode": ("grpo.ratio", {"vanilla": "token", "gspo": "sequence"}),
    "actor.kl_loss_type": ("@.kl_estimator", {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}),
}  # fmt: skip
TRACKER_NAMES = ("wandb", "mlflow", "tensorboard")

IMAGE_ENVIRONMENTS = ("vision", "mmbase")  # RL-Factory's own environments whose tools return images
NO_IMAGES = "its tools return images, which environments of RL-Factory cannot have here; use an environment with texts"

ALWAYS, NOT_NEEDED, BY_HAND, NO_COUNTERPART = "always so", "not needed", "by hand", "no counterpart"
MEMORY_REASON = "it configures multi-GPU memory or another inference engine"
PER_SERVER = 'set it per server, in the mcpServers file: {"tfactory": {"timeout": S, "concurrency": N, "instances": N}}'
LIMIT_KEYS = ("env.tool_timeout", "env.max_concurrency", "env.parallel_sse_tool_call", "env.enable_limiter")
BUDGET_REASON = "training.token_budget sets the number of tokens per forward pass"
# Reasons not to translate an override. The first prefix wins that matches the key, or the key without its section.
SKIP_REASONS: list[tuple[str | tuple[str, ...], str, str]] = [
    ("actor.state_masking", ALWAYS, "only sampled tokens are trained, never tool output"),
    ("actor.kl_loss", NOT_NEEDED, "use_kl_loss is off, so the loss has no KL term"),
    ("model.use_remove_padding", ALWAYS, "rows are packed without padding"),
    ("rollout.top_", BY_HAND, "training samples from the full softmax; sampling.top_p applies to evaluation"),
    ("rollout.mode", NOT_NEEDED, "only async is configurable: optimization.async_rollout"),
    ("actor.optim.lr_warmup_steps_ratio", BY_HAND, "training.warmup_steps is a number of steps"),
    ("rollout.name", NOT_NEEDED, "the native engine samples; select another with sampling.engine"),
    ("rollout.stop", NOT_NEEDED, "the chat template defines the end of a turn"),
    ("env.mcp_mode", NOT_NEEDED, "the mcpServers file defines each server's transport"),
    (("env.tool_manager", "env.model_type"), NOT_NEEDED, "detected from the chat template, or model.family"),
    ("env.max_prompt_length", NOT_NEEDED, "the judge's own limit applies"),
    (LIMIT_KEYS, BY_HAND, PER_SERVER),
    ("env.tool_name_selected", BY_HAND, "list the selected tools in `tools`"),
    ("env.use_process_reward", NOT_NEEDED, "there is no custom Env with a get_step_reward"),
    ("env.mmtool", NO_COUNTERPART, NO_IMAGES),
    ("env.load_custom_chat_template", BY_HAND, "set model.chat_template to the template file"),
    ("env.", BY_HAND, "the cache is optimization.tool_cache=true, for tools that are marked pure"),
    ("reward_rollout.", BY_HAND, "put other options of the judge's engine into reward.judge.engine_options"),
    ("reward_model.reward_manager", NOT_NEEDED, "rewards of all episodes are computed concurrently"),
    ("reward_model.", BY_HAND, "use a trained reward model with reward.type=learned"),
    ("custom_reward_function", BY_HAND, "use your own function with reward.type=function"),
    ("algorithm.kl_ctrl", NOT_NEEDED, "the KL term is part of the loss: grpo.kl"),
    ("algorithm.use_kl_in_reward", NO_COUNTERPART, "only ppo supports KL in the reward: ppo.kl_in"),
    ("data.val_batch_size", NOT_NEEDED, "all held-out tasks are evaluated concurrently"),
    ("data.return_raw_chat", NOT_NEEDED, "prompts are always kept as messages"),
    ("data.", ALWAYS, "columns are named as verl's; a prompt that does not fit ends its episode"),
    ("trainer.val_before_train", NO_COUNTERPART, "training.eval_every also evaluates before training"),
    ("trainer.test_freq", NOT_NEEDED, "there are no held-out tasks: data.heldout"),
    ("trainer.project_name", NOT_NEEDED, "only W&B has projects"),
    ("trainer.experiment_name", BY_HAND, "name the run with tfactory train CONFIG --name NAME"),
    ("trainer.resume", BY_HAND, "resume a run with tfactory runs resume NAME"),
    ("trainer.default_hdfs_dir", NO_COUNTERPART, "runs are written to a local folder"),
    ("trainer.critic_warmup", NOT_NEEDED, "grpo has no critic"),
    ("critic.", NOT_NEEDED, "the critic is a head on the model, with the model's own limits"),
    (("ppo_micro_batch_size", "log_prob_m"), NOT_NEEDED, BUDGET_REASON),
    ("use_dynamic_bsz", ALWAYS, "rows are packed to training.token_budget"),
    (("fsdp_config", "megatron", "rollout.", "ref."), NOT_NEEDED, MEMORY_REASON),
]


def find_reason(key: str) -> tuple[str, str]:
    """Return the reason why a key is not translated, as (kind of reason, text)."""
    for prefix, status, text in SKIP_REASONS:
        if key.startswith(prefix) or key.partition(".")[2].startswith(prefix):
            return status, text
    known_keys = find_docs("RL_FACTORY.md")
    return NO_COUNTERPART, f"this translation does not know the key; {known_keys} lists the known ones"
