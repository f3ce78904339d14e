"""Task folders in both formats, a real podman with an image of busybox, and a fake runtime that records its calls."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

IMAGE = "localhost/tfactory-busybox:1"
DOCKERFILE = f"FROM {IMAGE}\nWORKDIR /app\nRUN echo 41 > number\n"
INSTRUCTION = "Add one to the number in the file number."
SOLUTION = "echo 42 > number\n"
CHECK = '[ "$(cat /app/number)" = 42 ]'


def write_harbor_task(folder: Path, toml: str = "", test: str | None = None) -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "solution").mkdir()
    (folder / "task.toml").write_text(toml or 'schema_version = "1.4"\n\n[verifier]\ntimeout_sec = 30.0\n')
    (folder / "instruction.md").write_text(f"{INSTRUCTION}\n")
    (folder / "environment" / "Dockerfile").write_text(DOCKERFILE)
    (folder / "solution" / "solve.sh").write_text(SOLUTION)
    score = f"if {CHECK}; then score=1.0; else score=0.25; fi\n"
    report = 'echo "{\\"reward\\": $score, \\"checked\\": 1}" > /logs/verifier/reward.json\n'
    (folder / "tests" / "test.sh").write_text(test or f"{score}{report}")
    return folder


def write_terminal_bench_task(folder: Path, yaml: str = "", compose: str = "") -> Path:
    (folder / "tests").mkdir(parents=True)
    text = f"instruction: |-\n  {INSTRUCTION}\ndifficulty: easy\nparser_name: pytest\nmax_test_timeout_sec: 30.0\n"
    (folder / "task.yaml").write_text(yaml or text)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    client = "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n"
    (folder / "docker-compose.yaml").write_text(compose or client)
    (folder / "solution.sh").write_text(SOLUTION)
    (folder / "run-tests.sh").write_text("sh $TEST_DIR/check.sh\n")
    (folder / "tests" / "check.sh").write_text(f"{CHECK}\n")
    return folder


PROGRAMS = ("podman", "runc", "busybox")
RUN = ("run", "--rm", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")


class NoContainers(Exception):
    """Why containers cannot be started here."""


def podman(folder: Path) -> str:
    """Return `start_podman`; skip the test if containers do not start here."""
    try:
        return start_podman(folder)
    except NoContainers as error:
        pytest.skip(str(error))


def start_podman(folder: Path) -> str:
    """Return the command of a podman with storage of its own and an image of busybox."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise NoContainers(f"{program} is not installed: apt install podman runc busybox-static")
    command = ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "--storage-driver", "vfs"]
    command += ["--runtime", "runc"]
    archive = folder / "busybox.tar"
    _write_image(folder / "image", archive)
    for arguments in (["import", str(archive), IMAGE], [*RUN, IMAGE, "true"]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise NoContainers(f"podman starts no container here: {done.stderr.strip()[-300:]}")
    return " ".join(command)


def _write_image(folder: Path, archive: Path) -> None:
    for name in ("bin", "tmp", "etc", "proc", "sys", "dev"):
        (folder / name).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    program = shutil.which("busybox")
    assert program is not None
    shutil.copy(program, folder / "bin" / "busybox")
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in listed:
        if applet != "busybox":
            (folder / "bin" / applet).symlink_to("busybox")
    with tarfile.open(archive, "w") as tar:
        tar.add(folder, arcname=".", filter=_owned_by_root)


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry


FAKE = """#!/bin/sh
# Answers each subcommand with the files status and output of its folder; writes down its arguments.
folder=$(dirname "$0")
printf '%s\\0' "$@" >> "$folder/calls"
printf '\\n\\0' >> "$folder/calls"
[ -f "$folder/$1.output" ] && cat "$folder/$1.output"
[ -f "$folder/$1.status" ] && exit "$(cat "$folder/$1.status")"
exit 0
"""


class FakeRuntime:
    """A program in place of podman. It starts no containers: it records its calls, and answers as told."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.command = folder, str(folder / "runtime")
        (folder / "runtime").write_text(FAKE)
        (folder / "runtime").chmod(0o755)
        self.answer("inspect", '"/app"\n')

    def answer(self, subcommand: str, output: str = "", status: int = 0) -> None:
        (self.folder / f"{subcommand}.output").write_text(output)
        (self.folder / f"{subcommand}.status").write_text(str(status))

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        text = path.read_text() if path.exists() else ""
        calls: list[list[str]] = [[]]
        for part in text.split("\0"):
            calls.append([]) if part == "\n" else calls[-1].append(part)
        return [call for call in calls if call not in ([], [""])]


def options(folder: Path, runtime: str, **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps({"tasks": str(folder), "runtime": runtime} | more))
