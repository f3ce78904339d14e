"""TrainingFactory: turn a tool set and a reward into a trained agent.

The names below are imported on first use, to keep `import TrainingFactory` fast. docs/ARCHITECTURE.md describes the
layers.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TrainingFactory.config import TrainingConfig, load_config
    from TrainingFactory.envs import ToolEnvironment
    from TrainingFactory.tools import MCPTools, tool
    from TrainingFactory.trainers.inputs import (
        DatasetLike,
        EnvironmentLike,
        ModelLike,
        TasksLike,
        ToolLike,
        ToolsLike,
    )
    from TrainingFactory.trainers.trainers import (
        DPOTrainer,
        GRPOTrainer,
        KTOTrainer,
        PPOTrainer,
        RewardModelTrainer,
        RFTTrainer,
        SFTTrainer,
    )
    from TrainingFactory.types import Reward, Task

__version__ = "0.2.0"
__all__ = [
    "DPOTrainer", "DatasetLike", "EnvironmentLike", "GRPOTrainer", "KTOTrainer", "MCPTools", "ModelLike", "PPOTrainer",
    "RFTTrainer", "Reward", "RewardModelTrainer", "SFTTrainer", "Task", "TasksLike", "ToolEnvironment", "ToolLike",
    "ToolsLike", "TrainingConfig", "load_config", "tool",
]  # fmt: skip

_EXPORTS = {
    "config": ["TrainingConfig", "load_config"],
    "envs": ["ToolEnvironment"],
    "tools": ["MCPTools", "tool"],
    "trainers.inputs": ["DatasetLike", "EnvironmentLike", "ModelLike", "TasksLike", "ToolLike", "ToolsLike"],
    "trainers.trainers": [
        "DPOTrainer",
        "GRPOTrainer",
        "KTOTrainer",
        "PPOTrainer",
        "RFTTrainer",
        "RewardModelTrainer",
        "SFTTrainer",
    ],
    "types": ["Reward", "Task"],
}


if "ipykernel" in sys.modules:  # progress bars of other packages would warn in notebooks without ipywidgets
    warnings.filterwarnings("ignore", message="IProgress not found")


def __getattr__(name: str) -> Any:
    for module_path, names in _EXPORTS.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module_path}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
