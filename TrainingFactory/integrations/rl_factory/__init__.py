"""Environments that are written for RL-Factory, and its launch scripts: docs/RL_FACTORY.md."""

from TrainingFactory.integrations.rl_factory.env import Env, MMEnv

__all__ = ["Env", "MMEnv"]
