"""The keywords of the trainers: their types, so that editors complete them and type checkers find slips, and the way
into their sections. Meanings, defaults and ranges are in `config/`; a test holds both to the same names and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.names import ALIASES, SHORT, expand
from TrainingFactory.config.schema import ALGORITHMS, sections
from TrainingFactory.protocols import AnyReward
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.tools.cache.cache import ToolCache

Section = Mapping[str, Any]  # keys of one section of the config


class TRLKeywords(TypedDict, total=False):
    """Names of TRL that are taken besides our own; `trainers/trl_keywords.py` says as what."""

    train_dataset: Any
    eval_dataset: Any
    reward_funcs: Any
    reward_weights: Sequence[float] | None
    args: Any
    processing_class: Any
    peft_config: Any
    num_generations: int
    gradient_accumulation_steps: int
    max_completion_length: int
    max_prompt_length: int | None
    logging_steps: float
    save_steps: float
    chat_template_kwargs: Mapping[str, Any] | None


class Keywords(TRLKeywords, total=False):
    """Those of every trainer."""

    # of the trainer itself
    reward_function: AnyReward | str | None
    tools: Any
    tasks: Any
    dataset: Any
    heldout: Any
    config: TrainingConfig | None
    name: str | None
    resume: bool
    replay: str | Path | None
    watcher: Watcher | None
    allocation_id: Any

    # whole sections
    training: Section
    optimization: Section
    reward: Section | str
    data: Section
    sampling: Section
    lora: Section
    compute: Section
    logging: Section
    registry: Section
    sft: Section
    grpo: Section
    ppo: Section
    dpo: Section
    kto: Section
    rft: Section
    reward_model: Section

    # other names of a key
    model_name: str | Path
    environment_id: Any
    num_train_epochs: int
    epochs: int
    per_device_train_batch_size: int
    async_tools: bool
    dataset_id: Any
    use_lora: bool
    lora_r: int
    lora_alpha: int

    # model
    revision: str | None
    family: str | None
    adapter: str | Path | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: str
    max_length: int | None
    thinking: bool | None
    quantization: Literal["none", "4bit", "8bit"]
    tools_format: Literal["hermes"] | None
    trust_remote_code: bool

    # training
    algorithm: str
    num_epochs: int
    max_steps: int | None
    batch_size: int
    group_size: int
    learning_rate: float
    warmup_steps: int
    schedule: Literal["constant", "linear", "cosine"]
    optimizer: Literal["adamw", "adamw_8bit", "muon"]
    weight_decay: float
    max_grad_norm: float
    token_budget: int
    gradient_checkpointing: bool
    update_epochs: int
    minibatches: int
    eval_every: int | None
    stop_when: dict[Literal["patience", "target"], float]

    # environment
    command: str | None
    system_prompt: str | None
    async_execution: bool
    num_workers: int | None
    max_turns: int
    episode_timeout: float

    # reward
    type: str
    outcome_weight: float
    judge: dict[str, Any]
    step_rewards: dict[str, float]
    parts: dict[str, dict[str, Any]]
    max_unscored: float
    max_equal_steps: int | None

    # optimization
    async_rollout: bool
    max_staleness: int
    async_order: Literal["number", "arrival"]
    importance_cap: float | None
    importance_by: Literal["token", "sequence"]
    importance_mask: list[float] | None
    max_mismatch: float
    distributed_reward: bool
    reward_workers: int | None
    offload_reference: bool
    tool_cache: bool | str | ToolCache

    # data
    columns: dict[str, str]
    split: str
    count: int | None
    dataset_split: str
    shuffle: bool
    skip_bad_rows: bool
    heldout_split: str
    heldout_count: int

    # sampling
    engine: Literal["native", "vllm"]
    temperature: float
    max_tokens: int
    top_p: float
    top_k: int
    min_p: float
    slots: int
    deterministic: bool
    max_reply_tokens: int
    engine_options: dict[str, Any]

    # lora
    enabled: bool
    r: int
    alpha: int
    dropout: float
    target_modules: str | list[str]
    dora: bool
    rslora: bool

    # compute
    backend: Literal["local", "ray"]
    address: str | None
    samplers: int
    gpus_per_sampler: float | None
    cpus_per_sampler: float
    learners: int | None
    gpus_per_learner: float | None
    start_timeout: float
    num_gpus: int | None

    # logging
    output_dir: str | Path
    trackers: list[Literal["wandb", "mlflow", "tensorboard"]]
    wandb: dict[Literal["project", "entity", "group"], str]
    save_trajectories: bool
    record_tools: bool
    checkpoint_every: int
    keep_checkpoints: int
    keep_every: int | None
    keep_best: bool
    optimizer_state: Literal["all", "newest"]

    # registry
    checkpoint: Literal["best", "last"]
    path: str | Path | None


class SFTKeywords(Keywords, total=False):
    turns: Literal["all", "last"]


class GRPOKeywords(Keywords, total=False):
    beta: float  # TRL's name of kl
    advantage: Literal["group", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    credit: Literal["trajectory", "turn"]
    scale_rewards: bool
    normalization: Literal["token", "sequence", "constant"]
    constant_length: int
    loss_kind: Literal["clip", "cispo"]
    ratio: Literal["token", "sequence"]
    clip_low: float
    clip_high: float
    clip_dual: float | None
    kl: float
    kl_estimator: Literal["k1", "k2", "k3"]
    entropy: float
    train_truncated: bool
    overlong_length: int | None
    overlong_buffer: int
    overlong_penalty: float
    refill: int
    refill_by: Literal["reward", "outcome"]


class PPOKeywords(Keywords, total=False):
    critic: Literal["head", "separate"]
    gamma: float
    lam: float
    clip: float
    clip_dual: float | None
    value_clip: float | None
    value_weight: float
    critic_learning_rate: float | None
    critic_warmup: int
    whiten: bool
    kl: float
    kl_in: Literal["loss", "reward"]
    kl_estimator: Literal["k1", "k2", "k3"]
    entropy: float
    train_truncated: bool


class DPOKeywords(Keywords, total=False):
    loss_kind: Literal["sigmoid", "ipo", "hinge", "robust", "orpo", "simpo"]
    beta: float
    label_smoothing: float
    margin: float
    reference: Literal["live", "precomputed"]


class KTOKeywords(Keywords, total=False):
    beta: float
    desirable_weight: float
    undesirable_weight: float
    threshold: float


class RFTKeywords(Keywords, total=False):
    threshold: float
    best_of: int | None
    dedupe: bool
    balance: bool
    train_truncated: bool


class RewardModelKeywords(Keywords, total=False):
    kind: Literal["outcome", "process"]
    margin: bool
    center: float
    threshold: float


def placed(options: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Return the options with plain keys moved into their sections: that of the algorithm first, or the one section of
    the common ones that has the key. What is no key of any section stays, for the config to refuse."""
    given = {key: dict(value) if isinstance(value, Mapping) else value for key, value in options.items()}
    given |= {key: {SHORT[key]: given[key]} for key in SHORT if isinstance(given.get(key), str | Path)}
    for key in [key for key in given if key not in ALIASES and key not in TrainingConfig.model_fields]:
        homes = homes_of(key, algorithm)
        if len(homes) > 1:
            several = " or ".join(f"{home}={{{key!r}: ...}}" for home in homes)
            raise ValueError(f"{key} is an option of {' and of '.join(homes)}; write {several}")
        if homes:
            into(given, homes[0], {key: given.pop(key)})
    return given


def homes_of(key: str, algorithm: str) -> list[str]:
    """Return the sections that a plain key can go into."""
    known = sections()
    if key in known[algorithm].model_fields:
        return [algorithm]
    common = known.keys() - set(ALGORITHMS)
    return [name for name, section in known.items() if name in common and key in section.model_fields]


def into(given: dict[str, Any], section: str, keys: Mapping[str, Any]) -> None:
    """Add keys to those of a section that are there already."""
    there = given.setdefault(section, {})
    if not isinstance(there, dict):
        return  # no section, which the config tells better
    if twice := sorted(there.keys() & keys.keys()):
        raise ValueError(
            f"{', '.join(twice)} is given twice, by itself and in {section}; leave one of them out"
        )
    there |= keys


def merged(config: TrainingConfig | None, options: dict[str, Any]) -> TrainingConfig:
    """Return the config with the options over it."""
    full = config.model_dump(exclude_unset=True) if config is not None else {}
    for section, keys in expand(options).items():
        together = isinstance(keys, Mapping) and isinstance(full.get(section), Mapping)
        full[section] = full[section] | keys if together else keys
    return TrainingConfig(**full)
