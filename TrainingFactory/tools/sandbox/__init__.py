"""The code interpreter: `python_tool` is the tool, `process` one interpreter seen from the trainer; `interpreter` runs
in the process, and `confine` and `syscalls` lock it in."""

from TrainingFactory.tools.sandbox.process import Isolation
from TrainingFactory.tools.sandbox.python_tool import PythonTool

__all__ = ["Isolation", "PythonTool"]
