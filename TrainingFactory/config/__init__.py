"""TrainingConfig and its loader. Read by services, cli and web only; below that, plain arguments."""

from TrainingFactory.config.loading import load_config
from TrainingFactory.config.problems import ConfigError
from TrainingFactory.config.schema import TrainingConfig

__all__ = ["ConfigError", "TrainingConfig", "load_config"]
