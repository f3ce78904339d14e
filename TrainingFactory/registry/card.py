"""Model cards: lineage, evaluations and licence of a registered version as README.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.common.texts import pluralize
from TrainingFactory.models.names import TINY_ID, resolve_model_name
from TrainingFactory.registry.lineage import get_base, list_ancestors, render_tree
from TrainingFactory.registry.rows import Version

UNKNOWN_LICENCE = "unknown"


def render_card(version: Version, evaluations: Sequence[dict[str, Any]], export_kind: str) -> str:
    """Return a model card with Hugging Face metadata. `export_kind` is "adapter" or the kind of an exported model."""
    origin = get_base(version.lineage).partition(" ")[0]
    licence, licence_source = find_licence(origin)
    front_matter: dict[str, Any] = {"library_name": "peft" if export_kind == "adapter" else "transformers"}
    front_matter |= {"pipeline_tag": "text-generation", "tags": ["training-factory", *version.tags]}
    if licence != UNKNOWN_LICENCE:
        front_matter["license"] = licence
    if (hub_id := resolve_model_name(origin)).count("/") == 1 and not origin.startswith((".", "/", "~")):
        front_matter["base_model"] = hub_id
    lines = ["---", yaml.safe_dump(front_matter, sort_keys=False).strip(), "---", "", f"# {version}", ""]
    lines += [version.description, ""] if version.description else []
    lines += [f"Registered {version.created} by {version.who}; digest `{version.digest}`.", ""]
    lines += [f"Licence of the base model: {licence}{licence_source}.", "", "## Lineage", "", "```"]
    lines += [*render_tree(version.lineage, str(version)), "```", "", "## Evaluations", ""]
    return "\n".join([*lines, *_format_evaluations(version, evaluations), ""])


def find_licence(base_model: str) -> tuple[str, str]:
    """Return the licence that the base model's own card states, and a text that names the source."""
    if resolve_model_name(base_model) == TINY_ID:
        return "apache-2.0", " (built into TrainingFactory)"
    folder = Path(base_model).expanduser()
    readme = folder / "README.md" if folder.is_dir() else _find_cached_readme(resolve_model_name(base_model))
    if readme is not None and readme.is_file():
        text = readme.read_text(encoding="utf-8", errors="replace")
        if front_matter := re.match(r"---\n(.*?)\n---", text, re.DOTALL):
            licence = re.search(r"^license:\s*(\S+)", front_matter[1], re.MULTILINE)
            if licence:
                return licence[1], f" (according to {readme.name} of {base_model})"
    return UNKNOWN_LICENCE, f": see the model card of {base_model}"


def _find_cached_readme(model_name: str) -> Path | None:
    if model_name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    readme_path = try_to_load_from_cache(model_name, "README.md")
    return Path(readme_path) if isinstance(readme_path, str) else None


def _format_evaluations(version: Version, evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the evaluations; if there are none, of the run's last evaluation during training."""
    rows = [
        f"| {format_title(record)} | {_format_interval(record['metrics'])} | {record.get('time', '')} |"
        for record in evaluations
        if "success" in record.get("metrics", {})
    ]
    if not rows:
        metrics = list_ancestors(version.lineage)[-1].get("metrics", {})
        scores = {k.removeprefix("eval/"): value for k, value in metrics.items() if k.startswith("eval/")}
        if "success" in scores:
            rows = [f"| held-out tasks of the run | {_format_interval(scores)} | |"]
    return ["| tasks | success (95 % interval) | time |", "|---|---|---|", *rows] if rows else ["None yet."]


def format_title(record: dict[str, Any]) -> str:
    """Return a title for an evaluation: suite, entry or environment, and number of tasks."""
    conditions = record.get("conditions", {})
    labels = [record.get("suite"), record.get("entry") or conditions.get("environment")]
    count_text = f", {pluralize(conditions['count'], 'task')}" if "count" in conditions else ""
    return (" ".join(str(label) for label in labels if label) or "tasks") + count_text


def _format_interval(metrics: dict[str, float]) -> str:
    text = f"{metrics['success']:.3f}"
    if "success_low" in metrics:
        text += f" ({metrics['success_low']:.3f} to {metrics['success_high']:.3f})"
    return text
