"""What docs/REGISTRY.md prints runs as printed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.docs import ROOT, Page
from TrainingFactory.evaluation.gate import Gate, Guard
from TrainingFactory.evaluation.suites import load_suite

PAGE = Page("docs/REGISTRY.md")


def test_the_suite_and_the_keys(tmp_path: Path) -> None:
    [suite] = [text for text in PAGE.of("yaml") if "gate:" in text]
    (tmp_path / "release.yaml").write_text(suite)
    gate = load_suite(str(tmp_path / "release.yaml"))[0].gate
    assert gate is not None and gate.min_difference == -0.02 and len(gate.guards) == 3
    assert all(
        f"{key}:" in suite or f"`{key}`" in PAGE.text for model in (Gate, Guard) for key in model.model_fields
    )


@pytest.mark.slow
def test_the_walk(tmp_path: Path) -> None:
    """The blocks of the walk in one shell, where `tfactory` is this package."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    command = tmp_path / "bin" / "tfactory"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m TrainingFactory.cli "$@"\n')
    command.chmod(0o755)
    (tmp_path / "walk.sh").write_text(
        "set -e\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + "".join(PAGE.of("bash"))
    )
    path = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "no_proxy": "*"}
    done = subprocess.run(
        ["bash", "walk.sh"], cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    told = [
        "agent:1 is agent@champion now",
        "agent:2 is agent@champion now",
        "agent:3 is refused as agent@champion",
    ]
    told += [
        "agent:3 stays out",
        '"object": "chat.completion"',
        "agent@champion is agent:1 again; it was agent:2",
    ]
    places = [done.stdout.index(text) for text in told]
    assert places == sorted(places)
    assert "Promoted" in (tmp_path / "promotion.html").read_text()
