"""Models that score dialogues: their trainer, and a pool of workers that ask them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Unpack

from TrainingFactory.config import TrainingConfig
from TrainingFactory.rewards import LearnedReward
from TrainingFactory.rewards.judge.judges import Judge
from TrainingFactory.rewards.workers.distributed import DistributedRewardModel as Pool
from TrainingFactory.services.build.reward_types import Making, judge, reward_model
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

    `model` is a trained reward model (a run or a folder, or its name in factories.yaml), any other model, which then
    judges by a prompt in a process of its own, a function of a file such as `rewards.py:score`, any callable, or with
    `base_url` a model that judges there. The other options are those of `rewards/workers/distributed.py`. Without
    `model` the built-in one scores, which is not trained."""

    def __init__(
        self,
        model: Any = None,
        num_workers: int = 4,
        *,
        base_url: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        named = base_url is None and (model is None or (isinstance(model, str) and ":" not in model))
        reward = _scorer(model) if named else model
        super().__init__(reward, num_workers, base_url=base_url, **options)
        if named and isinstance(reward, Judge):
            self._opened.append(reward)


def _scorer(name: str | None) -> Any:
    """Return the reward model of that name as a reward, or the model as a judge; all workers share what is loaded."""
    from TrainingFactory.learning.reward_models import RewardScorer  # torch

    if name is not None:
        config = TrainingConfig()
        try:
            try:
                found = reward_model(name, config)
            except ValueError:
                made = judge(Making(config, load=True), {"judge": {"model": name}})
                log.warning(
                    "%s is no reward model: it is started with the first episode, and judges by a prompt",
                    name,
                )
                return made
            base = found.name if found.adapter else None
            return LearnedReward(RewardScorer.load(str(found.folder), base=base))
        except ValueError as error:
            more = "rewards.py:score names a function, and with base_url= it is a model that judges there"
            raise ValueError(f"{error}\n{more}") from error
    from TrainingFactory.learning.heads import head_for
    from TrainingFactory.models import chat_format, load_model

    loaded = load_model("builtin:tiny")
    log.warning(
        "no model is given: the built-in one scores, whose head is not trained and says 0 to everything"
    )
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    return LearnedReward(RewardScorer(loaded.model, head_for(loaded.model, None), chat, "outcome"))
