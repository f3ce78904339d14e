"""The packages of reasoning-gym and BFCL, which `make servers` installs in a folder of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / ".servers" / "gyms"
needs_gyms = pytest.mark.skipif(
    not FOLDER.with_suffix(".installed").exists(),
    reason="reasoning-gym and bfcl-eval are not installed: make servers",
)


@pytest.fixture(autouse=True)
def gyms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
