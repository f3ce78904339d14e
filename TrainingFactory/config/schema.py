"""List every option with its meaning, default and range. Those that do nothing yet are in `not_yet.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError

from TrainingFactory.common.options import Count, NotNegative, Positive, Share, ZeroOrMore
from TrainingFactory.config.algorithms import (
    DPOSection,
    GRPOSection,
    KTOSection,
    PPOSection,
    RewardModelSection,
    RFTSection,
    SFTSection,
)
from TrainingFactory.config.names import expand
from TrainingFactory.config.problems import ConfigError, Places, Problem, explain
from TrainingFactory.config.section import PathText, Section


class ModelSection(Section):
    name: PathText = "builtin:tiny"
    """Hub id, local folder, GGUF file, short name such as qwen3-4b, a run (sft, runs/sft, sft@step-40), a registered
    model (agent, agent:3, agent@champion), or builtin:tiny."""
    revision: str | None = None
    """Branch, tag or commit on the hub; for builtin:tiny the seed of its weights, as text: "0"."""
    family: str | None = None
    """Chat format (qwen3, llama3, ...); null: seen from the chat template."""
    tools_format: Literal["hermes"] | None = None
    """Of a model whose chat template has no tools: gives it a form for them, with tokens of its own for the tags."""
    adapter: PathText | None = None
    """LoRA adapter to put on top: a folder, or a run or registered model that is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights; auto: bfloat16 on a GPU, float32 on a CPU."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """auto (CUDA where there is one, else the CPU), cpu, cuda, cuda:N, or mps, which is untested."""
    max_length: Annotated[int, Field(ge=16)] | None = None
    """Longest conversation, in tokens; null: the model's own limit, at most 4096."""
    thinking: bool | None = None
    """Reasoning on or off, where the template has a switch for it."""
    quantization: Literal["none", "4bit", "8bit"] = "none"
    """Number format of the weights under an adapter: none is that of dtype; 4bit and 8bit need bitsandbytes."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; only for models you trust."""


def _stopping(given: dict[Any, float]) -> dict[Any, float]:
    """Check that patience is a count and target a share."""
    if (patience := given.get("patience", 1)) < 1 or patience % 1:
        raise ValueError("patience counts evaluations: it must be a whole number of 1 or more")
    if not 0 < given.get("target", 1.0) <= 1:
        raise ValueError("target is a share: it must be over 0, and 1 at most")
    return given


class TrainingSection(Section):
    algorithm: Literal["grpo", "ppo", "rft", "sft", "dpo", "kto", "reward_model"] = "grpo"
    """How the model learns: grpo, ppo and rft from rewards of its own episodes, sft from demonstrations, dpo from
    pairs, kto from labels; reward_model learns to score."""
    num_epochs: Count = 1
    """Passes over the tasks."""
    max_steps: Count | None = None
    """Steps after which training ends; null: when the epochs are over."""
    batch_size: Count = 8
    """Tasks per step; demonstrations, pairs or labelled examples where the data exist."""
    group_size: Count = 8
    """Episodes per task in one step; grpo needs 2 or more, except with reinforce_plus_plus."""
    learning_rate: Positive = 1e-6
    """Peak learning rate."""
    warmup_steps: ZeroOrMore = 0
    """Steps over which the learning rate rises to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on from its peak; linear and cosine end at 0."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit keeps its state in 8 bits (on a GPU, with bitsandbytes); muon is for the matrices of models trained
    from scratch; the rest then goes by adamw."""
    weight_decay: NotNegative = 0.0
    """Of matrices; norms, biases and embeddings are not decayed."""
    max_grad_norm: Positive = 1.0
    """Longer gradients are scaled down to this norm."""
    token_budget: Count = 16_384
    """Tokens that go through the model at once; less needs less memory and gives the same gradient."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: slower, in less memory."""
    update_epochs: Count = 1
    """Passes over the episodes or rows of a step."""
    minibatches: Count = 1
    """Steps of the optimiser in each pass; a divisor of batch_size (kto: with 2 examples or more in each)."""
    eval_every: Count | None = None
    """Evaluate on held-out tasks or rows before training, every so many steps, and at the end; null: never."""
    stop_when: Annotated[dict[Literal["patience", "target"], float], AfterValidator(_stopping)] = Field(
        default_factory=dict
    )
    """End early: {patience: 3} when as many evaluations in a row were no better than the best before them,
    {target: 0.9} when so much of the held-out tasks is done; both: at the first of them."""
    seed: ZeroOrMore = 0
    """Where every random number of sampling and training starts from."""


class EnvironmentSection(Section):
    environment_id: PathText | None = None
    """Name of an environment, or a Python file with one: weather.py, weather.py:Weather; null with data.tasks: a plain
    conversation, with the tools if there are any."""
    command: str | None = None
    """Your own agent in place of an environment: a program that is started for each episode and calls the model at
    OPENAI_BASE_URL, such as "python my_agent.py"."""
    system_prompt: str | None = None
    """What the model is told first; null: what the environment says."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of a command: {cwd: FOLDER, env: [NAMES of variables that it may see], processes: 16}; of an environment that is
    written for RL-Factory: its config, such as {use_process_reward: true}."""
    async_execution: bool = True
    """Tools of one episode run while others are sampled."""
    num_workers: Count | None = None
    """Maximum number of episodes, each with its environment, that run at the same time; null: sampling.slots. With ray:
    processes on the cluster that run the tools which may (tools.N.remote); null: one on each machine."""
    max_turns: Count = 8
    """Turns of the model after which an episode ends as max_turns."""
    episode_timeout: Positive = 300.0
    """Seconds after which an episode is given up."""


class ToolEntry(Section):
    name: str
    """A built-in tool (calculator, sql, ...), or a Python file: mytools.py, mytools.py:lookup. With config: the tool
    or the server in that file; where the file has one server only, any name will do."""
    config: PathText | None = None
    """JSON file with MCP servers, as other programs write it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of a built-in tool, such as {path: shop.db} for sql."""
    remote: bool | None = None
    """ray: run it on the cluster's machines; null: the python tool alone does. Servers and the environment's own tools
    stay where they are."""
    cache_enabled: bool = False
    """Answer repeated calls from the cache; says that equal arguments give equal results."""


RewardType = Literal[
    "environment", "rule_based", "process_reward", "model_judge", "tool_verified", "learned", "function"
]


class OneReward(Section):
    type: RewardType = "environment"
    """Who scores an episode; environment: its own reward method; learned: a reward model; function: one of yours."""
    model: PathText | None = None
    """learned: what a run of training.algorithm=reward_model has made, named as in model.name. model_judge: the judge's
    name at its endpoint."""
    judge: dict[str, Any] = Field(default_factory=dict)
    """model_judge: a judge of the run's own, started and ended with it: {model: NAME, replicas: 2, gpus: 1}."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the type: {rule: numeric} for rule_based, {verify: sql_execution} for tool_verified, {pay: per_turn, cap: 1.0,
    claw_back: wrong, outcome: {rule: f1}, rules: {mine: rules.py:mine}} for process_reward,
    {base_url: ...} (one address, or a list of them) for model_judge, {function: rewards.py:score, timeout: 5,
    processes: 2} for function."""
    outcome_weight: float = 1.0
    """process_reward: weight of the outcome beside the step rewards."""
    step_rewards: dict[str, float] = Field(default_factory=dict)
    """process_reward: what each kind of good step earns; empty: correct_tool 0.5, clear_reasoning 0.3,
    efficient_path 0.2."""


class RewardPart(OneReward):
    type: RewardType  # pyright: ignore[reportGeneralTypeIssues]  # no default here
    """As above; each part says which reward it is."""
    weight: float = 1.0
    """What the part's outcome and steps are multiplied by."""


class RewardSection(OneReward):
    parts: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Several rewards, each with its type, added up, instead of one:
    {answer: {type: rule_based, weight: 1.0, options: {rule: numeric}}, steps: {type: process_reward, weight: 0.3}}."""
    max_unscored: Share = 0.5
    """Share of a step's episodes that may be unscored; after three steps with more in a row the run stops."""
    max_equal_steps: Count | None = None
    """Stop when the rewards told no episode of a task from another for so many steps in a row; null: go on."""


def _bounds(given: list[float]) -> list[float]:
    """Check that something lies between the two, and what is as likely for both among it."""
    if not 0 <= given[0] < 1 < given[1]:
        raise ValueError("must be a number below 1 and one above it, such as [0.5, 2.0]")
    return given


class OptimizationSection(Section):
    async_rollout: bool = False
    """Sample the next steps while the model is being updated."""
    max_staleness: ZeroOrMore = 1
    """async_rollout: versions of the weights that a token may be behind when it is trained; 0: nothing overlaps."""
    async_order: Literal["number", "arrival"] = "number"
    """async_rollout: train groups in the order in which they were begun, or as they end: quick ones come first then."""
    importance_cap: Positive | None = None
    """Weight tokens by how much likelier the learner finds them than their sampler did, at most this; null: 2 with
    vLLM, Ray or max_staleness above 0, and nothing is weighted where the learner itself samples."""
    importance_by: Literal["token", "sequence"] = "token"
    """Of each token, or of the whole episode for all of its tokens."""
    importance_mask: (
        Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_bounds)] | None
    ) = None
    """Leave tokens out whose weight is below the first or above the second (IcePop), such as [0.5, 2.0]; null: none."""
    max_mismatch: Positive = 0.1
    """Mean distance between the log-probs of sampler and learner for the same weights: over it the run warns, and after
    three steps in a row it stops."""
    distributed_reward: bool = False
    """Score in worker processes, with ray on the cluster's machines: the step rewards of process_reward, and rewards of
    the types rule_based, function and tool_verified that need no tools. Judges answer at their endpoints anyway."""
    reward_workers: Count | None = None
    """Processes for each such reward; null: as many as there are cores, at most 4."""
    offload_reference: bool = False
    """Several learners on GPUs: keep the reference model in the memory of the CPUs, and load it layer by layer."""
    tool_cache: bool | str = False
    """Answer repeated calls of all tools that are marked pure or stateful: true for tool_cache.sqlite in output_dir, or
    another file, or redis://HOST:PORT/0."""

    @property
    def bound(self) -> int:
        """Return how many steps sampling may be ahead of training."""
        return self.max_staleness if self.async_rollout else 0


class DataSection(Section):
    tasks: PathText | None = None
    """Tasks: a file (JSONL, JSON, Parquet, CSV), saved dataset or hub id; null: the environment makes them."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns of tasks, dataset and heldout that are called otherwise there: {prompt: question, answer: answer}."""
    split: str = "train"
    """Which of the environment's splits the tasks come from: train or heldout."""
    count: Count | None = None
    """Number of tasks; null: all of a file; from the environment 16, and 1000 for training."""
    seed: ZeroOrMore = 0
    """Which tasks the environment makes."""
    dataset: PathText | None = None
    """sft, dpo, kto, reward_model: file (JSONL, JSON, Parquet, CSV), saved dataset, hub id or run folder, with
    conversations, pairs, labels or trajectories; null: for sft the environment's own expert plays."""
    dataset_split: str = "train"
    """Which split of data.dataset or data.tasks, where that is a dataset of the hub or a saved one; files have none."""
    shuffle: bool = True
    """Take the tasks or rows in another order every epoch; false: in the order they have."""
    skip_bad_rows: bool = False
    """Leave out rows that are wrong and count them, instead of an error; rows over model.max_length always are."""
    heldout: PathText | None = None
    """Tasks for evaluation, from where data.tasks may come, or where data.dataset is given, rows like its; null: the
    environment's split heldout."""
    heldout_split: str = "test"
    """Which split of data.heldout, where that is a dataset of the hub or a saved one."""
    heldout_count: Count = 64
    """Number of tasks or rows for evaluation during training."""


class SamplingSection(Section):
    engine: Literal["native", "vllm"] = "native"
    """What samples: the engine of this package, or vLLM in a process of its own."""
    temperature: NotNegative = 1.0
    """0 is greedy."""
    max_tokens: Count = 256
    """Longest turn of the model, in tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; for evaluation."""
    top_k: ZeroOrMore = 0
    """Number of likeliest tokens to choose from, 0 is off; for evaluation."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least probability relative to the likeliest token; for evaluation."""
    slots: Count = 64
    """Episodes held by the engine at the same time; memory grows with it."""
    deterministic: bool = False
    """Same seed, same trajectories, whatever the latencies of the tools."""
    max_reply_tokens: Count = 1024
    """Longest tool reply, in tokens; a longer one is cut, and the cut is marked."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's engine, such as {gpu_memory_utilization: 0.5, tensor_parallel_size: 2}."""


class LoraSection(Section):
    enabled: bool = False
    """Train an adapter instead of all weights."""
    r: Count = 16
    """Rank."""
    alpha: Count = 32
    """Scale; the adapter is weighted by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout inside the adapter."""
    target_modules: str | list[str] = "all-linear"
    """Which layers get an adapter: all-linear, or endings of their names."""
    dora: bool = False
    """Learn the length of each row of a weight beside its direction (DoRA): slower, better at low ranks."""
    rslora: bool = False
    """Weight the adapter by alpha / sqrt(r), for high ranks."""


class ComputeSection(Section):
    backend: Literal["local", "ray"] = "local"
    """This machine, or a Ray cluster."""
    address: str | None = None
    """ray: auto for the cluster that this machine is part of, or HOST:PORT; null: Ray is started on this machine for
    the run."""
    samplers: Count = 1
    """ray: engines that sample, each in a process of its own."""
    gpus_per_sampler: NotNegative | None = None
    """ray: GPUs of each; null: 1 for vLLM where the cluster has GPUs, else 0."""
    cpus_per_sampler: NotNegative = 1.0
    """ray: cores of each."""
    learners: Count | None = None
    """Processes that train together, each on a device of its own, with the weights sharded over them; null: as many as
    torchrun or accelerate launch have started, else 1."""
    gpus_per_learner: NotNegative | None = None
    """ray: GPUs of each but the first, which is the run's own process; null: 1 where the cluster has GPUs, else 0."""
    start_timeout: Positive = 600.0
    """Seconds in which an engine or a learner in another process must have started."""
    num_gpus: Count | None = None
    """GPUs of the run, divided among learners and samplers where neither is set (docs/CLUSTER.md). ray, where it is
    started for the run: the GPUs of Ray, without that of the first learner; null: all there are."""
    allocation_id: PathText | None = None
    """Machines by their id in factories.yaml or in a ComputeFactory; they are released when the run ends."""


class LoggingSection(Section):
    output_dir: PathText = "runs"
    """Folder for everything that is written."""
    trackers: list[Literal["wandb", "mlflow", "tensorboard"]] = Field(default_factory=list)
    """Where metrics go besides the run's folder."""
    wandb: dict[Literal["project", "entity", "group"], str] = Field(default_factory=dict)
    """Where they go in W&B; what is not here is as WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP say."""
    save_trajectories: bool = True
    """Keep every episode of training in the run's folder."""
    record_tools: bool = True
    """Write down every tool call in the run's folder, so that --replay can serve it again."""
    checkpoint_every: Count = 25
    """Steps between checkpoints; there is always one at the end."""
    keep_checkpoints: Count = 2
    """The last so many checkpoints are kept."""
    keep_every: Count | None = None
    """Checkpoints at multiples of so many steps are kept as well."""
    keep_best: bool = False
    """Make a checkpoint whenever an evaluation is the best so far, and keep it."""
    optimizer_state: Literal["all", "newest"] = "all"
    """Checkpoints that keep their optimizer state and float32 weights, about 6 of 7 bytes: `newest` removes them from
    older checkpoints, which can then be evaluated, exported and registered but not resumed."""


class RegistrySection(Section):
    name: str | None = None
    """Register what the run has made as the next version of this model when it is finished; null: it is not."""
    checkpoint: Literal["best", "last"] = "last"
    """Register the best checkpoint by its evaluations, or the last; `register` is another name of it."""
    path: PathText | None = None
    """The registry's file; null: registry.sqlite in logging.output_dir."""


class TrainingConfig(Section):
    """Holds all options of a run in sections, or in short form: `TrainingConfig(model="Qwen3-4B", tools=[...])`; raises
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

    _places: Places = PrivateAttr(default_factory=Places)

    def wrong(self, problems: Iterable[Problem]) -> ConfigError:
        """Return what was found later to be wrong, with the places where it was written."""
        return self._places.error(problems)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**expand(data))
        except ValidationError as error:
            # `from None`: pydantic's own text repeats the values, secrets among them.
            raise ConfigError(explain(error, TrainingConfig)) from None


ALGORITHMS: tuple[str, ...] = get_args(TrainingSection.model_fields["algorithm"].annotation)


def sections() -> dict[str, type[Section]]:
    """Return every section that has keys of its own; `tools` is a list."""
    fields = [(name, field.annotation) for name, field in TrainingConfig.model_fields.items()]
    return {name: kind for name, kind in fields if isinstance(kind, type) and issubclass(kind, Section)}
