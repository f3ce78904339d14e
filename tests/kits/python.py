"""What the tests of the code interpreter share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.tools import play
from TrainingFactory.tools.sandbox import PythonTool
from TrainingFactory.types import ToolCall, ToolResult

HANG_GUARD = 30.0  # seconds; nothing here takes long


def make(**options: Any) -> PythonTool:
    options.setdefault("timeout", HANG_GUARD)
    try:
        return PythonTool(**options)
    except ValueError as error:
        pytest.skip(f"no isolation on this machine: {error}")


def run(tool: PythonTool, *codes: str) -> list[ToolResult]:
    """One episode."""
    return play([tool], *(ToolCall("python", {"code": code}) for code in codes))


def texts(tool: PythonTool, *codes: str) -> list[str]:
    return [result.content for result in run(tool, *codes)]
