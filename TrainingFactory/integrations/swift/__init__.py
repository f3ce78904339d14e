"""ms-swift: its GRPO trainer in our environments, and conversion of its runs to configs and back; see docs/SWIFT.md."""

from pathlib import Path

PLUGIN_FILE = Path(__file__).parent / "plugin.py"  # for --external_plugins
PLUGIN_NAME = "training_factory"  # of our scheduler and our reward in ms-swift
CONFIG_VARIABLE = "TF_CONFIG"
TASK_COLUMN = "tf_task"  # of the dataset: the task as JSON
