"""The command line: `tfactory`. Nothing heavy is imported before a command needs it."""

from TrainingFactory.cli.app import main

__all__ = ["main"]
