"""Lineage of a model: one node per training run, newest first, as plain data that remains when the runs are deleted."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder
from TrainingFactory.tools.recording import SPECS_FILE

LineageNode = dict[str, Any]
RUN_KEYS = {"run", "step", "config", "about", "tools", "metrics"}


def make_run_node(run: RunFolder, checkpoint_folder: Path) -> LineageNode:
    """Return the lineage of a checkpoint: its run with config, environment, tools and metrics. `about` holds the
    lineage of the model that the run started from."""
    file = checkpoint_folder / "state.json"
    step = json.loads(file.read_text(encoding="utf-8"))["step"] if file.is_file() else run.status.step
    step_rows = [row for row in run.metrics() if row.get("step") == step]
    return {
        "run": run.name,
        "path": str(run.path.resolve()),
        "step": step,
        "config": run.config.model_dump(),
        "about": run.run_info,
        "tools": read_tools(run),
        "metrics": step_rows[-1] if step_rows else {},
    }


def read_tools(run: RunFolder) -> dict[str, Any]:
    """Return the names of a run's tools, and a digest of the tool schemas that the model saw."""
    tool_specs, episodes_file = [], run.path / TRAJECTORIES
    if (run.path / SPECS_FILE).is_file():
        tool_specs += json.loads((run.path / SPECS_FILE).read_text(encoding="utf-8"))
    if episodes_file.is_file():
        with episodes_file.open(encoding="utf-8") as file:
            tool_specs += json.loads(file.readline() or "{}").get("tools", [])
    schemas = [json.dumps(spec, sort_keys=True) for spec in tool_specs]
    metric_names = "\n".join(key for row in run.metrics() for key in row)
    called_tools = re.findall(r"^tools/([^/\n]+)/calls$", metric_names, re.M)
    tool_names = {spec.get("function", spec).get("name") for spec in tool_specs} - {None}
    digest = hashlib.sha256("\n".join(sorted(schemas)).encode()).hexdigest() if schemas else None
    return {"names": sorted(tool_names | set(called_tools)), "digest": digest}


def get_parent(node: LineageNode) -> LineageNode | None:
    return (node.get("about", {}).get("model") or {}).get("parent")


def list_ancestors(node: LineageNode) -> list[LineageNode]:
    """Return the nodes from the base model to this one."""
    nodes = [node]
    while (parent := get_parent(nodes[-1])) is not None:
        nodes.append(parent)
    return nodes[::-1]


def get_base(node: LineageNode) -> str:
    """Return the base model of the first run, or the registered folder."""
    oldest_node = list_ancestors(node)[0]
    if "config" not in oldest_node:
        return str(oldest_node["folder"])
    model = oldest_node["config"]["model"]
    return model["name"] + (f" (revision {model['revision']})" if model["revision"] else "")


def describe_node(node: LineageNode) -> tuple[str, list[tuple[str, str]]]:
    """Return a node as text: a title, and (label, value) rows."""
    if "config" not in node:
        return f"the folder {node['folder']}", []
    config, run_info = node["config"], node["about"]
    environment = config["environment"]["environment_id"] or "no environment"
    version_note = f", registered as {node['version']}" if node.get("version") else ""
    title = f"{config['training']['algorithm']} on {environment}: run {node['run']}, step {node['step']}{version_note}"
    commit_note = f", commit {run_info['commit']}" if run_info["commit"] else ""
    data_source = config["data"]["dataset"] or config["data"]["tasks"] or "made by the environment"
    rows = [
        ("started", f"{run_info['started']}{commit_note}, torch {run_info['versions']['torch']}"),
        ("data", f"{data_source}: {run_info.get('size')} tasks or rows, digest {run_info.get('digest')}"),
        ("reward", _describe_reward(config["reward"])),
    ]
    if run_info.get("objects"):
        rows.append(("from Python", ", ".join(run_info["objects"])))
    for name, record in run_info.get("files", {}).items():
        rows.append(("file", name + (f", digest {record['digest']}" if record["digest"] else "")))
    if tool_names := node["tools"]["names"]:
        digest = node["tools"]["digest"]
        rows.append(("tools", ", ".join(tool_names) + (f", digest {digest[:32]}" if digest else "")))
    metrics = [
        f"{name} {value:.4g}" for name, value in node["metrics"].items() if name.startswith("eval/success")
    ]
    return title, rows + ([("measured", ", ".join(metrics))] if metrics else [])


def _describe_reward(section: dict[str, Any]) -> str:
    part_types = {name: part.get("type") for name, part in section["parts"].items()}
    return ", ".join(f"{name}: {part_type}" for name, part_type in part_types.items()) or section["type"]


def render_tree(node: LineageNode, version_name: str) -> list[str]:
    """Return the lines of the tree from the base model to this model, which is shown as `version_name`."""
    lines = [get_base(node)]
    nodes = list_ancestors(node)
    for depth, ancestor in enumerate(nodes):
        title, rows = describe_node(ancestor)
        lines.append(f"{'   ' * depth}└─ {title}")
        lines += [f"{'   ' * (depth + 1)}   {key}: {value}" for key, value in rows]
    return [*lines, f"{'   ' * len(nodes)}└─ {version_name}"]
