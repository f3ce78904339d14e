"""The code interpreter: `source` is the tool, `process` the parent's side, `worker` and `confine` the child's."""

from TrainingFactory.tools.interpreter.process import Isolation
from TrainingFactory.tools.interpreter.source import PythonTool

__all__ = ["Isolation", "PythonTool"]
