"""Runs and models without any training, and processes that use a registry until they are killed."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.disk import write_checksums
from TrainingFactory.registry.catalogue import Catalogue
from TrainingFactory.resolve.model_names import describe_provenance
from TrainingFactory.runs.folder import RunFolder, Status

ALIASES = ("champion", "staging")


def model_folder(folder: Path, content: str, adapter: bool = False) -> Path:
    """A folder with the files of a model; nothing but loading it would tell that they are not one."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "adapter_" if adapter else ""
    weights = "adapter_model" if adapter else "model"
    (folder / f"{weights}.safetensors").write_text(content)
    (folder / f"{kind}config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def made_run(
    runs: Path, name: str, steps: tuple[int, ...] = (1, 2), adapter: bool = False, **sections: Any
) -> RunFolder:
    """A finished run with checkpoints at these steps, each another model."""
    config = TrainingConfig(**{"environment": "search", "logging": {"output_dir": str(runs)}} | sections)
    about = {"size": 3, "digest": "d", "files": {}, "model": describe_provenance(config)}
    run = RunFolder.create(config, name, about, max(steps))
    for step in steps:
        folder = model_folder(run.checkpoint_folder(step), f"{name} {step}", adapter)
        (folder / "learner").mkdir()
        (folder / "learner" / "state.safetensors").write_text("state of training")
        (folder / "state.json").write_text(json.dumps({"step": step}))
        write_checksums(folder)
        run.append("metrics.jsonl", {"step": step, "eval/success": step / 4, "tools/search/calls": 1.0})
    run.write_status(Status("finished", max(steps), max(steps)))
    run.unlock()
    return run


def operations(path: Path, log: Path, number: int, count: int) -> None:
    """Use the registry until so many operations are in the log: each is written down before it is begun (`?`), and
    again when it is done (`!`), so that of a process that was killed at most the last one is in doubt."""
    catalogue, model = Catalogue(path), f"own-{number}"
    lines = log.read_text().splitlines() if log.exists() else []
    done = sum(line.startswith("!") for line in lines)
    rng = random.Random(f"{number} {len(lines)}")
    with log.open("ab", buffering=0) as file:
        while done < count:
            there = [version.number for version in catalogue.versions(model)]
            kind = rng.choice(["add", "add", "alias", "alias", "rollback", "delete", "measure", "shared"])
            at, alias, content = rng.choice(there or [0]), rng.choice(ALIASES), rng.choice("abcd")
            given = {"kind": kind, "number": at, "alias": alias, "content": content}
            file.write(f"?{json.dumps(given)}\n".encode())
            try:
                _operate(catalogue, model, path.parent / content, given)
                told = ""
            except ValueError as error:
                told = str(error)
            file.write(f"!{json.dumps(given | {'refused': told})}\n".encode())
            done += 1


def _operate(catalogue: Catalogue, model: str, folder: Path, given: dict[str, Any]) -> None:
    name = f"{model}:{given['number']}"
    if given["kind"] == "add":
        catalogue.add(model, folder, {"folder": given["content"]})
    elif given["kind"] == "alias":
        catalogue.set_alias(name, given["alias"])
    elif given["kind"] == "rollback":
        catalogue.rollback(model, given["alias"])
    elif given["kind"] == "delete":
        catalogue.delete(name)
    elif given["kind"] == "measure":
        catalogue.add_evaluation(name, {"metrics": {"success": 1.0}})
    else:
        catalogue.add("shared", folder, {"folder": given["content"]}, tags={"by": f"{model} {os.getpid()}"})


def replayed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a process's own model must be after these operations, computed apart from the registry."""
    versions: dict[int, str] = {}
    aliases: dict[str, int] = {}
    past: dict[str, list[int]] = {alias: [] for alias in ALIASES}
    newest, shared = 0, 0
    for row in rows:
        kind, number, alias = row["kind"], row["number"], row["alias"]
        if kind == "add":
            newest += 1
            versions[newest] = row["content"]
        elif kind == "shared":
            shared += 1
        elif kind == "rollback":
            found = [each for each in past[alias] if each in versions and each != aliases.get(alias)]
            if found:
                del past[alias][len(past[alias]) - past[alias][::-1].index(found[-1]) :]
                aliases[alias] = found[-1]
        elif number in versions and kind == "alias":
            aliases[alias] = number
            past[alias].append(number)
        elif number in versions and kind == "delete" and number not in aliases.values():
            del versions[number]
    return {"versions": versions, "aliases": aliases, "shared": shared}
