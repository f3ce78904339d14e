"""Views of registered models, of comparisons of recorded evaluations, and of judge audits."""

from __future__ import annotations

import shlex
from pathlib import Path

from TrainingFactory.apps.judge_audit.report import AUDITS
from TrainingFactory.apps.views import shapes
from TrainingFactory.apps.views.episodes import episode_view
from TrainingFactory.apps.views.files import read_json, read_last_lines
from TrainingFactory.apps.views.runs import evaluation_row, lineage_rows
from TrainingFactory.evaluation.comparison import (
    ComparedModel,
    StoredRecord,
    compare,
    pair_outcomes,
    success_rate,
)
from TrainingFactory.evaluation.records import all_records
from TrainingFactory.registry.catalogue import Catalogue
from TrainingFactory.registry.rows import Version

MAX_SHOWN_FLIPS = 20  # maximum flipped tasks shown with both episodes
MAX_AUDIT_BYTES = 16 << 20
VERSION_FIELDS = ("model", "number", "created", "who", "description", "digest", "tags")


def runs_option(runs: Path) -> str:
    """Return the `--runs` option that a command needs; empty for the default folder."""
    return "" if runs == Path("runs") else f" --runs {shlex.quote(str(runs))}"


def list_models(catalogue: Catalogue) -> shapes.ModelList:
    rows: dict[str, shapes.ModelRow] = {}
    for version in catalogue.versions():
        row = rows.setdefault(version.model, shapes.ModelRow(name=version.model, versions=[], aliases={}))
        row.versions.append(_version(catalogue, version))
        row.aliases |= dict.fromkeys(version.aliases, version.number)
    return shapes.ModelList(models=list(rows.values()))


def _version(catalogue: Catalogue, version: Version) -> shapes.VersionRow:
    return shapes.VersionRow(
        **{name: getattr(version, name) for name in VERSION_FIELDS},
        version=str(version), aliases=list(version.aliases), run=version.lineage.get("run"),
        step=version.lineage.get("step"), kind="adapter" if version.base else "model",
        base=catalogue.base_name(version) if version.base else None,
        evaluations=[evaluation_row(record) for record in catalogue.evaluations(str(version))],
    )  # fmt: skip


def version_view(catalogue: Catalogue, name: str) -> shapes.VersionView:
    """Return a version by its name (agent:3, agent@champion); raise ValueError if it does not exist."""
    version = catalogue.get(name)
    return shapes.VersionView(
        version=_version(catalogue, version), folder=str(catalogue.folder(version)), commands=[],
        lineage=lineage_rows(version.lineage), decisions=catalogue.decisions(version.model),
    )  # fmt: skip


def comparison_view(first: str, second: str, runs: Path, catalogue: Catalogue) -> shapes.ComparisonView:
    """Compare two models by their recorded evaluations; play nothing. A name is a run, sft@step-40, a version, a model
    or the id of a record, never a path. Use the latest pair of records with the most similar conditions, or all entries
    of a suite; raise ValueError if there is no pair."""
    records = [StoredRecord(*record) for record in all_records(runs)]
    first_records, second_records = (_records_of(name, records, catalogue) for name in (first, second))
    pairs = [(a, b) for a in first_records for b in second_records if a.record.id != b.record.id]
    if not pairs:
        command = f"tfactory compare {first} {second}{runs_option(runs)}"
        raise ValueError(f"no two recorded evaluations of {first} and {second}; run: {command}")
    matching = _similar_pairs(pairs)
    outcomes = [pair_outcomes(a.record, b.record) for a, b in matching]
    first_model, second_model = (
        ComparedModel(name, [pair[side] for pair in matching]) for side, name in enumerate((first, second))
    )
    comparison = compare(first_model, second_model, [float(len(tasks)) for tasks in outcomes])
    suite_note = (
        f"{len(matching)} entries of suite {matching[0][0].record.suite}" if len(matching) > 1 else ""
    )
    comparison.notes += [f"{suite_note}: every task has equal weight"] if suite_note else []
    flips = [*comparison.worse, *comparison.better][:MAX_SHOWN_FLIPS]
    episodes = {flip[:2]: pair for flip, pair in comparison.episodes(flips)}
    tasks = []
    for index, (a, b) in ((index, pair) for index, pairs in enumerate(outcomes) for pair in pairs):
        name = f"{matching[index][0].record.entry}: {a.task}" if suite_note else a.task
        pair = shapes.TaskPair(task=name, first=success_rate(a), second=success_rate(b))
        if pair.first != pair.second:
            pair.flipped = "better" if pair.second > pair.first else "worse"
        pair.episodes = [
            episode and episode_view(episode, 0) for episode in episodes.get((index, a.task), [])
        ]
        tasks.append(pair)
    tasks.sort(key=lambda pair: not pair.flipped)
    return shapes.ComparisonView(tasks=tasks, summary=comparison.as_json())


def _similar_pairs(pairs: list[tuple[StoredRecord, StoredRecord]]) -> list[tuple[StoredRecord, StoredRecord]]:
    """Return the most similar pair of records; for a suite, the pairs of all its entries."""
    records = [(pair, *(each.record for each in pair)) for pair in pairs]
    candidates = [(a.conditions, b.conditions, a.time, b.time, pair, a, b) for pair, a, b in records]
    candidates.sort(key=lambda each: (each[0] == each[1], each[0].tasks == each[1].tasks, *each[2:4]))
    suite, entries = candidates[-1][-1].suite, dict[str | None, tuple[StoredRecord, StoredRecord]]()
    for conditions, others, *_, pair, a, b in candidates:
        if (
            suite
            and (a.suite, a.entry, conditions.tasks) == (suite, b.entry, others.tasks)
            and b.suite == suite
        ):
            entries[a.entry] = pair
    return list(entries.values()) or [candidates[-1][4]]


def _records_of(name: str, records: list[StoredRecord], catalogue: Catalogue) -> list[StoredRecord]:
    version, (run, _, step) = catalogue.find(name), name.partition("@step-")
    ids = {name} if version is None else {record.get("id") for record in catalogue.evaluations(str(version))}
    named_records = [entry for entry in records if entry.record.id in ids or entry.record.model.name == name]
    run_records = [entry for entry in records if entry.record.model.run == run]
    return named_records or [
        entry for entry in run_records if not step or str(entry.record.model.step) == step.lstrip("0")
    ]


def audits(runs: Path) -> shapes.AuditList:
    """Return the audits by `tfactory judge audit`, the oldest first; the last `MAX_AUDIT_BYTES` of a longer file.
    An invalid line gives an entry with its problem."""
    entries, (lines, left_out) = [], read_last_lines(runs / AUDITS, MAX_AUDIT_BYTES)
    for line in lines:
        try:
            entries.append(dict(read_json(line)))
        except (ValueError, TypeError) as error:
            entries.append({"problem": f"a line of {AUDITS} cannot be read: {error}"})
    return shapes.AuditList(audits=entries, left_out=left_out)
