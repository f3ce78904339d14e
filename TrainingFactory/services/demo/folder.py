"""Whether a demo can begin, and its folder; without anything heavy, so that mistakes are answered at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from TrainingFactory import catalog

ENVIRONMENTS = ("search", "calculator")  # those with a recipe
REPORT = "report.json"


def check(environment: str, seed: int, out: str | Path) -> None:
    if environment not in ENVIRONMENTS:
        catalog.find("environment", environment)  # a typing error is answered with the nearest name
        known = " and ".join(ENVIRONMENTS)
        raise ValueError(f"the demo has no recipe for environment {environment!r}; it has for {known}")
    if seed < 0:
        raise ValueError(f"the seed is {seed}; it must be 0 or more")
    claim(Path(out).expanduser(), {"environment": environment, "seed": seed})


def claim(out: Path, about: dict[str, Any]) -> None:
    """Makes the folder and begins its report, which also marks it as one that a demo may write over."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; the demo needs a folder, such as runs/demo")
    try:
        if out.is_dir() and any(out.iterdir()) and not _is_demo(out):
            raise ValueError(f"{out} has other things in it; name a new folder, or that of an earlier demo")
        out.mkdir(parents=True, exist_ok=True)
        write_aside(out / REPORT, json.dumps(about | {"demo": 1, "finished": False}))
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror}") from error


def _is_demo(out: Path) -> bool:
    try:
        report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(report, dict) and "demo" in report


def write_aside(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(part, path)
