"""What a config can say and a training run cannot do, told before anything is loaded."""

from __future__ import annotations

import math
import os

from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.examples import NEEDS
from TrainingFactory.services.assemble import reward_model_folder
from TrainingFactory.services.assemble_learner import SAMPLED, make_algorithm
from TrainingFactory.services.gathering import form_of
from TrainingFactory.services.tracking import check_trackers
from TrainingFactory.types import SamplingParams


def check(config: TrainingConfig, recorded: bool) -> None:
    """`recorded`: the rows that are learned from exist already."""
    training, sampling = config.training, config.sampling
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            "several processes were started (WORLD_SIZE is set), but a run is one process for now; start it plainly"
        )
    if training.algorithm == "grpo" and training.group_size < 2:
        raise ValueError(
            "training.group_size is 1, but grpo compares the episodes of a group with each other: "
            "it needs 2 or more (8 is usual)"
        )
    if training.algorithm == "ppo" and config.ppo.critic_warmup >= (training.max_steps or math.inf):
        raise ValueError(
            f"ppo.critic_warmup is {config.ppo.critic_warmup} of training.max_steps {training.max_steps}: "
            "the policy would never learn; make the first smaller"
        )
    if training.algorithm == "kto" and training.batch_size < 2:
        raise ValueError(
            "training.batch_size is 1, but kto measures its examples against the others of the batch: it needs 2 or "
            "more (16 is usual)"
        )
    if training.algorithm in SAMPLED:
        if training.batch_size % training.minibatches:
            raise ValueError(
                f"training.minibatches is {training.minibatches}, which does not divide training.batch_size "
                f"{training.batch_size}; choose a divisor of it"
            )
        if sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: all episodes of a task would be the same; train at 1"
            )
        if not SamplingParams(top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p).full_softmax:
            raise ValueError(
                "sampling.top_p, top_k and min_p are for evaluation: training needs log-probs of the full "
                "softmax; leave them out of a training config"
            )
    if recorded and training.algorithm in SAMPLED:
        raise ValueError(
            f"data.dataset is for sft, dpo, kto and reward_model; {training.algorithm} learns from episodes that it "
            "samples in an environment"
        )
    if not recorded and training.algorithm not in (*SAMPLED, "sft"):
        raise ValueError(
            f"training.algorithm={training.algorithm} learns from rows that exist: data.dataset=FILE, with "
            f"{NEEDS[form_of(config)]}; or with recorded trajectories"
        )
    _check_precision(config)
    reward_model_folder(config)
    make_algorithm(config)  # its options may contradict each other
    check_trackers(config.logging.trackers)


def _check_precision(config: TrainingConfig) -> None:
    """Weights and optimiser states in few bits."""
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
