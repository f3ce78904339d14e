"""The way to make a registered model again: the configs of the runs that led to it, and the commands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.config import TrainingConfig
from TrainingFactory.services.build.named_files import as_then
from TrainingFactory.services.registry.lineage import Node, chain


def recipe(node: Node, folder: str | Path) -> tuple[dict[str, str], list[str]]:
    """Return the configs by the names of their files in `folder`, and the commands, with comments where a command alone
    cannot do it."""
    configs: dict[str, str] = {}
    commands: list[str] = []
    before = ""
    for number, each in enumerate(chain(node), 1):
        if "config" not in each:
            commands.append(f"# begins with the folder {each['folder']}, which was not trained here")
            before = shlex.quote(str(each["folder"]))
            continue
        about, file = each["about"], f"{number}-{each['run']}.yaml"
        configs[file] = yaml.safe_dump(_options(each), sort_keys=False)
        if about["commit"]:
            commands.append(f"# at commit {about['commit']}")
        if about.get("objects"):
            given = " and ".join(about["objects"])
            commands.append(
                f"# it was started from Python with its own {given}: start it there, with this config"
            )
        more = [f"model.name={before}"] if before else []
        last = each["config"]["training"]["max_steps"] in (None, each["step"])
        more += [] if last else [f"logging.keep_every={each['step']}"]
        name = shlex.quote(f"{each['run']}-again")
        place = shlex.quote(str(Path(folder) / file))
        commands.append(" ".join(["tfactory train", place, "--name", name, *more]))
        before = name if last else f"{name}@step-{each['step']}"
    return configs, commands


def _options(node: Node) -> dict[str, Any]:
    """Return the options of a run that are not as they are by default, with its files where they were."""
    config = as_then(TrainingConfig(**node["config"]), node["about"])
    options = config.model_dump(exclude_defaults=True, exclude={"registry"})
    meant = (node["about"].get("model") or {}).get("meant", {})
    if (node["about"].get("model") or {}).get("parent") is None and meant:
        options["model"] = options.get("model", {}) | meant
    return options


def write_recipe(node: Node, folder: Path) -> list[str]:
    """Write the configs and make.sh into a folder, and return the commands."""
    configs, commands = recipe(node, folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in configs.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "make.sh").write_text("\n".join(["set -e", *commands, ""]), encoding="utf-8")
    return commands
