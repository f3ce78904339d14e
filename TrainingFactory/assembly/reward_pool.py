"""A pool of workers that score episodes with a reward model, a judge or a function."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from TrainingFactory.assembly.reward_types import RewardContext, find_reward_model, make_judge
from TrainingFactory.config import TrainingConfig
from TrainingFactory.rewards import LearnedReward
from TrainingFactory.rewards.judge.judges import Judge
from TrainingFactory.rewards.workers.distributed import RewardWorkerPool

log = logging.getLogger(__name__)


class DistributedRewardModel(RewardWorkerPool):
    """Score episodes in parallel: `await DistributedRewardModel("runs/judge", num_workers=4).compute_rewards(...)`.

    `model` is one of:

    - a trained reward model: a run, a folder, or its name in factories.yaml;
    - any other model, which then judges by a prompt in its own process;
    - a function in a file, such as `rewards.py:score`, or any callable;
    - with `base_url`, the name of a model that an endpoint serves.

    Without `model` the untrained built-in model scores. Further options are those of `RewardWorkerPool`."""

    def __init__(
        self,
        model: Any = None,
        num_workers: int = 4,
        *,
        base_url: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        is_model_name = base_url is None and (model is None or (isinstance(model, str) and ":" not in model))
        scorer = _load_scorer(model) if is_model_name else model
        super().__init__(scorer, num_workers, base_url=base_url, **options)
        if is_model_name and isinstance(scorer, Judge):
            self._owned_models.append(scorer)


def _load_scorer(name: str | None) -> Any:
    """Load the reward model `name`, or a judge if `name` is another kind of model. All workers share it."""
    from TrainingFactory.learning.reward_models import RewardScorer  # torch

    if name is None:
        return _make_untrained_scorer()
    config = TrainingConfig()
    try:
        try:
            checkpoint = find_reward_model(name, config)
        except ValueError:
            model_judge = make_judge(RewardContext(config, load=True), {"judge": {"model": name}})
            log.warning(
                "%s is not a reward model: it is started with the first episode and judges by a prompt", name
            )
            return model_judge
        base_model = checkpoint.name if checkpoint.adapter else None
        return LearnedReward(RewardScorer.load(str(checkpoint.folder), base=base_model))
    except ValueError as error:
        hint = "rewards.py:score names a function; with base_url= the name is that of a model served there"
        raise ValueError(f"{error}\n{hint}") from error


def _make_untrained_scorer() -> LearnedReward:
    from TrainingFactory.learning.heads import make_head
    from TrainingFactory.learning.reward_models import RewardScorer
    from TrainingFactory.models import chat_format, load_model

    log.warning("No model is given: the built-in model scores. Its untrained head gives every episode 0.")
    loaded_model = load_model("builtin:tiny")
    chat = chat_format(loaded_model.tokenizer, stop_ids=loaded_model.stop_ids)
    return LearnedReward(
        RewardScorer(loaded_model.model, make_head(loaded_model.model, None), chat, "outcome")
    )
