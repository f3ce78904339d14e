"""Models that score dialogues: their trainer, and a pool of workers that ask them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Unpack

from TrainingFactory.config import TrainingConfig
from TrainingFactory.rewards import LearnedReward
from TrainingFactory.rewards.workers.distributed import DistributedRewardModel as Pool
from TrainingFactory.services.build import factories
from TrainingFactory.services.build.reward_types import reward_model
from TrainingFactory.services.keywords import RewardModelKeywords
from TrainingFactory.services.trainers import Trainer

log = logging.getLogger(__name__)


class RewardModelTrainer(Trainer):
    """Learn to score dialogues from pairs in `dataset`, or with `kind="process"` their turns from labels."""

    algorithm = "reward_model"

    def __init__(
        self, model: Any = None, environment: Any = None, **options: Unpack[RewardModelKeywords]
    ) -> None:
        super().__init__(model, environment, **options)


class DistributedRewardModel(Pool):
    """Spreads rewards over workers: `await DistributedRewardModel("runs/judge", num_workers=4).compute_rewards(...)`.

    `model` is a trained reward model (a run or a folder, or its name in factories.yaml), a function of a file such as
    `rewards.py:score`, any callable, or with `base_url` a model that judges there. The other options are those of
    `rewards/workers/distributed.py`. Without `model` the built-in one scores, which is not trained."""

    def __init__(
        self,
        model: Any = None,
        num_workers: int = 4,
        *,
        base_url: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        named = base_url is None and (model is None or (isinstance(model, str) and ":" not in model))
        super().__init__(_scorer(model) if named else model, num_workers, base_url=base_url, **options)


def _scorer(name: str | None) -> LearnedReward:
    """Return the reward model of that name as a reward; all workers share what is loaded once."""
    from TrainingFactory.learning.reward_models import RewardScorer  # torch

    if name is not None:
        try:
            found = reward_model(name, TrainingConfig())
            base = found.name if found.adapter else None
            return LearnedReward(RewardScorer.load(str(found.folder), base=base))
        except ValueError as error:
            last = f"{error}; rewards.py:score names a function, and with base_url= it is a model that judges there"
            raise factories.nowhere("models", name, last) from error
    from TrainingFactory.learning.heads import head_for
    from TrainingFactory.models import chat_format, load_model

    loaded = load_model("builtin:tiny")
    log.warning(
        "no model is given: the built-in one scores, whose head is not trained and says 0 to everything"
    )
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    return LearnedReward(RewardScorer(loaded.model, head_for(loaded.model, None), chat, "outcome"))
