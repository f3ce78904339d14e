"""What docs/TEACHERS.md prints is true: its options are those of an endpoint, and its walk runs as printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.kits.cli import Run
from tests.kits.docs import ROOT, Page
from tests.kits.teacher import teaching
from TrainingFactory.common.endpoints.names import EndpointSettings
from TrainingFactory.common.endpoints.transport import KEY_BY_HOST

PAGE = Page("docs/TEACHERS.md")


def test_every_option_of_an_endpoint_is_listed_with_its_default():
    section = PAGE.text.split("\n## Endpoints\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    listed = {
        name: default.strip() for names, default, *_ in rows for name in re.findall(r"^ ?`(\w+)`|, `(\w+)`", names)
        for name in name if name
    }  # fmt: skip
    shown = {"None": "null", "False": "false", "''": '`""`', repr(KEY_BY_HOST): "by host"}
    for option in fields(EndpointSettings):
        default = repr(option.default).strip("'") if option.name == "api" else repr(option.default)
        expected = "needed" if option.name == "model" else shown.get(default, f"`{default}`")
        assert listed[option.name] == expected, option.name


def test_the_sdk_versions_are_those_of_the_captured_requests():
    for file in (ROOT / "tests/fixtures/sdk_requests").iterdir():
        if file.name == "images.json":  # bodies of all three, which have no version
            continue
        version = re.findall(r'"sdk": "([^"]+)"', file.read_text(encoding="utf-8"))
        assert version[0] in PAGE.text


def test_the_commands_of_the_walk_are_valid():
    names = [" ".join(words[:3]) for words in PAGE.commands() if words[0] == "tfactory"]
    for step in ("tfactory data teach", "tfactory compare teacher.yaml", "tfactory registry promote"):
        assert step in names


def test_a_short_walk(tfactory: Run):
    """Teach, SFT, GRPO, compare and promote, with a scripted teacher and a few steps."""
    with teaching() as teacher:
        Path("teacher.yaml").write_text(
            f"model: teacher\nbase_url: {teacher.url}\ninput_price: 1.0\noutput_price: 4.0\n"
        )
        Path("release.yaml").write_text(re.split("END'?\n", PAGE.block("gate:"))[3].replace("100", "4"))
        small = ("training.eval_every=null", "sampling.max_tokens=8")
        for command in (
            ("data", "teach", "search", "--teacher", "teacher.yaml", "--out", "taught", "--tasks", "8"),
            ("train", str(ROOT / "configs/tiny_sft.yaml"), "--name", "student", "data.dataset=taught/rows.jsonl",
             "data.count=null", "training.max_steps=1", "training.batch_size=8", *small),
            ("train", str(ROOT / "configs/tiny_grpo.yaml"), "--name", "pupil", "model.name=runs/student",
             "training.max_steps=1", "training.batch_size=1", "training.group_size=2", *small),
            ("compare", "teacher.yaml", "pupil", "--tasks", "4", "--show", "0"),
            ("registry", "register", "agent", "pupil"),
        ):  # fmt: skip
            status, out, error = tfactory(*command)
            assert status == 0, (command, error)
            if command[0] == "compare":
                assert "teacher.yaml" in out and "0.00" in out
        status, out, _ = tfactory("registry", "promote", "agent:1", "--suite", "release.yaml", "--first")
        assert status == 1 and "tool_success" in out  # one step teaches nothing, and the guard says so


@pytest.mark.slow
def test_the_walk(tmp_path: Path):
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
    for text in ("cost per row", "compared    pupil with teacher.yaml", "agent:1 is agent@champion now"):
        assert text in done.stdout
    assert "agent:2 is agent@champion now" in done.stdout or "agent:2 stays out" in done.stdout
