"""Where a model comes from: a node for each run on the way, the newest first, as plain data that outlives the runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from TrainingFactory.services.runs.folder import RunFolder

Node = dict[str, Any]


def run_node(run: RunFolder, checkpoint: Path) -> Node:
    """Return what made a checkpoint: its run, with all options, what the run depended on, and its own origin."""
    state = checkpoint / "state.json"
    step = json.loads(state.read_text(encoding="utf-8"))["step"] if state.is_file() else run.status.step
    tools = run.path / "tools.json"
    measured = [row for row in run.metrics() if row.get("step") == step]
    return {
        "run": run.name,
        "path": str(run.path.resolve()),
        "step": step,
        "config": run.config.model_dump(),
        "about": run.about,
        "tools": None if not tools.is_file() else hashlib.sha256(tools.read_bytes()).hexdigest(),
        "metrics": measured[-1] if measured else {},
    }


def parent_of(node: Node) -> Node | None:
    return (node.get("about", {}).get("model") or {}).get("parent")


def chain(node: Node) -> list[Node]:
    """Return the nodes from the base model to this one."""
    found = [node]
    while (parent := parent_of(found[-1])) is not None:
        found.append(parent)
    return found[::-1]
