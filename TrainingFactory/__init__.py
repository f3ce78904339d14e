"""TrainingFactory: turn a tool set and a reward into a trained agent.

Imports point strictly down; siblings on one line do not import each other:

    cli, web > integrations > services > cluster > rollout, sampling, learning
    > envs, rewards, algorithms > tools, models, data > catalog, config, workers
    > protocols, openai_form, options, running, seeds > types

The names below are imported on first use: the package itself costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TrainingFactory.config import TrainingConfig, load_config
    from TrainingFactory.envs import ToolEnvironment
    from TrainingFactory.services import (
        DPOTrainer,
        GRPOTrainer,
        KTOTrainer,
        PPOTrainer,
        RewardModelTrainer,
        RFTTrainer,
        SFTTrainer,
    )
    from TrainingFactory.tools import MCPTools, tool
    from TrainingFactory.types import Reward, Task

__version__ = "0.1.0"

_HOMES = {
    "MCPTools": "tools",
    "Reward": "types",
    "Task": "types",
    "ToolEnvironment": "envs",
    "TrainingConfig": "config",
    "load_config": "config",
    "tool": "tools",
}  # the others are in services
__all__ = [
    "DPOTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "MCPTools",
    "PPOTrainer",
    "RFTTrainer",
    "Reward",
    "RewardModelTrainer",
    "SFTTrainer",
    "Task",
    "ToolEnvironment",
    "TrainingConfig",
    "load_config",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'services')}"), name)
