"""TrainingConfig and its loader. Only services, cli and web read a config; lower layers take plain arguments."""

from TrainingFactory.config.loading import load_config
from TrainingFactory.config.problems import ConfigError
from TrainingFactory.config.schema import TrainingConfig

__all__ = ["ConfigError", "TrainingConfig", "load_config"]
