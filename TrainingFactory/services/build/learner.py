"""From the options of a config to what learns: the trainable model, the algorithm, the learner."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.not_yet import SAMPLED
from TrainingFactory.protocols import Algorithm, Sampler

if TYPE_CHECKING:
    from TrainingFactory.learning.learner import Learner
    from TrainingFactory.models import LoadedModel


def make_trainable(config: TrainingConfig, loaded: LoadedModel) -> None:
    """Puts a fresh adapter on the model, or opens a loaded one, where adapters are what is trained."""
    from TrainingFactory.learning.lora import add_lora

    lora = config.lora
    if config.model.adapter is not None:
        for name, param in loaded.model.named_parameters():
            param.requires_grad_("lora_" in name)
    elif lora.enabled:
        loaded.model = add_lora(
            loaded.model, lora.r, lora.alpha, lora.dropout, lora.target_modules,
            dora=lora.dora, rslora=lora.rslora, seed=config.training.seed,
        )  # fmt: skip


def make_algorithm(config: TrainingConfig) -> Algorithm:
    """The options of an algorithm's section are its arguments."""
    from TrainingFactory.algorithms.dpo import DPO
    from TrainingFactory.algorithms.grpo import GRPO
    from TrainingFactory.algorithms.kto import KTO
    from TrainingFactory.algorithms.ppo import PPO
    from TrainingFactory.algorithms.reward_model import RewardModel
    from TrainingFactory.algorithms.rft import RFT
    from TrainingFactory.algorithms.sft import SFT

    name = config.training.algorithm
    makers: dict[str, Any] = {
        "sft": SFT, "grpo": GRPO, "ppo": PPO, "rft": RFT, "dpo": DPO, "kto": KTO, "reward_model": RewardModel
    }  # fmt: skip
    return makers[name](**getattr(config, name).model_dump())


def make_learner(
    config: TrainingConfig, loaded: LoadedModel, algorithm: Algorithm, sampler: Sampler | None, steps: int
) -> Learner:
    """`steps` are those of the training loop; each may have several of the optimiser."""
    from TrainingFactory.learning.heads import head_for
    from TrainingFactory.learning.learner import Learner
    from TrainingFactory.learning.optim import OptimizerOptions

    options, name = config.training, config.training.algorithm
    critic = make_critic(loaded.model) if name == "ppo" and config.ppo.critic == "separate" else None
    headed = bool(algorithm.needs & {"values", "scores"})
    updates = options.update_epochs * options.minibatches
    return Learner(
        loaded.model,
        OptimizerOptions(
            options.optimizer,
            options.learning_rate,
            options.weight_decay,
            critic_learning_rate=critic_rate(config) if name == "ppo" else None,
            schedule=options.schedule,
            warmup_steps=options.warmup_steps * updates,
            total_steps=steps * updates,
            max_grad_norm=options.max_grad_norm,
        ),
        sampler=sampler,
        reference=make_reference(config, loaded.model) if "reference" in algorithm.needs else None,
        head=head_for(loaded.model, about_reward_model(config)) if headed else None,
        critic=critic,
        temperature=config.sampling.temperature if name in SAMPLED else 1.0,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def make_reference(config: TrainingConfig, model: Any) -> Any:
    """The model that training starts with: a copy, or none where it is the model under a fresh adapter. What is
    computed before training can be by the model itself."""
    if config.lora.enabled and config.model.adapter is None:
        return None
    return model if precomputes_reference(config) else copy_of(model)


def precomputes_reference(config: TrainingConfig) -> bool:
    return config.training.algorithm == "dpo" and config.dpo.reference == "precomputed"


def about_reward_model(config: TrainingConfig) -> dict[str, Any] | None:
    """What a checkpoint of a reward model says beside its weights; see `learning/reward_models.py`."""
    if config.training.algorithm != "reward_model":
        return None
    model = config.model
    described = model.model_dump(include={"revision", "family", "thinking", "quantization"})
    path = Path(model.name).expanduser()  # it is loaded from elsewhere, too
    base = str(path.resolve()) if path.exists() else model.name
    return {"kind": config.reward_model.kind, "base": base} | described


def copy_of(model: Any) -> Any:
    """The model as it is now. Weights that are not trained, those under an adapter, are the same tensors."""
    return deepcopy(model, {id(weight): weight for weight in model.parameters() if not weight.requires_grad})


def make_critic(model: Any) -> Any:
    critic = copy_of(model)
    output = critic.get_output_embeddings().weight
    if output is not critic.get_input_embeddings().weight:
        output.requires_grad_(False)  # a critic predicts no tokens
    return critic


def critic_rate(config: TrainingConfig) -> float:
    """A critic starts from nothing, and may learn faster than the policy, which only moves a little."""
    return config.ppo.critic_learning_rate or 10 * config.training.learning_rate
