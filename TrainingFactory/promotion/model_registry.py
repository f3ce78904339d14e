"""The registry of models: versions with their files, aliases, lineage and evaluations.

registry = ModelRegistry()                      # runs/registry.sqlite
version = registry.register("agent", "sft")     # a run, a checkpoint, a folder
registry.set_alias("agent:1", "champion")
registry.get("agent@champion").lineage
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from TrainingFactory.assembly.export import Dtype, Exported, export
from TrainingFactory.promotion.promotion import Decision, Promotion
from TrainingFactory.registry.card import card
from TrainingFactory.registry.catalogue import Catalogue, registry_path
from TrainingFactory.registry.lineage import Node, run_node
from TrainingFactory.registry.rows import Version
from TrainingFactory.registry.to_mlflow import to_mlflow
from TrainingFactory.resolve.model_names import Named, as_started_from, find_model
from TrainingFactory.runs.folder import RunFolder

EVALUATIONS = "evaluations.jsonl"  # of a run


class ModelRegistry(Catalogue):
    """Takes models by the names that they have everywhere. `path` is its file, by default beside the runs."""

    def __init__(self, path: str | Path | None = None, runs: str | Path = "runs") -> None:
        super().__init__(registry_path(runs, path))
        self.runs = Path(runs).expanduser()

    def register(
        self, name: str, model: str | Path, description: str = "", tags: Mapping[str, str] | None = None
    ) -> Version:
        """Store a model as the next version of `name`, with its lineage and what its run has measured of it: a run's
        last checkpoint, `sft@step-40`, a folder, or a version that is registered already."""
        found = find_model(str(model), self.runs, self.path)
        if found.folder is None:
            raise ValueError(
                f"{model} is not a folder on this machine, and only what is can be registered: a run, a checkpoint, or "
                "a folder with safetensors"
            )
        base = base_folder = None
        if found.adapter is not None:
            under = Path(found.name).expanduser()
            base_folder = under if under.is_dir() else None
            revision = None if found.maker is None else as_started_from(found.maker).model.revision
            base = {"name": str(under.resolve()) if under.exists() else found.name, "revision": revision}
            if found.version is not None and found.version.base is not None:
                base = found.version.base
        lineage = _lineage(found)
        records = _measured(found, lineage)
        return self.add(name, found.folder, lineage, base, base_folder, description, tags, records)

    def promote(self, name: str, alias: str, suite: str, first: bool = False) -> Decision:
        """Give a version an alias if it holds the suite's gate against the version that has it; else refuse."""
        return Promotion(self, name, alias, suite, first, runs=self.runs).run()

    def export(
        self, name: str, folder: str | Path, merge: bool = False, dtype: Dtype | None = None
    ) -> Exported:
        """Write a version in the layout of the Hugging Face hub: its files, lineage.json, and README.md as its card."""
        version = self._whole(name)
        done = export(str(version), folder, merge, dtype, self.runs, self.path)
        page = card(version, self.evaluations(name), done.kind)
        (done.path / "README.md").write_text(page, encoding="utf-8")
        (done.path / "lineage.json").write_text(json.dumps(version.lineage, indent=1), encoding="utf-8")
        return done

    def export_to_mlflow(self, name: str, uri: str, merge: bool = False) -> str:
        """Write a version to the MLflow at an address (sqlite:///mlflow.db, http://...); return its name there."""
        version = self.get(name)
        with TemporaryDirectory(prefix="tfactory-") as folder:
            self.export(name, Path(folder) / "model", merge)
            return to_mlflow(version, Path(folder) / "model", uri, self.evaluations(name))

    def _whole(self, name: str) -> Version:
        """Return a version whose files are as they were registered; raise ValueError where they are not."""
        version = self.get(name)
        if wrong := self.verify(str(version)):
            raise ValueError(f"{version} is damaged: {'; '.join(wrong[str(version)])}")
        return version


def _lineage(found: Named) -> Node:
    assert found.folder is not None
    if found.version is not None:
        return found.version.lineage
    if isinstance(found.maker, RunFolder):
        return run_node(found.maker, found.folder)
    return {"folder": str(found.folder.resolve())}


def _measured(found: Named, lineage: Node) -> list[dict[str, Any]]:
    """Return the records of evaluations of a run's checkpoint that the run has kept."""
    if not isinstance(found.maker, RunFolder) or not (file := found.maker.path / EVALUATIONS).is_file():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return [row for row in rows if row.get("model", {}).get("step") == lineage["step"]]
