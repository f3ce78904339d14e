"""Rewards by a judge model: `reward.type: model_judge`."""

from TrainingFactory.rewards.judge.model_judge import (
    FORMS,
    ModelJudge,
    PairJudge,
    RankingJudge,
    judges_at,
    model_judge,
)

__all__ = ["FORMS", "ModelJudge", "PairJudge", "RankingJudge", "judges_at", "model_judge"]
