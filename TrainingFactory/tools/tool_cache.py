"""The cache of tool results: the face of `tools/cache/`."""

from TrainingFactory.tools.cache.cache import ToolCache

__all__ = ["ToolCache"]
