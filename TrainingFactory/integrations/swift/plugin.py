"""Registers our scheduler and our reward in ms-swift: `swift rlhf --external_plugins THIS_FILE ...`; see docs/SWIFT.md.

ms-swift imports this file by its path, in workers of its data loader too, so it opens nothing."""

import sys
from pathlib import Path

from swift.rewards import ORM, orms  # pyright: ignore[reportMissingImports]
from swift.rollout import MultiTurnScheduler, multi_turns  # pyright: ignore[reportMissingImports]

from TrainingFactory.integrations.swift import PLUGIN_NAME
from TrainingFactory.integrations.swift.scheduler import EnvironmentScheduler, fill_missing_rewards

# ms-swift puts this folder on sys.path, where our file names would shadow modules of others.
_PLUGIN_FOLDER = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _PLUGIN_FOLDER]


class TrainingFactoryScheduler(EnvironmentScheduler, MultiTurnScheduler):
    """Scheduler that plays the environment of the config in TF_CONFIG."""


class TrainingFactoryReward(ORM):
    """Reward of the config in TF_CONFIG, computed by the scheduler at the end of each episode."""

    def __call__(self, completions, rollout_infos=None, tf_task=None, **columns):
        return fill_missing_rewards(rollout_infos, tf_task)


multi_turns[PLUGIN_NAME] = TrainingFactoryScheduler
orms[PLUGIN_NAME] = TrainingFactoryReward
