"""The sandboxed code interpreter: `python_tool` is the tool, `interpreter` runs the code in its own process, and
`confine` and `syscalls` sandbox that process."""

from TrainingFactory.tools.sandbox.python_tool import Isolation, PythonTool

__all__ = ["Isolation", "PythonTool"]
