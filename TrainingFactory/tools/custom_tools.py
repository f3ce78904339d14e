"""Built-in tools: `calculator`, and the configurable `PythonTool` (a code interpreter), `SqlTool`, `SearchTool`,
`ModelTool` and `AgentTool`. Their names in a config are calculator, python, sql, search, model and agent."""

from __future__ import annotations

from TrainingFactory.tools.builtin.agent import AgentTool
from TrainingFactory.tools.builtin.calculator import calculator
from TrainingFactory.tools.builtin.model import ModelTool
from TrainingFactory.tools.builtin.search import SearchTool
from TrainingFactory.tools.builtin.sql import SqlTool
from TrainingFactory.tools.sandbox import PythonTool

__all__ = ["AgentTool", "ModelTool", "PythonTool", "SearchTool", "SqlTool", "calculator"]
