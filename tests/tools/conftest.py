"""Fixtures for the tests of tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.mcp import Started, children
from tests.kits.waiting import wait_until
from TrainingFactory.tools import ToolCache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ToolCache]:
    made = ToolCache(tmp_path / "cache" / "tools.sqlite")
    yield made
    made.close()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def started() -> Iterator[Started]:
    """The processes that the test has started; after it they must be gone."""
    before = children()
    yield lambda: children() - before
    wait_until(lambda: not children() - before, 20)
