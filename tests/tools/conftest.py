"""Fixtures for the tests of tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from TrainingFactory.tools import ToolCache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ToolCache]:
    made = ToolCache(tmp_path / "cache" / "tools.sqlite")
    yield made
    made.close()
