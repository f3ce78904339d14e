"""`tfactory registry`: versions, aliases and lineage of registered models, promotion and export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Json, RunsFolder

if TYPE_CHECKING:
    from TrainingFactory.evaluation.requests import RecordedEvaluation
    from TrainingFactory.promotion.model_registry import ModelRegistry
    from TrainingFactory.registry.rows import Version

registry = App(name="registry", help="Register, show, promote, verify and export model versions.")
DAMAGED_STATUS = REFUSED_STATUS = 1  # exit status
VersionName = Annotated[
    str, Parameter(name="version", help="agent:3, agent@champion, or agent for the newest.")
]
ModelOverrides = Annotated[
    str, Parameter(help="Config overrides as key=value, such as model.dtype=bfloat16.")
]
RegistryFile = Annotated[
    Path | None, Parameter(name="--registry", help="Registry file. Default: the one in the runs folder.")
]


def _open_registry(path: Path | None, runs_folder: str) -> ModelRegistry:
    # Imported here because it is slow: --help should appear at once.
    from TrainingFactory.promotion.model_registry import ModelRegistry

    return ModelRegistry(path, runs_folder)


@registry.command(name="list")
def list_(*, as_json: Json = False, file: RegistryFile = None, runs_folder: RunsFolder = "runs") -> None:
    """List all versions of all registered models.

    ```
    tfactory registry list
    tfactory registry list --registry /data/registry.sqlite
    ```
    """
    from TrainingFactory.apps.views.registry import list_models

    model_registry = _open_registry(file, runs_folder)
    versions = model_registry.versions()
    if as_json:
        print(list_models(model_registry).model_dump_json())
    elif versions:
        rows = []
        for version in versions:
            row = (str(version), ", ".join(version.aliases), _format_source(version), version.created)
            rows.append((*row, version.digest[:12], version.description))
        show.print_columns(["version", "aliases", "source", "registered", "digest", "description"], rows)
    else:
        show.note(f"no registered models in {model_registry.path}")


@registry.command(name="show")
def show_(
    version: VersionName, *, lineage: bool = False, as_json: Json = False, file: RegistryFile = None,
    runs_folder: RunsFolder = "runs",
) -> None:  # fmt: skip
    """Show a version: files, evaluations and promotion decisions. A model name without a version shows the newest
    version and the decisions of all versions.

    ```
    tfactory registry show agent@champion
    tfactory registry show agent@champion --lineage
    ```

    Args:
        lineage: Also print the lineage: a tree from the base model through every training run.
    """
    from TrainingFactory.apps.views.registry import make_version_view
    from TrainingFactory.registry.card import format_title
    from TrainingFactory.registry.lineage import render_tree

    model_registry = _open_registry(file, runs_folder)
    entry = model_registry.get(version)
    evaluations, decisions = model_registry.evaluations(str(entry)), model_registry.decisions(entry.model)
    if as_json:
        print(make_version_view(model_registry, version).model_dump_json())
        return
    rows = [("version", str(entry)), ("aliases", ", ".join(entry.aliases)), ("source", _format_source(entry))]
    rows += [("registered", f"{entry.created} by {entry.who}"), ("digest", entry.digest)]
    rows += [("files", str(model_registry.get_model_folder(entry)))]
    rows += [("base model", model_registry.get_base_name(entry))] if entry.base else []
    rows += [("description", entry.description)] if entry.description else []
    rows += [("tag", f"{key}={value}") for key, value in entry.tags.items()]
    for evaluation in evaluations:
        if "success" in evaluation.get("metrics", {}):
            result_text = f"{format_title(evaluation)}: success {evaluation['metrics']['success']:.3f}"
            rows.append(("evaluation", result_text))
    for decision in decisions:
        if version == entry.model or entry.number in (decision["number"], decision["was"]):
            rows.append((decision["kind"], _describe_decision(decision)))
    show.print_table([row for row in rows if row[1]])
    if lineage:
        print("\n".join(["", *render_tree(entry.lineage, str(entry))]))


@registry.command
def register(
    name: str, model: Annotated[str, Parameter(name="model-or-run")], /, *, alias: str | None = None,
    description: str = "", tag: Sequence[str] = (), file: RegistryFile = None, runs_folder: RunsFolder = "runs",
) -> None:  # fmt: skip
    """Register a run's model or adapter as the next version of a model. Files are copied, so the run can be deleted.

    ```
    tfactory registry register agent sft
    tfactory registry register agent grpo-1@step-40 --alias champion --tag team=search
    ```

    Args:
        name: Name of the registered model; created if it is new.
        model: Run (its last checkpoint; sft@step-40 selects another), checkpoint, folder with safetensors, or
            registered version.
        alias: Alias to point at the new version.
        description: Free-text description of the version.
        tag: Tag as KEY=VALUE; repeatable.
    """
    model_registry = _open_registry(file, runs_folder)
    version = model_registry.register(name, model, description, _parse_tags(tag))
    if alias is not None:
        model_registry.set_alias(str(version), alias)
    print(f"registered {version}" + (f" as {name}@{alias}" if alias else ""))
    show.note(f"show it: tfactory registry show {version} --lineage; evaluate it: tfactory eval {version}")


@registry.command
def alias(
    version: VersionName,
    name: str,
    *,
    remove: bool = False,
    file: RegistryFile = None,
    runs_folder: RunsFolder = "runs",
) -> None:
    """Point an alias at a version, or remove an alias.

    ```
    tfactory registry alias agent:3 champion
    tfactory registry alias agent champion --remove
    ```

    Args:
        name: Alias, such as champion.
        remove: Remove the alias, whichever version of the model it points at.
    """
    model_registry = _open_registry(file, runs_folder)
    if remove:
        model = model_registry.get(version).model
        print(f"removed {model}@{name}; it was {model}:{model_registry.remove_alias(model, name)}")
        return
    target, previous = model_registry.set_alias(version, name)
    print(f"{target.model}@{name} is {target}" + (f"; it was {target.model}:{previous}" if previous else ""))


@registry.command
def promote(
    version: VersionName, *overrides: ModelOverrides, suite: str, to: str = "champion", first: bool = False,
    html: Path | None = None, as_json: Json = False, file: RegistryFile = None, runs_folder: RunsFolder = "runs",
) -> int:  # fmt: skip
    """Move an alias to a version if the version passes a gate against the alias's present holder.

    Both versions are evaluated on the same tasks with the same random seeds; section `gate:` of the suite defines the
    checks. The registry records the decision with its evidence. Exit status: 0 if promoted, 1 if refused.

    ```
    tfactory registry promote agent:7 --suite release.yaml
    tfactory registry promote agent:7 --to staging --suite release.yaml --html promotion.html
    tfactory registry promote agent:1 --suite release.yaml --first
    ```

    Args:
        suite: YAML file with the suite's entries and its gate.
        to: Alias to move.
        first: Promote although nothing holds the alias yet; only checks that need no other version apply.
        html: Write an HTML page with the decision and every flipped task to this file.
    """
    from TrainingFactory.promotion.promotion import Promotion

    model_registry = _open_registry(file, runs_folder)
    promotion = Promotion(model_registry, version, to, suite, first, overrides, runs_folder, show.note)
    opponent = f" against {promotion.champion}" if promotion.champion else ", the first"
    show.note(f"{promotion.version} for {promotion.target}{opponent}; gate of suite {promotion.suite.name}:")
    for line in promotion.criteria:
        show.note(f"  {line}")
    decision = promotion.run(_run_evaluation)
    status = 0 if decision.promoted else REFUSED_STATUS
    comparison = decision.comparison
    if html is not None:
        from TrainingFactory.apps.reports.comparison_page import make_comparison_page

        comparisons = [comparison] if comparison else []
        show.write_page(html, make_comparison_page(decision.sides, comparisons, decision))
    if as_json:
        decision_row = promotion.registry.decisions(promotion.version.model)[-1]
        print(json.dumps({"promoted": decision.promoted} | decision_row))
        return status
    rows = [("yes" if check.holds else "no", check.name, check.found) for check in decision.checks]
    show.print_columns(["passed", "check", "result"], rows)
    if comparison is not None:
        difference = comparison.difference
        flip_counts = f"{len(comparison.wins)} better, {len(comparison.losses)} worse"
        interval = f"{difference.value:+.3f} (95 % interval {difference.low:+.3f} to {difference.high:+.3f})"
        print(f"all evaluated tasks: {interval}, {flip_counts}, exact McNemar p = {comparison.p_value:.3g}")
    verdict = f"is {promotion.target} now" if decision.promoted else f"is refused as {promotion.target}"
    print(f"{promotion.version} {verdict}: {decision.text}")
    return status


def _run_evaluation(model: str, evaluation: RecordedEvaluation) -> None:
    from TrainingFactory.cli.display import Display

    show.note(f"{model}: {evaluation.request.entry}, up to {show.pluralize(len(evaluation.tasks), 'task')}")
    with Display(evaluation.num_episodes, loads_model=evaluation.loads_model) as display:
        if evaluation.run(display.episode).interrupted:
            raise KeyboardInterrupt


@registry.command
def rollback(
    model: str, *, alias: str = "champion", file: RegistryFile = None, runs_folder: RunsFolder = "runs"
) -> None:
    """Roll an alias back to its previous version.

    ```
    tfactory registry rollback agent
    tfactory registry rollback agent --alias staging
    ```

    Args:
        model: Name of the registered model, or MODEL@ALIAS such as agent@champion.
        alias: Alias to roll back, unless `model` includes one.
    """
    name, _, inline_alias = model.partition("@")
    alias = inline_alias or alias
    new_version, previous = _open_registry(file, runs_folder).rollback(name, alias)
    print(f"{name}@{alias} is {new_version} again" + (f"; it was {name}:{previous}" if previous else ""))


@registry.command
def delete(version: VersionName, *, file: RegistryFile = None, runs_folder: RunsFolder = "runs") -> None:
    """Delete a version that has no alias, with the files that no other version shares. Its number is never reused.

    ```
    tfactory registry delete agent:2
    ```
    """
    if ":" not in version:
        model = version.partition("@")[0]
        raise ValueError(f"{version!r} has no version number. Name the version to delete, such as {model}:2")
    deleted_version, freed_bytes = _open_registry(file, runs_folder).delete(version)
    print(f"deleted {deleted_version}; freed {freed_bytes / 1e6:.1f} MB")


@registry.command
def export(
    version: VersionName, target: str, *, to: Literal["hub", "mlflow"] = "hub", merge: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None, file: RegistryFile = None,
    runs_folder: RunsFolder = "runs",
) -> None:  # fmt: skip
    """Export a version as a Hugging Face model folder with a model card, or to an MLflow model registry.

    ```
    tfactory registry export agent:3 my-model
    tfactory registry export agent@champion sqlite:///mlflow.db --to mlflow
    ```

    Args:
        target: New folder; with --to mlflow the MLflow tracking URI.
        to: Export format.
        merge: Merge the adapter into its base model.
        dtype: Data type of the exported weights, with --to hub. Default: that of the model.
    """
    model_registry = _open_registry(file, runs_folder)
    if to == "mlflow":
        print(f"wrote {version} to {model_registry.export_to_mlflow(version, target, merge)}")
    else:
        exported = model_registry.export(version, target, merge, dtype)
        print(f"wrote {version} with its model card to {exported.path}")
        for note in exported.notes:
            show.note(f"note: {note}")
        show.note(f"publish it: hf upload OWNER/NAME {exported.path}")


@registry.command
def verify(
    version: Annotated[str | None, Parameter(help="Version to verify. Default: all.")] = None,
    *,
    as_json: Json = False,
    file: RegistryFile = None,
    runs_folder: RunsFolder = "runs",
) -> int:
    """Verify the checksums of all registered files and report missing or modified ones. Exit status 1: damaged.

    ```
    tfactory registry verify
    tfactory registry verify agent@champion
    ```
    """
    model_registry = _open_registry(file, runs_folder)
    problems_by_version = model_registry.verify(version)
    num_versions = 1 if version is not None else len(model_registry.versions())
    if as_json:
        print(json.dumps({"versions": num_versions, "damaged": problems_by_version}))
        return DAMAGED_STATUS if problems_by_version else 0
    if not problems_by_version:
        print(f"{show.pluralize(num_versions, 'version')}: all checksums match")
    for version_name, problems in problems_by_version.items():
        for problem in problems:
            show.print_error(f"{version_name}: {problem}")
    return DAMAGED_STATUS if problems_by_version else 0


def _parse_tags(tags: Sequence[str]) -> dict[str, str]:
    pairs = [tag.partition("=") for tag in tags]
    if invalid_tags := [key for key, separator, _ in pairs if not separator or not key]:
        raise ValueError(f"--tag {invalid_tags[0]!r} is not KEY=VALUE")
    return {key: value for key, _, value in pairs}


def _format_source(version: Version) -> str:
    lineage = version.lineage
    if "run" in lineage:
        return f"run {lineage['run']}, step {lineage['step']}"
    return f"folder {lineage['folder']}"


def _describe_decision(row: dict[str, Any]) -> str:
    evidence = row["evidence"] or {}
    if row["kind"] == "refuse":
        candidate = f"{row['model']}:{row['number']} as {row['alias']}"
        return f"{candidate}, {row['created']} by {row['who']}: {evidence['reason']}"
    alias_text = f"{row['model']}@{row['alias']} " if row["alias"] else ""
    version_text = f"version {row['number']}"
    if row["alias"]:
        version_text = f"{row['was'] or 'none'} -> {row['number'] or 'none'}"
    first_check = "".join(f"; {check['name']}: {check['found']}" for check in evidence.get("checks", [])[:1])
    return f"{alias_text}{version_text}, {row['created']} by {row['who']}{first_check}"
