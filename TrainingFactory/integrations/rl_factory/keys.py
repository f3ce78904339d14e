"""Which option of ours an override of RL-Factory's is, and of the others, why there is none."""

from __future__ import annotations

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, ENV, JUDGE = "actor_rollout_ref.model", "actor_rollout_ref.env", "reward_rollout"

# Taken over as they are; `@` stands for the section of the algorithm, grpo or ppo.
SAME = {
    f"{MODEL}.path": "model.name",
    f"{MODEL}.trust_remote_code": "model.trust_remote_code",
    f"{MODEL}.enable_gradient_checkpointing": "training.gradient_checkpointing",
    f"{MODEL}.lora_alpha": "lora.alpha",
    f"{MODEL}.target_modules": "lora.target_modules",
    f"{ACTOR}.optim.lr": "training.learning_rate",
    f"{ACTOR}.optim.lr_warmup_steps": "training.warmup_steps",
    f"{ACTOR}.optim.weight_decay": "training.weight_decay",
    f"{ACTOR}.optim.warmup_style": "training.schedule",
    f"{ACTOR}.grad_clip": "training.max_grad_norm",
    f"{ACTOR}.ppo_epochs": "training.update_epochs",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "training.token_budget",
    f"{ACTOR}.entropy_coeff": "@.entropy",
    f"{ACTOR}.clip_ratio_c": "@.clip_dual",
    f"{ROLLOUT}.n": "training.group_size",
    f"{ROLLOUT}.temperature": "sampling.temperature",
    f"{ROLLOUT}.max_turns": "environment.max_turns",
    f"{ROLLOUT}.multi_turn.max_assistant_turns": "environment.max_turns",
    f"{ROLLOUT}.tool_response_length": "sampling.max_reply_tokens",
    f"{ENV}.enable_thinking": "model.thinking",
    "data.val_files": "data.heldout",
    "data.train_batch_size": "training.batch_size",
    "data.train_max_samples": "data.count",
    "data.val_max_samples": "data.heldout_count",
    "data.max_response_length": "sampling.max_tokens",
    "data.shuffle": "data.shuffle",
    "trainer.total_epochs": "training.num_epochs",
    "trainer.total_training_steps": "training.max_steps",
    "trainer.default_local_dir": "logging.output_dir",
}
# Taken over where the algorithm is this one.
ONLY = {
    "grpo": {
        "algorithm.norm_adv_by_std_in_grpo": "grpo.scale_rewards",
        f"{ACTOR}.clip_ratio_low": "grpo.clip_low",
        f"{ACTOR}.clip_ratio_high": "grpo.clip_high",
    },
    "ppo": {
        "algorithm.gamma": "ppo.gamma",
        "algorithm.lam": "ppo.lam",
        "critic.optim.lr": "ppo.critic_learning_rate",
        "critic.cliprange_value": "ppo.value_clip",
        "trainer.critic_warmup": "ppo.critic_warmup",
        f"{ACTOR}.clip_ratio": "ppo.clip",
    },
}
ESTIMATORS = {
    "grpo": ("grpo", None),
    "gae": ("ppo", None),
    "rloo": ("grpo", "rloo"),
    "reinforce_plus_plus": ("grpo", "reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": ("grpo", "reinforce_plus_plus_baseline"),
}
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
AGGREGATION = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}
TRACKERS = ("wandb", "mlflow", "tensorboard")

ALWAYS, NOT_NEEDED, BY_HAND, NONE = "always so", "not needed", "by hand", "no counterpart"
# The first beginning or ending that fits says why an override is not taken over.
REASONS: list[tuple[str, str, str]] = [
    (f"{ACTOR}.state_masking", ALWAYS, "only what the model sampled is trained, never what a tool said"),
    (f"{MODEL}.use_remove_padding", ALWAYS, "rows are packed without padding"),
    (
        f"{ROLLOUT}.top_",
        BY_HAND,
        "training samples from the full softmax; sampling.top_p and top_k are for evaluation",
    ),
    (f"{ROLLOUT}.name", NOT_NEEDED, "the native engine samples; sampling.engine names another"),
    (f"{ROLLOUT}.stop", NOT_NEEDED, "the chat template says how a turn ends"),
    (f"{ROLLOUT}.multi_turn", NOT_NEEDED, "every conversation may have turns: environment.max_turns"),
    (f"{ENV}.mcp_mode", NOT_NEEDED, "the file of the servers says how each is reached"),
    (f"{ENV}.model_type", NOT_NEEDED, "the chat template shows it; model.family names it"),
    (f"{ENV}.max_prompt_length", NOT_NEEDED, "the judge's own limit holds"),
    (
        f"{ENV}.tool_timeout",
        BY_HAND,
        'the time of a call is {"tfactory": {"timeout": SECONDS}} of its server',
    ),
    (f"{ENV}.max_concurrency", BY_HAND, 'calls at once are {"tfactory": {"concurrency": N}} of their server'),
    (
        f"{ENV}.parallel_sse_tool_call",
        BY_HAND,
        'connections are {"tfactory": {"instances": N}} of their server',
    ),
    (f"{ENV}.enable_limiter", BY_HAND, 'calls at once are {"tfactory": {"concurrency": N}} of their server'),
    (f"{ENV}.tool_name_selected", BY_HAND, "name the tools that are wanted in `tools`"),
    (f"{ENV}.use_storage_manager", BY_HAND, "optimization.tool_cache=true, for tools that are marked pure"),
    (f"{ENV}.mmtool", NONE, "there are no images"),
    (f"{ENV}.load_custom_chat_template", BY_HAND, "put the template into the model's folder"),
    (ENV, NOT_NEEDED, "the tool cache is optimization.tool_cache"),
    (f"{JUDGE}.", BY_HAND, "the judge is a server of its own: start it with these, e.g. by vllm serve"),
    ("reward_model.reward_manager", NOT_NEEDED, "rewards of all episodes run at the same time"),
    ("reward_model.", BY_HAND, "a trained reward model is reward.type=learned"),
    ("custom_reward_function", BY_HAND, "a function of your own is reward.type=function"),
    ("algorithm.kl_ctrl", NOT_NEEDED, "the distance is a part of the loss: grpo.kl"),
    ("algorithm.use_kl_in_reward", NONE, "only ppo has the distance in the reward: ppo.kl_in"),
    ("data.truncation", ALWAYS, "a prompt that does not fit ends its episode as truncated"),
    ("data.filter_overlong", ALWAYS, "a prompt that does not fit ends its episode as truncated"),
    ("data.return_raw_chat", NOT_NEEDED, "conversations stay conversations"),
    ("data.val_batch_size", NOT_NEEDED, "all held-out tasks are played at once"),
    (
        "data.",
        BY_HAND,
        "columns of the rows are read by their names: prompt, reward_model, data_source, extra_info",
    ),
    (
        "trainer.val_before_train",
        ALWAYS,
        "with training.eval_every the model is measured before training, too",
    ),
    ("trainer.experiment_name", BY_HAND, "the name of a run is tfactory train CONFIG --name NAME"),
    ("trainer.resume", BY_HAND, "tfactory runs resume NAME goes on with a run"),
    ("trainer.default_hdfs_dir", NONE, "runs are written to a local folder"),
    ("trainer.critic_warmup", NOT_NEEDED, "grpo has no critic"),
    ("critic.", NOT_NEEDED, "the critic is a head on the model, with the model's own limits"),
    ("fsdp_config", NOT_NEEDED, "it is about memory on several GPUs"),
    ("megatron", NOT_NEEDED, "it is about memory on several GPUs"),
    ("micro_batch_size", NOT_NEEDED, "training.token_budget says what goes through the model at once"),
    ("max_token_len", NOT_NEEDED, "training.token_budget says what goes through the model at once"),
    ("dynamic_bsz", ALWAYS, "rows are packed to training.token_budget"),
    (f"{ROLLOUT}.", NOT_NEEDED, "it is about the memory and the speed of its inference engine"),
    ("actor_rollout_ref.ref", NOT_NEEDED, "it is about the memory of the reference model"),
]
