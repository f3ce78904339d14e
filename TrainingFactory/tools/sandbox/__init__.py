"""The code interpreter: `python_tool` is the tool; `interpreter` runs in its process, which `confine` and `syscalls`
lock in."""

from TrainingFactory.tools.sandbox.python_tool import Isolation, PythonTool

__all__ = ["Isolation", "PythonTool"]
