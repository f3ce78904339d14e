"""From the options of a config to what learns: the trainable model, the algorithm, the learner."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.protocols import Algorithm, Sampler

if TYPE_CHECKING:
    from TrainingFactory.learning.learner import Learner
    from TrainingFactory.models import LoadedModel

SAMPLED = ("grpo", "ppo", "rft")  # learn from episodes that they sample themselves
PAIRED = ("dpo",)


def make_trainable(config: TrainingConfig, loaded: LoadedModel) -> None:
    """Puts a fresh adapter on the model, or opens a loaded one, where adapters are what is trained."""
    from TrainingFactory.learning.lora import add_lora

    lora = config.lora
    if config.model.adapter is not None:
        for name, param in loaded.model.named_parameters():
            param.requires_grad_("lora_" in name)
    elif lora.enabled:
        loaded.model = add_lora(
            loaded.model, lora.r, lora.alpha, lora.dropout, lora.target_modules, seed=config.training.seed
        )


def make_algorithm(config: TrainingConfig) -> Algorithm:
    """The options of an algorithm's section are its arguments."""
    from TrainingFactory.algorithms.grpo import GRPO
    from TrainingFactory.algorithms.sft import SFT

    name = config.training.algorithm
    makers: dict[str, Any] = {"sft": SFT, "grpo": GRPO}
    if name not in makers:
        raise ValueError(f"training.algorithm {name} is not there yet; {', '.join(makers)} are")
    taken = {field.name for field in fields(makers[name])}
    return makers[name](**getattr(config, name).model_dump(include=taken))


def make_learner(
    config: TrainingConfig, loaded: LoadedModel, algorithm: Algorithm, sampler: Sampler | None, steps: int
) -> Learner:
    """`steps` are those of the training loop; each may have several of the optimiser."""
    from TrainingFactory.learning.heads import head_for
    from TrainingFactory.learning.learner import Learner
    from TrainingFactory.learning.optim import OptimizerOptions

    options, name = config.training, config.training.algorithm
    adapted = config.lora.enabled or config.model.adapter is not None
    separate = name == "ppo" and config.ppo.critic == "separate"
    critic: Any = deepcopy(loaded.model) if separate else None
    headed = bool(algorithm.needs & {"values", "scores"})
    updates = options.update_epochs * options.minibatches
    return Learner(
        loaded.model,
        OptimizerOptions(
            options.optimizer,
            options.learning_rate,
            options.weight_decay,
            critic_learning_rate=config.ppo.critic_learning_rate,
            schedule=options.schedule,
            warmup_steps=options.warmup_steps * updates,
            total_steps=steps * updates,
            max_grad_norm=options.max_grad_norm,
        ),
        sampler=sampler,
        reference=deepcopy(loaded.model) if "reference" in algorithm.needs and not adapted else None,
        head=head_for(loaded.model) if headed else None,
        critic=critic,
        temperature=config.sampling.temperature if name in SAMPLED else 1.0,
        gradient_checkpointing=options.gradient_checkpointing,
    )
