"""The trainable model, the algorithm, the learner and the policy of a config."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.algorithms import kinds
from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.fleet import samples_elsewhere
from TrainingFactory.config import TrainingConfig
from TrainingFactory.protocols import Algorithm, Policy
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.training.tokenized_dataset import ProgressReporter, TokenizedDataset

if TYPE_CHECKING:
    from TrainingFactory.learning.learner import Learner
    from TrainingFactory.learning.policy import LocalPolicy
    from TrainingFactory.learning.processes import Processes
    from TrainingFactory.models import LoadedModel


def make_trainable(config: TrainingConfig, loaded_model: LoadedModel) -> None:
    """Add a new LoRA adapter, or make a loaded adapter trainable, if the config trains an adapter."""
    from TrainingFactory.learning.forward import get_causal_lm
    from TrainingFactory.learning.lora import add_lora
    from TrainingFactory.models.vision import find_tower_modules, find_tower_parameters

    lora = config.lora
    if config.model.adapter is not None:
        for name, param in loaded_model.model.named_parameters():
            param.requires_grad_("lora_" in name)
    elif lora.enabled:
        loaded_model.model = add_lora(
            loaded_model.model, lora.r, lora.alpha, lora.dropout, lora.target_modules,
            dora=lora.dora, rslora=lora.rslora, experts=lora.experts, seed=config.training.seed,
            excluded_modules=[] if loaded_model.vision is None else find_tower_modules(loaded_model.model),
        )  # fmt: skip
    if config.model.train_tower:
        if loaded_model.vision is None:
            raise ValueError("model.train_tower trains the vision part, but the model was loaded without one")
        loaded_model.vision.is_trained = True
        for _, weight in find_tower_parameters(get_causal_lm(loaded_model.model)):
            weight.requires_grad_(True)


def make_algorithm(config: TrainingConfig) -> Algorithm:
    """Make the algorithm, with importance correction if the sampler's weights may differ from the learner's."""
    algorithm, optimization = config.training.algorithm, config.optimization
    options = getattr(config, algorithm).model_dump()
    if (max_weight := compute_importance_cap(config)) is not None:
        from TrainingFactory.algorithms.correction import Correction

        mask_limits = optimization.importance_mask
        mask_range = None if mask_limits is None else (mask_limits[0], mask_limits[1])
        options["correction"] = Correction(
            max_weight, optimization.importance_by, mask_range, optimization.effective_max_staleness > 0
        )
    return kinds.make_algorithm(algorithm, options)


def compute_importance_cap(config: TrainingConfig) -> float | None:
    """Return the largest importance weight of a token. None: no correction, because the learner itself samples."""
    if not KINDS[config.training.algorithm].samples:
        return None
    optimization = config.optimization
    return optimization.importance_cap or (
        2.0 if samples_elsewhere(config) or optimization.effective_max_staleness else None
    )


def make_policy(
    config: TrainingConfig, loaded_model: LoadedModel, algorithm: Algorithm, steps: int, sharded: bool = False
) -> LocalPolicy:
    """Make the policy of this process. `steps` counts training steps, each with one or more updates. With `sharded`,
    every process of torch.distributed calls this and holds a share of the weights."""
    from TrainingFactory.learning.policy import LocalPolicy
    from TrainingFactory.learning.step import StepOptions

    training = config.training
    options = StepOptions(training.token_budget, training.update_epochs, training.minibatches, training.seed)
    learner = make_learner(config, loaded_model, algorithm, steps, sharded)
    return LocalPolicy(learner, algorithm, loaded_model.tokenizer, options)


def make_learner(
    config: TrainingConfig, loaded_model: LoadedModel, algorithm: Algorithm, steps: int, sharded: bool = False
) -> Learner:
    from TrainingFactory.learning.heads import make_head
    from TrainingFactory.learning.learner import Learner
    from TrainingFactory.learning.optim import OptimizerOptions

    training, needs = config.training, algorithm.needs
    updates_per_step = training.update_epochs * training.minibatches
    needs_reference = "reference" in needs and "precomputed" not in needs
    has_new_adapter = config.lora.enabled and config.model.adapter is None  # its base model is the reference
    needs_head = not needs.isdisjoint({"values", "scores"})
    return Learner(
        loaded_model.model,
        OptimizerOptions(
            training.optimizer,
            training.learning_rate,
            training.weight_decay,
            critic_learning_rate=get_critic_learning_rate(config) if "values" in needs else None,
            schedule=training.schedule,
            warmup_steps=training.warmup_steps * updates_per_step,
            total_steps=steps * updates_per_step,
            max_grad_norm=training.max_grad_norm,
        ),
        reference=copy_model(loaded_model.model) if needs_reference and not has_new_adapter else None,
        head=make_head(loaded_model.model, describe_reward_model(config, needs)) if needs_head else None,
        critic=make_critic(loaded_model.model) if "critic" in needs else None,
        temperature=config.sampling.temperature if KINDS[training.algorithm].samples else 1.0,
        gradient_checkpointing=training.gradient_checkpointing,
        activation_offload=training.activation_offload,
        processes=make_processes(config) if sharded else None,
        router_aux_loss=training.router_aux_loss,
        vision=loaded_model.vision,
    )


def make_processes(config: TrainingConfig) -> Processes:
    """Return the object that shards weights with FSDP2 over the processes of torch.distributed."""
    from TrainingFactory.learning.sharding import ShardedProcesses
    from TrainingFactory.models.dtypes import pick_device

    check_sharded(config)
    return ShardedProcesses(pick_device(config.model.device), config.optimization.offload_reference)


def check_sharded(config: TrainingConfig) -> None:
    """Raise ValueError for options that cannot be sharded over several learners."""
    conflict = None
    if config.training.optimizer == "adamw_8bit":
        conflict = "training.optimizer is adamw_8bit", "adamw or muon"
    elif config.model.quantization != "none":
        conflict = f"model.quantization is {config.model.quantization}", "none"
    if conflict is not None:
        option, alternative = conflict
        raise ValueError(
            f"{option}, which cannot be divided among several learners: use {alternative}, or one learner"
        )


def describe_reward_model(config: TrainingConfig, needs: frozenset[str]) -> dict[str, Any] | None:
    """Return the description that a reward model's checkpoint stores; see `learning/reward_models.py`."""
    if "scores" not in needs:
        return None
    model = config.model
    description = model.model_dump(include={"revision", "family", "thinking", "quantization"})
    path = Path(model.name).expanduser()  # absolute, because it is loaded from other folders too
    base_model = str(path.resolve()) if path.exists() else model.name
    return {"kind": config.reward_model.kind, "base": base_model} | description


def copy_model(model: Any) -> Any:
    """Copy a model. Frozen weights, such as those under an adapter, are shared."""
    return deepcopy(model, {id(weight): weight for weight in model.parameters() if not weight.requires_grad})


def make_critic(model: Any) -> Any:
    critic = copy_model(model)
    output_weight = critic.get_output_embeddings().weight
    if output_weight is not critic.get_input_embeddings().weight:
        output_weight.requires_grad_(False)  # a critic predicts no tokens
    return critic


def get_critic_learning_rate(config: TrainingConfig) -> float:
    """Return the critic's learning rate; by default ten times the policy's, because its head starts untrained."""
    return config.ppo.critic_learning_rate or 10 * config.training.learning_rate


async def compute_reference_logprobs(
    policy: Policy, algorithm: Algorithm, dataset: TokenizedDataset, batch_size: int, watcher: Watcher
) -> list[list[list[float]]]:
    """Compute the reference model's log-probs of all rows of each example, so that the run needs no separate reference
    model. Call it before a checkpoint is loaded, because only the untrained policy equals the reference model."""
    watcher.phase("reference")
    logprobs: list[list[list[float]]] = []
    reporter = ProgressReporter(watcher.say, len(dataset))
    for first_index in range(0, len(dataset), batch_size):
        indices = range(first_index, min(first_index + batch_size, len(dataset)))
        groups = [algorithm.samples(dataset.group(index)) for index in indices]
        row_logprobs = iter(await policy.score([row for group in groups for row in group]))
        logprobs += [[next(row_logprobs) for _ in group] for group in groups]
        reporter.report(len(logprobs), "examples have log-probs of the reference model")
    return logprobs
