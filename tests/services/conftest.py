"""Runs that many tests look at: whole training runs are few."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.run import brief, train


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `brief` that nothing has disturbed."""
    return train(brief(tmp_path_factory.mktemp("runs")), "whole").run
