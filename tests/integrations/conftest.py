"""Fixtures for tests of integrations."""

from __future__ import annotations

import pytest

from tests.kits.hello import make_started

started = pytest.fixture(scope="session")(make_started)
