"""The command line `tfactory`. Commands import heavy packages such as torch only when they run."""

from TrainingFactory.cli.app import main

__all__ = ["main"]
