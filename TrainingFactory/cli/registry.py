"""`tfactory registry`: models with versions and aliases, where they come from, and the way out to other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Json, Where

if TYPE_CHECKING:
    from TrainingFactory.evaluation.requests import RecordedEvaluation
    from TrainingFactory.promotion.model_registry import ModelRegistry
    from TrainingFactory.registry.rows import Version

registry = App(
    name="registry", help="Register models: versions, aliases, lineage; promote, verify and export them."
)
DAMAGED = REFUSED = 1  # exit status
Of = Annotated[str, Parameter(name="version", help="As agent:3, agent@champion, or agent for the newest.")]
At = Annotated[
    Path | None, Parameter(name="--registry", help="The registry's file; beside the runs if not given.")
]


def _open(path: Path | None, runs: str) -> ModelRegistry:
    # Imported here, so that help does not wait for it.
    from TrainingFactory.promotion.model_registry import ModelRegistry

    return ModelRegistry(path, runs)


@registry.command(name="list")
def list_(*, as_json: Json = False, at: At = None, where: Where = "runs") -> None:
    """List the registered models with all their versions.

    ```
    tfactory registry list
    tfactory registry list --registry /data/registry.sqlite
    ```
    """
    from TrainingFactory.apps.views.registry import models

    opened = _open(at, where)
    versions = opened.versions()
    if as_json:
        print(models(opened).model_dump_json())
    elif versions:
        rows = [
            (
                str(each),
                ", ".join(each.aliases),
                _origin(each),
                each.created,
                each.digest[:12],
                each.description,
            )
            for each in versions
        ]
        show.columns(["version", "aliases", "made by", "registered", "digest", "description"], rows)
    else:
        show.note(f"there is no registered model in {opened.path}")


@registry.command(name="show")
def show_(
    version: Of, *, lineage: bool = False, as_json: Json = False, at: At = None, where: Where = "runs"
) -> None:
    """Show a version: its files, what was measured and decided (of all versions where the model alone is named); with
    --lineage the way from the base model to it.

    ```
    tfactory registry show agent@champion
    tfactory registry show agent@champion --lineage
    ```

    Args:
        lineage: Print the tree from the base model through every run.
    """
    from TrainingFactory.apps.views.registry import version_view
    from TrainingFactory.registry.card import what_of
    from TrainingFactory.registry.lineage import tree

    opened = _open(at, where)
    found = opened.get(version)
    evaluations, decisions = opened.evaluations(str(found)), opened.decisions(found.model)
    if as_json:
        print(version_view(opened, version).model_dump_json())
        return
    rows = [("version", str(found)), ("aliases", ", ".join(found.aliases)), ("made by", _origin(found))]
    rows += [("registered", f"{found.created} by {found.who}"), ("digest", found.digest)]
    rows += [("files", str(opened.folder(found)))]
    rows += [("over", opened.base_name(found))] if found.base else []
    rows += [("description", found.description)] if found.description else []
    rows += [("tag", f"{key}={value}") for key, value in found.tags.items()]
    for each in evaluations:
        if "success" in each.get("metrics", {}):
            rows.append(("measured", f"{what_of(each)}: success {each['metrics']['success']:.3f}"))
    for each in decisions:
        if version == found.model or found.number in (each["number"], each["was"]):
            rows.append((each["kind"], _decision(each)))
    show.table([row for row in rows if row[1]])
    if lineage:
        print("\n".join(["", *tree(found.lineage, str(found))]))


@registry.command
def register(
    name: str,
    model: Annotated[str, Parameter(name="model-or-run")],
    /,
    *,
    alias: str | None = None,
    description: str = "",
    tag: Sequence[str] = (),
    at: At = None,
    where: Where = "runs",
) -> None:
    """Store what a run has made as the next version of a model. Its files are copied: the run may go.

    ```
    tfactory registry register agent sft
    tfactory registry register agent grpo-1@step-40 --alias champion --tag team=search
    ```

    Args:
        name: The registered model, which is made if it is new.
        model: A run (its last checkpoint is taken, or sft@step-40), a checkpoint, a folder with safetensors,
            or a registered version.
        alias: An alias to give to the new version.
        description: What to know about it.
        tag: KEY=VALUE; may be given several times.
    """
    opened = _open(at, where)
    version = opened.register(name, model, description, _tags(tag))
    if alias is not None:
        opened.set_alias(str(version), alias)
    print(f"registered {version}" + (f", which is {name}@{alias}" if alias else ""))
    show.note(f"look at it: tfactory registry show {version} --lineage; use it: tfactory eval {version}")


@registry.command
def alias(version: Of, name: str, *, remove: bool = False, at: At = None, where: Where = "runs") -> None:
    """Let an alias name a version; --remove takes it away from whichever version it names.

    ```
    tfactory registry alias agent:3 champion
    tfactory registry alias agent champion --remove
    ```

    Args:
        name: The alias, such as champion.
        remove: Take the alias away.
    """
    opened = _open(at, where)
    if remove:
        model = opened.get(version).model
        print(f"{model}@{name} is gone; it was {model}:{opened.remove_alias(model, name)}")
        return
    found, was = opened.set_alias(version, name)
    print(f"{found.model}@{name} is {found}" + (f"; it was {found.model}:{was}" if was else ""))


@registry.command
def promote(
    version: Of,
    *overrides: Annotated[str, Parameter(help="Options of the model, as key=value: model.dtype=bfloat16")],
    suite: str,
    to: str = "champion",
    first: bool = False,
    html: Path | None = None,
    as_json: Json = False,
    at: At = None,
    where: Where = "runs",
) -> int:
    """Give a version an alias if it proves itself against the version that has it: both are asked the same tasks with
    the same random numbers, and the suite's section `gate:` says what must hold. The decision is kept with its
    evidence. The exit status is 0 if it was promoted, and 1 if it was refused.

    ```
    tfactory registry promote agent:7 --suite release.yaml
    tfactory registry promote agent:7 --to staging --suite release.yaml --html promotion.html
    tfactory registry promote agent:1 --suite release.yaml --first
    ```

    Args:
        suite: A YAML file with entries and a gate.
        to: The alias.
        first: There is no such alias yet: promote if the guards hold that need no other version.
        html: Write a page with the decision and every task that flipped to this file.
    """
    from TrainingFactory.promotion.promotion import Promotion

    made = Promotion(_open(at, where), version, to, suite, first, overrides, where, show.note)
    against = f" against {made.champion}" if made.champion else ", the first"
    show.note(f"{made.version} for {made.target}{against}; the gate of suite {made.suite.name}:")
    for line in made.stated:
        show.note(f"  {line}")
    decision = made.run(_play)
    status = 0 if decision.promoted else REFUSED
    if html is not None:
        from TrainingFactory.apps.reports.comparison_page import comparison_page

        found = [decision.comparison] if decision.comparison else []
        show.write_page(html, comparison_page(decision.sides, found, decision))
    if as_json:
        print(json.dumps({"promoted": decision.promoted} | made.registry.decisions(made.version.model)[-1]))
        return status
    rows = [("yes" if each.holds else "no", each.name, each.found) for each in decision.checks]
    show.columns(["holds", "gate", "found"], rows)
    if (found := decision.comparison) is not None:
        change, counts = found.difference, f"{len(found.better)} better, {len(found.worse)} worse"
        interval = f"{change.value:+.3f} (95 % interval {change.low:+.3f} to {change.high:+.3f})"
        print(f"all tasks played: {interval}, {counts}, exact McNemar p = {found.p:.3g}")
    verdict = f"is {made.target} now" if decision.promoted else f"is refused as {made.target}"
    print(f"{made.version} {verdict}: {decision.text}")
    return status


def _play(name: str, evaluation: RecordedEvaluation) -> None:
    from TrainingFactory.cli.display import Display

    show.note(f"{name}: {evaluation.asked.entry}, up to {show.count(len(evaluation.tasks), 'task')}")
    with Display(evaluation.total) as display:
        if evaluation.run(display.episode).interrupted:
            raise KeyboardInterrupt


@registry.command
def rollback(model: str, *, alias: str = "champion", at: At = None, where: Where = "runs") -> None:
    """Give an alias the version back that it had before.

    ```
    tfactory registry rollback agent
    tfactory registry rollback agent --alias staging
    ```

    Args:
        model: The registered model; agent@champion names the alias with it.
        alias: The alias to take back.
    """
    name, _, named = model.partition("@")
    found, was = _open(at, where).rollback(name, named or alias)
    print(f"{name}@{named or alias} is {found} again" + (f"; it was {name}:{was}" if was else ""))


@registry.command
def delete(version: Of, *, at: At = None, where: Where = "runs") -> None:
    """Delete a version that no alias names, with the files that no other version needs. Its number is not used again.

    ```
    tfactory registry delete agent:2
    ```
    """
    if ":" not in version:
        raise ValueError(
            f"say which version of {version.partition('@')[0]} to delete, by its number: agent:2"
        )
    found, freed = _open(at, where).delete(version)
    print(f"deleted {found}; {freed / 1e6:.1f} MB are free again")


@registry.command
def export(
    version: Of,
    target: str,
    *,
    to: Literal["hub", "mlflow"] = "hub",
    merge: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    at: At = None,
    where: Where = "runs",
) -> None:
    """Write a version for others: a folder as on the Hugging Face hub with a model card, or an entry in MLflow.

    ```
    tfactory registry export agent:3 my-model
    tfactory registry export agent@champion sqlite:///mlflow.db --to mlflow
    ```

    Args:
        target: A new folder; with --to mlflow the address of MLflow.
        to: What to write.
        merge: Fold an adapter into the model under it.
        dtype: Number format of the weights, with --to hub; that of the model if none is named.
    """
    opened = _open(at, where)
    if to == "mlflow":
        print(f"wrote {version} to {opened.export_to_mlflow(version, target, merge)}")
    else:
        done = opened.export(version, target, merge, dtype)
        print(f"wrote {version} with its card to {done.path}")
        for text in done.notes:
            show.note(f"note: {text}")
        show.note(f"to publish it: hf upload OWNER/NAME {done.path}")


@registry.command
def verify(
    version: Annotated[str | None, Parameter(help="One version; all if none is named.")] = None,
    *,
    as_json: Json = False,
    at: At = None,
    where: Where = "runs",
) -> int:
    """Read every byte of the registered models, and tell what is missing or changed.

    ```
    tfactory registry verify
    tfactory registry verify agent@champion
    ```
    """
    opened = _open(at, where)
    wrong = opened.verify(version)
    count = 1 if version is not None else len(opened.versions())
    if as_json:
        print(json.dumps({"versions": count, "damaged": wrong}))
    elif not wrong:
        print(f"{show.count(count, 'version')}: every byte is as it was registered")
    for name, texts in {} if as_json else wrong.items():
        for text in texts:
            show.fail(f"{name}: {text}")
    return DAMAGED if wrong else 0


def _tags(given: Sequence[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    if wrong := [key for key, sign, _ in pairs if not sign or not key]:
        raise ValueError(f"--tag is KEY=VALUE (got {wrong[0]!r})")
    return {key: value for key, _, value in pairs}


def _origin(version: Version) -> str:
    made = version.lineage
    return f"run {made['run']}, step {made['step']}" if "run" in made else f"folder {made['folder']}"


def _decision(row: dict[str, Any]) -> str:
    evidence = row["evidence"] or {}
    if row["kind"] == "refuse":
        what = f"{row['model']}:{row['number']} as {row['alias']}"
        return f"{what}, {row['created']} by {row['who']}: {evidence['reason']}"
    alias = f"{row['model']}@{row['alias']} " if row["alias"] else ""
    versions = (
        f"{row['was'] or 'none'} -> {row['number'] or 'none'}" if row["alias"] else f"version {row['number']}"
    )
    proof = "".join(f"; {each['name']}: {each['found']}" for each in evidence.get("checks", [])[:1])
    return f"{alias}{versions}, {row['created']} by {row['who']}{proof}"
