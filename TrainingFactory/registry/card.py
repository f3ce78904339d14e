"""The page that goes with a model: where it comes from, how it was measured, whose licence it carries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.models.names import BUILTIN, resolve
from TrainingFactory.registry.lineage import chain, origin, tree
from TrainingFactory.registry.rows import Version

UNKNOWN = "unknown"


def card(version: Version, evaluations: Sequence[dict[str, Any]], kind: str) -> str:
    """Return the README.md of a model in the layout of the Hugging Face hub."""
    base = origin(version.lineage).partition(" ")[0]
    licence, source = licence_of(base)
    head: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers"}
    head |= {"pipeline_tag": "text-generation", "tags": ["training-factory", *version.tags]}
    if licence != UNKNOWN:
        head["license"] = licence
    if (hub := resolve(base)).count("/") == 1 and not base.startswith((".", "/", "~")):
        head["base_model"] = hub
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {version}", ""]
    lines += [version.description, ""] if version.description else []
    lines += [f"Registered {version.created} by {version.who}; digest `{version.digest}`.", ""]
    lines += [f"Licence of the base model: {licence}{source}.", "", "## Where it comes from", "", "```"]
    lines += [*tree(version.lineage, str(version)), "```", "", "## How it was measured", ""]
    return "\n".join([*lines, *_table(version, evaluations), ""])


def licence_of(base: str) -> tuple[str, str]:
    """Return the licence of a base model as far as its own page tells, and where it was read."""
    if resolve(base) == BUILTIN:
        return "apache-2.0", " (made by TrainingFactory itself)"
    folder = Path(base).expanduser()
    page = folder / "README.md" if folder.is_dir() else _cached_page(resolve(base))
    if page is not None and page.is_file():
        text = page.read_text(encoding="utf-8", errors="replace")
        if head := re.match(r"---\n(.*?)\n---", text, re.DOTALL):
            found = re.search(r"^license:\s*(\S+)", head[1], re.MULTILINE)
            if found:
                return found[1], f" (says {page.name} of {base})"
    return UNKNOWN, f": look at the page of {base}"


def _cached_page(name: str) -> Path | None:
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "README.md")
    return Path(found) if isinstance(found, str) else None


def _table(version: Version, evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the evaluations, and before there are any what the run measured on its way."""
    rows = [
        f"| {what_of(each)} | {_interval(each['metrics'])} | {each.get('time', '')} |"
        for each in evaluations
        if "success" in each.get("metrics", {})
    ]
    if not rows:
        measured = chain(version.lineage)[-1].get("metrics", {})
        found = {
            key.removeprefix("eval/"): value for key, value in measured.items() if key.startswith("eval/")
        }
        rows = [f"| held-out tasks of the run | {_interval(found)} | |"] if "success" in found else []
    return ["| tasks | success (95 % interval) | when |", "|---|---|---|", *rows] if rows else ["Not yet."]


def what_of(record: dict[str, Any]) -> str:
    """Say in words what an evaluation was on."""
    asked = record.get("conditions", {})
    named = [record.get("suite"), record.get("entry") or asked.get("environment")]
    count = f", {asked['count']} tasks" if "count" in asked else ""
    return (" ".join(str(each) for each in named if each) or "tasks") + count


def _interval(metrics: dict[str, float]) -> str:
    text = f"{metrics['success']:.3f}"
    if "success_low" in metrics:
        text += f" ({metrics['success_low']:.3f} to {metrics['success_high']:.3f})"
    return text
