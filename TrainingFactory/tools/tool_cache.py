"""The cache of tool results: the public interface of `tools/cache/`."""

from TrainingFactory.tools.cache.cache import ToolCache

__all__ = ["ToolCache"]
