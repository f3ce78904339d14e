"""The model registry: versions with their files, aliases, lineage and evaluations.

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

from TrainingFactory.assembly.export import Dtype, ExportedModel, export
from TrainingFactory.promotion.promotion import Decision, Promotion
from TrainingFactory.registry.card import render_card
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.registry.lineage import LineageNode, make_run_node
from TrainingFactory.registry.rows import Version
from TrainingFactory.registry.to_mlflow import upload_to_mlflow
from TrainingFactory.resolve.model_names import ResolvedModel, find_model, with_original_model
from TrainingFactory.runs.folder import RunFolder

EVALUATIONS_FILE = "evaluations.jsonl"  # of a run


class ModelRegistry(Catalogue):
    """A registry that accepts any model name or run. `path` is its file, by default registry.sqlite in `runs`."""

    def __init__(self, path: str | Path | None = None, runs: str | Path = "runs") -> None:
        super().__init__(get_registry_path(runs, path))
        self.runs = Path(runs).expanduser()

    def register(
        self, name: str, model: str | Path, description: str = "", tags: Mapping[str, str] | None = None
    ) -> Version:
        """Store a model as the next version of `name`, with its lineage and evaluations. `model` is a run (its last
        checkpoint), a checkpoint such as `sft@step-40`, a folder, or a registered version."""
        source = find_model(str(model), self.runs, self.path)
        if source.folder is None:
            raise ValueError(
                f"cannot register {model}: its files are not on this machine. Name a run, a checkpoint, or a folder "
                "with safetensors"
            )
        base = base_folder = None
        if source.adapter is not None:
            path = Path(source.name).expanduser()
            base_folder = path if path.is_dir() else None
            revision = None if source.run is None else with_original_model(source.run).model.revision
            base = {"name": str(path.resolve()) if path.exists() else source.name, "revision": revision}
            if source.version is not None and source.version.base is not None:
                base = source.version.base
        lineage = _build_lineage(source)
        evaluations = _read_evaluations(source, lineage)
        return self.add(name, source.folder, lineage, base, base_folder, description, tags, evaluations)

    def promote(self, name: str, alias: str, suite: str, first: bool = False) -> Decision:
        """Point an alias to a version if it passes the suite's gate against the alias's present version."""
        return Promotion(self, name, alias, suite, first, runs=self.runs).run()

    def export(
        self, name: str, folder: str | Path, merge: bool = False, dtype: Dtype | None = None
    ) -> ExportedModel:
        """Write a version in the layout of the Hugging Face hub: its files, lineage.json, and a model card."""
        version = self._get_verified_version(name)
        exported_model = export(str(version), folder, merge, dtype, self.runs, self.path)
        card = render_card(version, self.evaluations(name), exported_model.kind)
        (exported_model.path / "README.md").write_text(card, encoding="utf-8")
        lineage_text = json.dumps(version.lineage, indent=1)
        (exported_model.path / "lineage.json").write_text(lineage_text, encoding="utf-8")
        return exported_model

    def export_to_mlflow(self, name: str, uri: str, merge: bool = False) -> str:
        """Upload a version to MLflow (`uri`: sqlite:///mlflow.db, http://...); return its `models:/` URI."""
        version = self.get(name)
        with TemporaryDirectory(prefix="tfactory-") as folder:
            self.export(name, Path(folder) / "model", merge)
            return upload_to_mlflow(version, Path(folder) / "model", uri, self.evaluations(name))

    def _get_verified_version(self, name: str) -> Version:
        """Return a version; raise ValueError if its files are damaged."""
        version = self.get(name)
        if problems := self.verify(str(version)):
            raise ValueError(f"{version} is damaged: {'; '.join(problems[str(version)])}")
        return version


def _build_lineage(model: ResolvedModel) -> LineageNode:
    assert model.folder is not None
    if model.version is not None:
        return model.version.lineage
    if isinstance(model.run, RunFolder):
        return make_run_node(model.run, model.folder)
    return {"folder": str(model.folder.resolve())}


def _read_evaluations(model: ResolvedModel, lineage: LineageNode) -> list[dict[str, Any]]:
    """Return the evaluation records of a checkpoint from its run."""
    if not isinstance(model.run, RunFolder) or not (path := model.run.path / EVALUATIONS_FILE).is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return [record for record in rows if record.get("model", {}).get("step") == lineage["step"]]
