"""The code interpreter: `source` is the tool, `process` the parent's side, `worker` and `confine` the child's."""

from TrainingFactory.tools.sandbox.process import Isolation
from TrainingFactory.tools.sandbox.source import PythonTool

__all__ = ["Isolation", "PythonTool"]
