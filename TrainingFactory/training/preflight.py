"""Refuse what a config can say and a training run cannot do, before anything is loaded."""

from __future__ import annotations

from TrainingFactory.algorithms.kinds import KINDS, make_algorithm
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.examples import NEEDS
from TrainingFactory.training.dataset import form_of


def check(config: TrainingConfig, recorded: bool) -> None:
    """Raise ValueError for what cannot be trained. `recorded`: the rows that are learned from exist already."""
    check_options(config, recorded)
    _check_precision(config)
    name = config.training.algorithm
    make_algorithm(name, getattr(config, name).model_dump())  # its options may contradict each other


def group_too_small(group_size: int, least: int, who: str, remedy: str = "") -> ValueError:
    """Return the error for groups in which `who` cannot compare episodes."""
    return ValueError(
        f"training.group_size is {group_size}, but {who} compares the episodes of a group with each other: it needs "
        f"{least} or more (8 is usual){remedy}"
    )


def check_options(config: TrainingConfig, recorded: bool) -> None:
    """Raise what `check` finds without torch, which the web page does not import."""
    training, name = config.training, config.training.algorithm
    kind = KINDS[name]
    if training.group_size < (least := kind.least_group(getattr(config, name))):
        raise group_too_small(training.group_size, least, name)
    if training.batch_size % training.minibatches:
        raise ValueError(
            f"training.minibatches is {training.minibatches}, which does not divide training.batch_size "
            f"{training.batch_size}; choose a divisor of it"
        )
    if training.batch_size // training.minibatches < kind.least_rows:
        parts = f" and training.minibatches {training.minibatches}" if training.minibatches > 1 else ""
        raise ValueError(
            f"training.batch_size is {training.batch_size}{parts}, but {name} measures its examples against the others "
            f"of the mini-batch: it needs {kind.least_rows} or more in each (16 is usual)"
        )
    if training.eval_every is None and (training.stop_when or config.logging.keep_best):
        key = "training.stop_when" if training.stop_when else "logging.keep_best"
        raise ValueError(f"{key} goes by evaluations, and there are none without training.eval_every=N")
    if kind.samples:
        _check_sampling(config)
    if recorded:
        form_of(config)  # raises for algorithms that take no rows
    if not (recorded or kind.samples or kind.demonstrations):
        raise ValueError(
            f"training.algorithm={name} learns from rows that exist: data.dataset=FILE, with "
            f"{NEEDS[form_of(config)]}; or with recorded trajectories"
        )


def _check_sampling(config: TrainingConfig) -> None:
    sampling = config.sampling
    if sampling.temperature == 0:
        raise ValueError("sampling.temperature is 0: all episodes of a task would be the same; train at 1")
    if (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, 0, 0.0):
        raise ValueError(
            "sampling.top_p, top_k and min_p are for evaluation: training needs log-probs of the full "
            "softmax; leave them out of a training config"
        )
    if sampling.deterministic and config.optimization.bound:
        raise ValueError(
            "sampling.deterministic is true, but with optimization.async_rollout it depends on the time that tools and "
            "updates take which weights sample a turn; leave one of them out, or set optimization.max_staleness to 0"
        )


def check_steps(config: TrainingConfig, total: int) -> None:
    """Raise where nothing would be learned in so many steps."""
    if config.training.algorithm == "ppo" and config.ppo.critic_warmup >= total:
        steps = f"training.max_steps {total}" if config.training.max_steps else f"{total} steps in all epochs"
        raise ValueError(
            f"ppo.critic_warmup is {config.ppo.critic_warmup} of {steps}: the policy would never learn; make it "
            "smaller, or the run longer"
        )


def _check_precision(config: TrainingConfig) -> None:
    """Refuse weights and optimiser states in few bits where they cannot be."""
    if (few := config.model.quantization) != "none":
        if not config.lora.enabled and config.model.adapter is None:
            raise ValueError(
                f"model.quantization is {few}, and weights in so few bits cannot be trained; train an adapter over "
                "them: lora.enabled=true"
            )
        from TrainingFactory.models.loading import check_quantization
        from TrainingFactory.models.names import resolve

        check_quantization(few, resolve(config.model.name))
    if config.training.optimizer == "adamw_8bit":
        from TrainingFactory.learning.optim import check_adamw_8bit

        check_adamw_8bit(config.model.device)
