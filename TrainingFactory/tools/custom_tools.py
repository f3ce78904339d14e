"""Tools that come with the package: `calculator`, and those that take options: `PythonTool` (a code interpreter),
`SqlTool`, `SearchTool`, `ModelTool` and `AgentTool`. In a config they go by python, sql, search, model, agent."""

from __future__ import annotations

from TrainingFactory.tools.builtin.agent import AgentTool
from TrainingFactory.tools.builtin.calculator import calculator
from TrainingFactory.tools.builtin.model import ModelTool
from TrainingFactory.tools.builtin.search import SearchTool
from TrainingFactory.tools.builtin.sql import SqlTool
from TrainingFactory.tools.sandbox import PythonTool

__all__ = ["AgentTool", "ModelTool", "PythonTool", "SearchTool", "SqlTool", "calculator"]
