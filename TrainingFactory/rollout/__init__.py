"""Rollouts: single, concurrent and scripted episodes."""

from TrainingFactory.rollout.engine import RolloutEngine
from TrainingFactory.rollout.metrics import rollout_metrics
from TrainingFactory.rollout.scripted import play

__all__ = ["RolloutEngine", "play", "rollout_metrics"]
