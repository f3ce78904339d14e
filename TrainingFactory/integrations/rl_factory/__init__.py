"""Support for environments and launch scripts written for RL-Factory; see docs/RL_FACTORY.md."""

from TrainingFactory.integrations.rl_factory.env import Env, MMEnv

__all__ = ["Env", "MMEnv"]
