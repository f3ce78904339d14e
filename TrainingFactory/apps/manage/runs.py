"""Deletion and renaming of runs, with a check whether other runs or registered models need their files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from TrainingFactory.data.disk import read_small_file, remove_folder, sync
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.registry.lineage import list_ancestors
from TrainingFactory.runs.folder import ENVIRONMENT, RunFolder, check_run_name, list_runs

LABELS_FOLDER = "labels"  # folder beside the runs: gold labels by run name, see docs/JUDGES.md


@dataclass(slots=True)
class RunReferences:
    """References to a run by other runs and registered models. Those in `needed_by` break without the run's files;
    those in `copies` do not."""

    needed_by: list[str] = field(default_factory=list)  # such as: run rl loads checkpoints/step-000040
    copies: list[str] = field(default_factory=list)  # such as: agent:2 was trained by it
    size: int = 0  # bytes of the run's folder


def find_references(run: RunFolder, runs_folder: Path) -> RunReferences:
    """Return the references to `run` by the runs and registered models of the folder `runs_folder`."""
    references = RunReferences(size=_measure_folder(run.path))
    folder = run.path.resolve()
    for other_run in list_runs(runs_folder):
        if other_run.path.resolve() == folder:
            continue
        used_paths = sorted(
            {str(path.relative_to(folder)) for path in _find_paths(other_run) if path.is_relative_to(folder)}
        )
        if not used_paths:
            continue
        descriptions = ["its recorded tool calls" if name == "." else name for name in used_paths]
        usage_text = f"run {other_run.name} uses {', '.join(descriptions)}"
        (references.copies if _is_complete(other_run) else references.needed_by).append(usage_text)
    for version in Catalogue(get_registry_path(runs_folder)).versions():
        if any(node.get("path") == str(folder) for node in list_ancestors(version.lineage)):
            references.copies.append(f"registered model {version} was trained by it")
    return references


def delete_run(run: RunFolder, runs_folder: Path, force: bool = False) -> RunReferences:
    """Delete a run of the folder `runs_folder`. Raise ValueError if it is running or in use, if it is not directly in
    `runs_folder`, or if another run needs its files and `force` is not set. Return the references to the run."""
    references = _lock_run(run, runs_folder, None if force else "deleted")
    try:
        remove_folder(run.path)
    finally:
        run.unlock()
    return references


def rename_run(run: RunFolder, name: str, runs_folder: Path) -> RunFolder:
    """Rename a run of the folder `runs_folder`, with the labels of its episodes. Raise ValueError like `delete_run`."""
    check_run_name(name)
    new_path = run.path.with_name(name)
    if os.path.lexists(new_path) or os.path.lexists(new_path.with_name(f".{name}.part")):
        raise ValueError(f"{new_path} already exists. Choose another name")
    _lock_run(run, runs_folder, "renamed")
    try:
        os.rename(run.path, new_path)
        labels_file = runs_folder / LABELS_FOLDER / f"{run.name}.jsonl"
        if labels_file.is_file() and not (new_labels_file := labels_file.with_name(f"{name}.jsonl")).exists():
            os.rename(labels_file, new_labels_file)
        sync(new_path.parent)
    finally:
        run.unlock()
    return RunFolder(new_path)


def _lock_run(run: RunFolder, folder: Path, action: str | None) -> RunReferences:
    """Lock a run for a change and return the references to it. Raise ValueError if it must not be changed. With
    `action` None, references do not prevent the change."""
    if run.path.is_symlink() or run.path.resolve().parent != folder.resolve():
        raise ValueError(f"{run.path} is not a folder in {folder}. Name its folder of runs: --runs FOLDER")
    try:
        run.lock()
    except ValueError:
        stop_command = f"tfactory runs stop {run.display_path}"
        raise ValueError(f"run {run.name} is running or in use. Stop it first: {stop_command}") from None
    try:
        references = find_references(run, folder)
        if action and references.needed_by:
            advice = (
                f"Delete those first, or delete it anyway: tfactory runs delete {run.display_path} --force"
            )
            remedy = (
                advice if action == "deleted" else "Set a tag or a note instead: tfactory runs tag --help"
            )
            needed_by = "; ".join(references.needed_by)
            raise ValueError(f"run {run.name} cannot be {action}: {needed_by}. {remedy}")
    except BaseException:
        run.unlock()
        raise
    return references


def _is_complete(run: RunFolder) -> bool:
    """Return whether a run no longer needs its initial files, because it is finished and its model is not an adapter on
    top of them."""
    try:
        return run.status.status == "finished" and not run.config.lora.enabled
    except ValueError:  # unreadable: assume that it can be repaired and resumed
        return False


def _find_paths(run: RunFolder) -> Iterator[Path]:
    """Yield the paths in environment.json that a resumed run loads; skip those of its lineage."""
    try:
        run_info = json.loads(read_small_file(run.path / ENVIRONMENT))
    except (OSError, ValueError):
        return
    nodes = [run_info]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            nodes += [child for key, child in node.items() if key != "parent"]
        elif isinstance(node, list):
            nodes += node
        elif isinstance(node, str) and node.startswith(os.sep):
            yield Path(node)


def _measure_folder(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
