"""Rewards by a judge model: `reward.type: model_judge`."""

from TrainingFactory.rewards.judge.model_judge import (
    VERDICT_TYPES,
    ModelJudge,
    PairJudge,
    RankingJudge,
    make_judges,
    model_judge,
)

__all__ = ["VERDICT_TYPES", "ModelJudge", "PairJudge", "RankingJudge", "make_judges", "model_judge"]
