"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that does a task with a tool now and then; see `tests/warm_kit.py`."""
    from tests.kits.warm import warm_folder  # torch takes seconds, and most tests do without

    return warm_folder(tmp_path_factory)


@pytest.fixture
def judge_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for judges in the environment, and no proxy between them and the loopback."""
    from tests.kits.judge import KEY

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
