"""Checks for invalid combinations of options, run before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from TrainingFactory.algorithms.kinds import KINDS, make_algorithm
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.algorithms import BranchingSection
from TrainingFactory.config.problems import Problem
from TrainingFactory.data.examples import REQUIRED_COLUMNS
from TrainingFactory.training.dataset import make_form
from TrainingFactory.training.filters import EpisodeFilters

MAX_LEAVES = 1024  # episodes per task without training.branching.max_episodes


def check_config(config: TrainingConfig, is_recorded: bool) -> None:
    """Raise ValueError if the config cannot be trained. `is_recorded`: the run trains on a dataset."""
    check_options(config, is_recorded)
    _check_precision(config)
    name = config.training.algorithm
    make_algorithm(name, getattr(config, name).model_dump())  # raises if its options contradict each other
    EpisodeFilters(config.training.filters)  # raises for an unknown filter


def group_size_error(group_size: int, min_size: int, subject: str, remedy: str = "") -> ValueError:
    """Return the error for groups smaller than the `min_size` that `subject` needs to compare episodes."""
    return ValueError(
        f"training.group_size={group_size} is too small: {subject} compares the episodes of a group with each "
        "other. Use "
        f"{min_size} or more (typically 8){remedy}"
    )


def check_options(config: TrainingConfig, is_recorded: bool) -> None:
    """Run the checks that need no torch, because the web server does not import it."""
    training, name = config.training, config.training.algorithm
    kind = KINDS[name]
    if training.group_size < (min_size := kind.get_min_group(getattr(config, name))):
        raise group_size_error(training.group_size, min_size, name)
    if training.activation_offload and not training.gradient_checkpointing:
        raise ValueError(
            "training.activation_offload keeps the layer inputs of gradient checkpointing in CPU memory. Set "
            "training.gradient_checkpointing=true, or remove it"
        )
    if training.batch_size % training.minibatches:
        raise ValueError(
            f"training.minibatches={training.minibatches} does not divide training.batch_size={training.batch_size}. "
            "Choose a divisor of the batch size"
        )
    if training.batch_size // training.minibatches < kind.min_rows:
        detail = f" with training.minibatches={training.minibatches}" if training.minibatches > 1 else ""
        raise ValueError(
            f"training.batch_size={training.batch_size}{detail} is too small: {name} compares the examples of a "
            f"mini-batch with each other. Use {kind.min_rows} or more in each (typically 16)"
        )
    if training.eval_every is None and (training.stop_when or config.logging.keep_best):
        key = "training.stop_when" if training.stop_when else "logging.keep_best"
        raise ValueError(f"{key} needs evaluations: set training.eval_every=N")
    if training.router_check_every is not None:
        _check_router_check(config)
    if kind.samples:
        _check_sampling(config)
    elif training.filters:
        raise ValueError(
            f"training.filters applies to sampled episodes, but training.algorithm={name} samples none. Remove it"
        )
    if training.branching is not None:
        _check_branching(config, training.branching)
    if is_recorded:
        make_form(config)  # raises for algorithms that do not train on a dataset
    if not (is_recorded or kind.samples or kind.accepts_demonstrations):
        raise ValueError(
            f"training.algorithm={name} needs a dataset. Set data.dataset=FILE, with "
            f"{REQUIRED_COLUMNS[make_form(config)]}; or with recorded trajectories"
        )


def _check_sampling(config: TrainingConfig) -> None:
    sampling = config.sampling
    if sampling.temperature == 0:
        raise ValueError("sampling.temperature=0 makes all episodes of a task identical. Train with 1")
    if (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, 0, 0.0):
        raise ValueError(
            "sampling.top_p, top_k and min_p are for evaluation only, because training needs log-probs of the full "
            "softmax. Remove them from the training config"
        )
    if sampling.deterministic and config.optimization.effective_max_staleness:
        raise ValueError(
            "sampling.deterministic=true contradicts optimization.async_rollout, with which the weights that sample a "
            "turn depend on timing. Remove one of them, or set optimization.max_staleness=0"
        )


def _check_router_check(config: TrainingConfig) -> None:
    """Raise ValueError if `training.router_check_every` cannot be measured. The measurement needs an engine in this
    process that has the learner's weights and does not sample at the same time."""
    problem = None
    if not KINDS[config.training.algorithm].samples:
        problem = f"training.algorithm={config.training.algorithm} samples no episodes"
    elif config.sampling.engine != "native" or config.compute.backend != "local":
        problem = "the sampler is in another process; watch the metric mismatch"
    elif config.optimization.effective_max_staleness:
        problem = "optimization.async_rollout samples during the measurement"
    elif (config.compute.learners or 1) > 1:
        problem = f"the weights are sharded over compute.learners={config.compute.learners}"
    if problem is not None:
        raise ValueError(
            f"training.router_check_every={config.training.router_check_every} cannot be measured: {problem}. Remove it"
        )


def _check_branching(config: TrainingConfig, branching: BranchingSection) -> None:
    """Raise ConfigError if episodes cannot fork, or if the algorithm cannot train on forked episodes."""
    problems = [
        Problem(("training", "branching", *key), text)
        for key, text in _find_branching_problems(config, branching)
    ]
    if problems:
        raise config.wrong(problems)


def _find_branching_problems(
    config: TrainingConfig, branching: BranchingSection
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each problem as its key, below training.branching, and its text."""
    training, grpo = config.training, config.grpo
    if training.algorithm != "grpo":
        text = f"training.algorithm={training.algorithm} does not train on forked episodes. Use grpo"
        yield (), f"{text}, or remove branching"
    elif grpo.advantage not in ("group", "rloo"):
        yield (), f"grpo.advantage={grpo.advantage} compares no continuations of a fork. Use group or rloo"
    elif grpo.ratio == "sequence":
        yield (), "grpo.ratio=sequence needs whole episodes, but forks share turns. Use grpo.ratio=token"
    elif config.optimization.importance_by == "sequence":
        text = "optimization.importance_by=sequence needs whole episodes, but forks share turns"
        yield (), f"{text}. Use importance_by=token"
    if config.environment.command is not None:
        text = "the state of a program (environment.command) cannot be forked. Use an environment"
        yield (), f"{text}, or remove branching"
    if branching.at == "turns" and not branching.turns:
        yield ("turns",), "is empty. List the turns after which episodes fork, such as [1, 2]"
    if branching.at == "function" and branching.function is None:
        yield ("function",), "is not set. Name your function, such as forks.py:uncertain"
    max_turns = config.environment.max_turns
    if max_turns <= min(branching.turns if branching.at == "turns" else [branching.every], default=0):
        text = f"environment.max_turns={max_turns} ends every episode before its first fork. Raise it"
        yield (("turns" if branching.at == "turns" else "every"),), f"{text}, or fork earlier"
    yield from _find_fork_budget_problems(config, branching)


def _find_fork_budget_problems(
    config: TrainingConfig, branching: BranchingSection
) -> Iterator[tuple[tuple[str, ...], str]]:
    group_size, continuations = config.training.group_size, branching.continuations
    num_leaves = group_size * continuations**branching.max_forks
    if (max_episodes := branching.max_episodes) is None and num_leaves > MAX_LEAVES:
        text = f"allows {num_leaves} episodes per task. Lower it, or set training.branching.max_episodes"
        yield ("max_forks",), text
    min_episodes = group_size + continuations - 1
    if max_episodes is not None and max_episodes < min_episodes:
        text = f"is {max_episodes}, too small for any fork with training.group_size={group_size}"
        yield ("max_episodes",), f"{text}. Use {min_episodes} or more"
    min_tokens = group_size * (continuations * config.sampling.max_tokens - 1) + 1
    if (max_tokens := branching.max_tokens) is not None and max_tokens < min_tokens:
        text = f"is {max_tokens}, too small for any fork: each continuation needs sampling.max_tokens="
        yield ("max_tokens",), f"{text}{config.sampling.max_tokens}. Use {min_tokens} or more"


def check_steps(config: TrainingConfig, steps: int) -> None:
    """Raise ValueError if a run of `steps` steps would never update the policy."""
    if config.training.algorithm == "ppo" and config.ppo.critic_warmup >= steps:
        limit = f"training.max_steps={steps}" if config.training.max_steps else f"{steps} steps in all epochs"
        raise ValueError(
            f"ppo.critic_warmup={config.ppo.critic_warmup} of {limit}: the policy would never be updated. Reduce "
            "critic_warmup, or make the run longer"
        )


def _check_precision(config: TrainingConfig) -> None:
    """Raise ValueError if quantized weights or 8-bit optimizer states cannot be used with this config or on this
    machine."""
    if (quantization := config.model.quantization) != "none":
        if not config.lora.enabled and config.model.adapter is None:
            raise ValueError(
                f"model.quantization={quantization}: quantized weights cannot be trained. Train an adapter over them: "
                "lora.enabled=true"
            )
        from TrainingFactory.models.names import resolve_model_name
        from TrainingFactory.models.quantization import check_quantization

        check_quantization(quantization, resolve_model_name(config.model.name))
    if config.training.optimizer == "adamw_8bit":
        from TrainingFactory.learning.optim import check_adamw_8bit

        check_adamw_8bit(config.model.device)
