"""Schema of the config: every option with description, default and range. `not_yet.py` lists options without effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError

from TrainingFactory.common.options import Count, NotNegative, Positive, Share, ZeroOrMore
from TrainingFactory.config.algorithms import (
    BranchingSection,
    DPOSection,
    GRPOSection,
    KTOSection,
    PPOSection,
    RewardModelSection,
    RFTSection,
    SFTSection,
)
from TrainingFactory.config.names import expand
from TrainingFactory.config.problems import ConfigError, KeyLocations, Problem, list_problems
from TrainingFactory.config.section import PathText, Section


class ModelSection(Section):
    name: PathText = "builtin:tiny"
    """Model to train: a hub id, local folder, GGUF file, short name (qwen3-4b), run (sft, runs/sft, sft@step-40),
    registered model (agent, agent:3, agent@champion), or builtin:tiny."""
    revision: str | None = None
    """Branch, tag or commit on the hub. For builtin:tiny: seed of its random weights, as a string: "0"."""
    family: str | None = None
    """Chat format (qwen3, llama3, ...). null: detected from the chat template."""
    chat_template: PathText | None = None
    """Jinja file to use instead of the model's own chat template. Checkpoints and exports contain it. null: the model's
    own."""
    tools_format: Literal["hermes"] | None = None
    """Tool-call format for a model whose chat template has no tools; adds special tokens for its tags."""
    adapter: PathText | None = None
    """LoRA adapter to load on top of the model: a folder, run or registered model that holds an adapter."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights. auto: bfloat16 on a GPU, float32 on a CPU."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """Device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:N or mps (untested)."""
    max_length: Annotated[int, Field(ge=16)] | None = None
    """Maximum conversation length, in tokens. null: the model's own limit, at most 4096."""
    thinking: bool | None = None
    """Enable or disable reasoning, if the chat template has a switch for it. null: the template's default."""
    quantization: Literal["none", "4bit", "8bit"] = "none"
    """Quantization of the base weights under a LoRA adapter. none: keep dtype. 4bit and 8bit need bitsandbytes."""
    vision: bool | None = None
    """Load a vision-language model with its vision part. false: its text part alone. null: with it if the tasks or the
    environment show images."""
    image_tokens: Annotated[int, Field(ge=16)] = 1024
    """Maximum tokens of an image; larger images are scaled down."""
    train_tower: bool = False
    """Train the vision part too. false: only the language model, or its LoRA adapter, is trained."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. Enable only for models you trust."""


def _check_stop_when(stop_when: dict[Any, float]) -> dict[Any, float]:
    patience = stop_when.get("patience", 1)
    if patience < 1 or patience % 1:
        raise ValueError("patience is a number of evaluations: it must be an integer of at least 1")
    if not 0 < stop_when.get("target", 1.0) <= 1:
        raise ValueError("target is a success rate or accuracy: it must be greater than 0 and at most 1")
    return stop_when


class TrainingSection(Section):
    algorithm: Literal["grpo", "ppo", "rft", "sft", "dpo", "kto", "reward_model"] = "grpo"
    """Training algorithm: grpo, ppo and rft learn from rewards of sampled episodes, sft from demonstrations, dpo from
    preference pairs, kto from labelled examples; reward_model trains a scorer."""
    num_epochs: Count = 1
    """Passes over the tasks or rows."""
    max_steps: Count | None = None
    """Number of training steps, instead of num_epochs. null: num_epochs passes."""
    batch_size: Count = 8
    """Tasks per step; for training on a dataset: demonstrations, pairs or labelled examples per step."""
    group_size: Count = 8
    """Episodes sampled per task in one step. grpo needs at least 2, except with reinforce_plus_plus."""
    learning_rate: Positive = 1e-6
    """Peak learning rate."""
    warmup_steps: ZeroOrMore = 0
    """Steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after warm-up. linear and cosine decay to 0."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """Optimizer. adamw_8bit keeps its state in 8 bits (GPU with bitsandbytes). muon updates weight matrices of models
    trained from scratch, and uses AdamW for all other parameters."""
    weight_decay: NotNegative = 0.0
    """Weight decay of matrices. Norms, biases and embeddings are not decayed."""
    max_grad_norm: Positive = 1.0
    """Maximum gradient norm; larger gradients are clipped to it."""
    token_budget: Count = 16_384
    """Maximum tokens per forward pass. A lower value needs less memory and gives the same gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: slower, less memory."""
    activation_offload: bool = False
    """Keep the layer inputs that gradient_checkpointing stores in CPU memory instead of on the GPU. For rows of 32,000
    tokens and more; needs gradient_checkpointing."""
    router_aux_loss: NotNegative | None = None
    """Mixtures of experts: coefficient of the loss that balances the experts, as the model's family defines it. null:
    the model's own (router_aux_loss_coef in its config.json). 0: off, which saves a forward pass per update."""
    router_check_every: Count | None = None
    """Mixtures of experts: measure every N steps how often sampling and training send a token to different experts
    (metric router_mismatch), on 256 tokens of one row; native engine without async_rollout. null: never."""
    update_epochs: Count = 1
    """Passes over the episodes or rows of one step."""
    minibatches: Count = 1
    """Optimizer steps per pass. Must divide batch_size (kto: with at least 2 examples in each mini-batch)."""
    eval_every: Count | None = None
    """Evaluate on held-out tasks or rows before training, every N steps and at the end. null: never."""
    stop_when: Annotated[dict[Literal["patience", "target"], float], AfterValidator(_check_stop_when)] = (
        Field(default_factory=dict)
    )
    """Stop early. {patience: 3}: after 3 consecutive evaluations without a new best. {target: 0.9}: when success or
    accuracy on held-out data reaches 0.9. With both: whichever comes first."""
    branching: BranchingSection | None = None
    """Fork episodes at the end of a turn into several continuations, for credit by turn without a critic (grpo):
    {at: tool_result, continuations: 2, max_forks: 2}. null: no forks."""
    filters: dict[str, Literal["drop", "mask", "count"]] = Field(default_factory=dict)
    """Filters of sampled episodes, applied before credit: {void_turns: drop, repeated_calls: mask, truncated: count,
    unreadable_calls: mask, filters.py:mine: drop}. drop: no credit for episodes with a flagged turn; mask: flagged
    turns are not trained; count: only counted."""
    seed: ZeroOrMore = 0
    """Random seed of sampling and training."""


class ContextSection(Section):
    fold: Literal["window", "drop_thoughts", "drop_results", "summary", "own"]
    """Method that shortens a conversation over `limit`. window: keep the system prompt, the task and the last
    keep_turns turns; drop_thoughts: remove the reasoning of older turns; drop_results: replace older tool results by
    a placeholder; summary: the model writes a summary and continues from system prompt, task and summary; own: your
    function."""
    limit: Annotated[int, Field(ge=16)]
    """Tokens of a prompt above which it is folded. Below model.max_length, with room for the last tool result and a
    turn."""
    max_folds: Count = 16
    """Maximum folds per episode. A longer conversation is not folded again and ends at model.max_length."""
    keep_turns: Count = 2
    """window, drop_thoughts, drop_results: number of last turns to keep unchanged, each with its tool results."""
    summary_tokens: Count = 256
    """summary: maximum tokens of a summary."""
    template: PathText | None = None
    """summary: text that asks for the summary, or a .txt or .md file with it. null: the built-in text."""
    placeholder: str = "[result removed]"
    """drop_results: text in place of an older tool result. Shorter results stay."""
    function: PathText | None = None
    """own: your function from messages to messages, plain or async: fold.py:shorten."""


class UserSection(Section):
    model: PathText
    """Model that plays the user: an endpoint (openai:MODEL@URL, anthropic:MODEL, gemini:MODEL, or a YAML file of its
    options), or a model that the run starts, named as in model.name. Its tokens are not trained."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of an endpoint: {concurrency: 8, retries: 5, max_cost: 2, cache: user.sqlite}. Of a model that the run
    starts: those of reward.judge, and sampling options: {replicas: 1, options: {temperature: 0.7}}."""
    persona: str | None = None
    """Who the user is: a text with columns of the task, such as "a hurried {job}". null: the task's column persona."""
    goal: str | None = None
    """Goal of the user: a text with columns of the task. null: the task's column goal; with first=user, without that
    column, the task's prompt."""
    template: PathText | None = None
    """Instructions of the user model: a text with {persona}, {goal}, {stop} and columns of the task, or a .txt or .md
    file with it. null: the built-in text."""
    first: Literal["task", "user"] = "task"
    """Who writes the first message. task: the task's prompt; user: the user model, in place of the prompt."""
    stop: Annotated[str, Field(min_length=1)] = "###STOP###"
    """Text with which the user model ends the conversation; removed from its message."""
    max_turns: Count = 8
    """Maximum replies of the user. After the last one, the agent's next message ends the conversation."""
    sees_tools: bool = False
    """Show the user model the agent's tool calls and results. It never sees the agent's reasoning."""


class EnvironmentSection(Section):
    environment_id: PathText | None = None
    """Environment: a registered name, a Python file that defines one (weather.py, weather.py:Weather), or one that runs
    in another process (gymnasium:NAME, openenv:URL, process:COMMAND). null, with data.tasks: a plain conversation, with
    the configured tools if any."""
    command: str | None = None
    """Your own agent instead of an environment: a program started once per episode that calls the model at
    OPENAI_BASE_URL, such as "python my_agent.py"."""
    system_prompt: str | None = None
    """System prompt. null: the environment's own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For a command: {cwd: FOLDER, env: [NAMES of the variables it may see], processes: 16}. For an environment in
    another process: {args: {is_slippery: false}, isolation: episode}. For containers: {tasks: FOLDER}. For an
    environment written for RL-Factory: its config, such as {use_process_reward: true}."""
    async_execution: bool = True
    """Run the tools of one episode while other episodes are sampled."""
    num_workers: Count | None = None
    """Maximum number of concurrent episodes, each with its own environment. null: sampling.slots. With ray: worker
    processes on the cluster for the tools that may run remotely (tools.N.remote). null: one per machine."""
    max_turns: Count = 8
    """Maximum model turns per episode; at the limit the episode ends with status max_turns."""
    episode_timeout: Positive = 300.0
    """Maximum duration of an episode, in seconds; a longer episode is cancelled."""
    context: ContextSection | None = None
    """Shorten (fold) a conversation that exceeds a token limit: {fold: window, limit: 3000}. null: a conversation
    that reaches model.max_length ends."""
    user: UserSection | None = None
    """Simulated user: a model answers the agent's messages, by the task's persona and goal: {model: "openai:MODEL"}.
    null: a message without tool calls ends the episode."""


class ToolEntry(Section):
    name: str
    """Built-in tool (calculator, sql, ...) or Python file: mytools.py, mytools.py:lookup. With config: name of a tool
    or server in that file; any name if the file has only one server."""
    config: PathText | None = None
    """JSON file with MCP servers, in the common mcpServers format."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a built-in tool, such as {path: shop.db} for sql."""
    remote: bool | None = None
    """ray: run the tool on the cluster's machines. null: only the python tool runs there. MCP servers and the
    environment's own tools always stay local."""
    cache_enabled: bool = False
    """Cache results of repeated calls. Enable only if equal arguments always give equal results."""


RewardType = Literal[
    "environment", "rule_based", "process_reward", "model_judge", "tool_verified", "learned", "function"
]


class SingleRewardSection(Section):
    type: RewardType = "environment"
    """Reward that scores an episode. environment: the environment's own reward method; learned: a reward model;
    function: your Python function."""
    model: PathText | None = None
    """learned: reward model trained with training.algorithm=reward_model, named as in model.name. model_judge: name of
    the judge model at its endpoint."""
    judge: dict[str, Any] = Field(default_factory=dict)
    """model_judge: a judge model that starts and stops with the run: {model: NAME, replicas: 2, gpus: 1}."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the type. rule_based: {rule: numeric}. tool_verified: {verify: sql_execution}. process_reward: {pay:
    per_turn, cap: 1.0, claw_back: wrong, outcome: {rule: f1}, rules: {mine: rules.py:mine}}. model_judge: {base_url:
    ...}, one URL or a list. function: {function: rewards.py:score, timeout: 5, processes: 2}."""
    outcome_weight: float = 1.0
    """process_reward: weight of the outcome relative to the step rewards."""
    step_rewards: dict[str, float] = Field(default_factory=dict)
    """process_reward: reward per good step. Empty: correct_tool 0.5, clear_reasoning 0.3, efficient_path 0.2."""


class RewardPart(SingleRewardSection):
    type: RewardType  # pyright: ignore[reportGeneralTypeIssues]  # no default here
    """Reward type of this part, as above; required."""
    weight: float = 1.0
    """Factor applied to the outcome and step rewards of this part."""


class RewardSection(SingleRewardSection):
    parts: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Sum of several rewards, each with its own type, instead of a single one: {answer: {type: rule_based, weight: 1.0,
    options: {rule: numeric}}, steps: {type: process_reward, weight: 0.3}}."""
    max_unscored: Share = 0.5
    """Maximum share of unscored episodes per step. The run stops after three consecutive steps above it."""
    max_equal_steps: Count | None = None
    """Stop after N consecutive steps in which every group's rewards were identical. null: never."""


def _check_mask(bounds: list[float]) -> list[float]:
    """Raise ValueError unless 0 <= low < 1 < high: a token with equal probabilities has weight 1 and must stay."""
    low, high = bounds
    if not 0 <= low < 1 < high:
        raise ValueError("must be [low, high] with 0 <= low < 1 < high, such as [0.5, 2.0]")
    return bounds


class OptimizationSection(Section):
    async_rollout: bool = False
    """Sample the next steps while the model is being updated."""
    max_staleness: ZeroOrMore = 1
    """async_rollout: maximum policy lag of a trained token, in weight versions. 0: no overlap with training."""
    async_order: Literal["number", "arrival"] = "number"
    """async_rollout: order in which groups are trained. number: in the order they were started; arrival: as they
    finish, which favours short episodes."""
    importance_cap: Positive | None = None
    """Weight tokens by the probability ratio of learner to sampler, truncated at this value (truncated importance
    sampling). null: 2 with vLLM, Ray or max_staleness above 0; no weighting if the learner itself samples."""
    importance_by: Literal["token", "sequence"] = "token"
    """Level of the importance weight: one per token, or one per episode shared by all its tokens."""
    importance_mask: (
        Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_check_mask)] | None
    ) = None
    """Mask out tokens whose importance weight is outside [low, high] (IcePop), such as [0.5, 2.0]. null: none."""
    max_mismatch: Positive = 0.1
    """Maximum mean difference between sampler and learner log-probs under the same weights. The run warns above it and
    stops after three consecutive steps above it."""
    distributed_reward: bool = False
    """Score in worker processes, with ray on the cluster's machines: step rewards of process_reward, and rewards of
    type rule_based, function and tool_verified that need no tools. Judges always run at their endpoints."""
    reward_workers: Count | None = None
    """Worker processes per distributed reward. null: the number of CPU cores, at most 4."""
    offload_reference: bool = False
    """Keep the reference model in CPU memory and load it layer by layer. For several learners on GPUs."""
    tool_cache: bool | str = False
    """Cache repeated calls of all tools marked pure or stateful. true: tool_cache.sqlite in output_dir; or another
    file, or redis://HOST:PORT/0."""

    @property
    def effective_max_staleness(self) -> int:
        """Return the maximum number of steps that sampling may run ahead of training."""
        return self.max_staleness if self.async_rollout else 0


class DataSection(Section):
    tasks: PathText | None = None
    """Tasks: a file (JSONL, JSON, Parquet, CSV), saved dataset or hub id. null: the environment generates them."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Expected column -> actual column in tasks, dataset and heldout: {prompt: question, answer: solution}."""
    split: str = "train"
    """Split of the environment's tasks: train or heldout."""
    count: Count | None = None
    """Number of tasks. null: all tasks of a file; from an environment 1000 for training, else 16."""
    seed: ZeroOrMore = 0
    """Seed with which the environment generates tasks."""
    dataset: PathText | None = None
    """Training data of sft, dpo, kto and reward_model: conversations, pairs, labels or trajectories in a file (JSONL,
    JSON, Parquet, CSV), saved dataset, hub id or run folder. null: sft uses the environment's built-in expert."""
    dataset_split: str = "train"
    """Split of data.dataset or data.tasks, if it is a hub dataset or a saved dataset; files have no splits."""
    shuffle: bool = True
    """Shuffle the tasks or rows every epoch. false: keep their order."""
    skip_bad_rows: bool = False
    """Skip and count invalid rows instead of raising an error. Rows over model.max_length are always skipped."""
    image_urls: bool = False
    """Download images that tasks and rows name by http(s) address, each of at most 10 MB. false: such a row is an
    error. Addresses of a dataset can lead into your own network."""
    heldout: PathText | None = None
    """Evaluation tasks, from the same kinds of source as data.tasks; with data.dataset: rows in its format. null: the
    environment's heldout split."""
    heldout_split: str = "test"
    """Split of data.heldout, if it is a hub dataset or a saved dataset."""
    heldout_count: Count = 64
    """Number of tasks or rows evaluated during training."""


class SamplingSection(Section):
    engine: Literal["native", "vllm"] = "native"
    """Inference engine: native (part of this package), or vLLM in a separate process."""
    temperature: NotNegative = 1.0
    """Sampling temperature. 0: greedy decoding."""
    max_tokens: Count = 256
    """Maximum tokens per model turn."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: cumulative probability of the candidate tokens. Evaluation only."""
    top_k: ZeroOrMore = 0
    """Number of most likely tokens to sample from. 0: off. Evaluation only."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Minimum token probability, relative to the most likely token. Evaluation only."""
    slots: Count = 64
    """Maximum number of concurrent sequences in the engine."""
    cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Size of the native engine's KV cache in GiB. null: the memory that is free after the learner's peak. When it is
    full, the youngest waiting episode releases its part and is prefilled again later."""
    deterministic: bool = False
    """Make trajectories depend only on the seed, not on tool latencies."""
    max_reply_tokens: Count = 1024
    """Maximum tokens per tool reply. Longer replies are truncated with a marker."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """vLLM engine arguments, such as {gpu_memory_utilization: 0.5, tensor_parallel_size: 2}."""


class LoraSection(Section):
    enabled: bool = False
    """Train a LoRA adapter instead of all weights."""
    r: Count = 16
    """Rank of the adapter."""
    alpha: Count = 32
    """Scaling factor; the adapter's output is multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability inside the adapter."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: all-linear, or a list of layer-name suffixes."""
    experts: bool | None = None
    """Mixtures of experts: adapt the fused weights of the experts too. null: only in families where PEFT counts
    them as linear layers, such as Qwen3-MoE, Mixtral and GLM-4.5. Not with dropout or dora."""
    dora: bool = False
    """Train magnitude and direction of each weight row separately (DoRA): slower, better at low ranks."""
    rslora: bool = False
    """Scale the adapter by alpha / sqrt(r) (rsLoRA); for high ranks."""


class ComputeSection(Section):
    backend: Literal["local", "ray"] = "local"
    """Where the run executes: on this machine (local) or on a Ray cluster."""
    address: str | None = None
    """ray: auto (the cluster this machine belongs to) or HOST:PORT. null: start Ray on this machine for the run."""
    samplers: Count = 1
    """ray: number of inference engines, each in its own process."""
    gpus_per_sampler: NotNegative | None = None
    """ray: GPUs per sampler. null: 1 for vLLM if the cluster has GPUs, else 0."""
    cpus_per_sampler: NotNegative = 1.0
    """ray: CPU cores per sampler."""
    learners: Count | None = None
    """Number of learner processes, each on its own device; weights are sharded over them. null: the number of processes
    started by torchrun or accelerate launch, else 1."""
    gpus_per_learner: NotNegative | None = None
    """ray: GPUs per learner, except the first (the run's own process). null: 1 if the cluster has GPUs, else 0."""
    start_timeout: Positive = 600.0
    """Maximum start-up time of an engine or learner in another process, in seconds."""
    num_gpus: Count | None = None
    """GPUs of the run, divided among learners and samplers if neither is set (docs/CLUSTER.md). With a Ray started for
    the run: GPUs of Ray, excluding the first learner's. null: all GPUs."""
    allocation_id: PathText | None = None
    """Id of a machine allocation in factories.yaml or a ComputeFactory; released when the run ends."""


class LoggingSection(Section):
    output_dir: PathText = "runs"
    """Folder for runs and all other output."""
    trackers: list[Literal["wandb", "mlflow", "tensorboard"]] = Field(default_factory=list)
    """Experiment trackers that receive the metrics, besides the run folder."""
    wandb: dict[Literal["project", "entity", "group"], str] = Field(default_factory=dict)
    """W&B project, entity and group. Missing keys come from WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP."""
    save_trajectories: bool = True
    """Save every training episode in the run folder."""
    record_tools: bool = True
    """Record every tool call in the run folder, for --replay."""
    checkpoint_every: Count = 25
    """Save a checkpoint every N steps, and at the end."""
    keep_checkpoints: Count = 2
    """Number of most recent checkpoints to keep."""
    keep_every: Count | None = None
    """Keep checkpoints at multiples of N steps as well. null: none."""
    keep_best: bool = False
    """Save and keep a checkpoint at every new best evaluation."""
    optimizer_state: Literal["all", "newest"] = "all"
    """Checkpoints that keep their optimizer state and float32 weights (about 6 of 7 bytes). newest: removed from older
    checkpoints, which can still be evaluated, exported and registered, but not resumed."""


class RegistrySection(Section):
    name: str | None = None
    """Register the trained model as the next version of this name when the run finishes. null: do not register."""
    checkpoint: Literal["best", "last"] = "last"
    """Checkpoint to register: the best by evaluation, or the last. Also accepted as registry.register."""
    path: PathText | None = None
    """Registry file. null: registry.sqlite in logging.output_dir."""


class TrainingConfig(Section):
    """Options of a run, in sections. The short form works too: `TrainingConfig(model="Qwen3-4B", tools=[...])`. Raises
    ConfigError."""

    model: ModelSection = Field(default_factory=ModelSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    environment: EnvironmentSection = Field(default_factory=EnvironmentSection)
    tools: list[ToolEntry] = Field(default_factory=list)
    reward: RewardSection = Field(default_factory=RewardSection)
    optimization: OptimizationSection = Field(default_factory=OptimizationSection)
    data: DataSection = Field(default_factory=DataSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    compute: ComputeSection = Field(default_factory=ComputeSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)
    registry: RegistrySection = Field(default_factory=RegistrySection)
    sft: SFTSection = Field(default_factory=SFTSection)
    grpo: GRPOSection = Field(default_factory=GRPOSection)
    ppo: PPOSection = Field(default_factory=PPOSection)
    dpo: DPOSection = Field(default_factory=DPOSection)
    kto: KTOSection = Field(default_factory=KTOSection)
    rft: RFTSection = Field(default_factory=RFTSection)
    reward_model: RewardModelSection = Field(default_factory=RewardModelSection)

    _key_locations: KeyLocations = PrivateAttr(default_factory=KeyLocations)

    def wrong(self, problems: Iterable[Problem]) -> ConfigError:
        """Return a ConfigError for problems found after loading, each with the file and line of its key."""
        return self._key_locations.make_error(problems)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**expand(data))
        except ValidationError as error:
            # `from None`: pydantic's message repeats the values, which may be secrets.
            raise ConfigError(list_problems(error, TrainingConfig)) from None


ALGORITHMS: tuple[str, ...] = get_args(TrainingSection.model_fields["algorithm"].annotation)


def get_sections() -> dict[str, type[Section]]:
    """Return the section classes by name, without `tools`, which is a list."""
    fields = [(name, field.annotation) for name, field in TrainingConfig.model_fields.items()]
    return {name: kind for name, kind in fields if isinstance(kind, type) and issubclass(kind, Section)}
