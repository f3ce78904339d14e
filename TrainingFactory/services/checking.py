"""What a config can say and a training run cannot do, told before anything is loaded."""

from __future__ import annotations

import os

from TrainingFactory.config import TrainingConfig
from TrainingFactory.services.tracking import check_trackers
from TrainingFactory.types import SamplingParams


def check(config: TrainingConfig, recorded: bool) -> None:
    """`recorded`: the rows that are learned from exist already."""
    training, sampling = config.training, config.sampling
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            "several processes were started (WORLD_SIZE is set), but a run is one process for now; start it plainly"
        )
    if training.algorithm not in ("grpo", "sft"):
        raise ValueError(f"training.algorithm {training.algorithm} is not there yet; grpo and sft are")
    if training.algorithm == "grpo":
        if training.group_size < 2:
            raise ValueError(
                "training.group_size is 1, but grpo compares the episodes of a group with each other: "
                "it needs 2 or more (8 is usual)"
            )
        if sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: all episodes of a group would be the same; train at 1"
            )
        if not SamplingParams(top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p).full_softmax:
            raise ValueError(
                "sampling.top_p, top_k and min_p are for evaluation: training needs log-probs of the full "
                "softmax; leave them out of a training config"
            )
    if recorded and training.algorithm != "sft":
        raise ValueError("data.dataset is for training.algorithm=sft")
    check_trackers(config.logging.trackers)
