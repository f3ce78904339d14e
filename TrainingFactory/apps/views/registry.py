"""Views of registered models, of comparisons of recorded evaluations, and of judge audits."""

from __future__ import annotations

import shlex
from pathlib import Path

from TrainingFactory.apps.judge_audit.report import AUDITS_FILE
from TrainingFactory.apps.views import shapes
from TrainingFactory.apps.views.episodes import make_episode_view
from TrainingFactory.apps.views.files import read_json, read_last_lines
from TrainingFactory.apps.views.runs import make_evaluation_row, make_lineage_rows
from TrainingFactory.evaluation.comparison import ComparedModel, StoredRecord, compare, pair_up, success_rate
from TrainingFactory.evaluation.records import read_all_records
from TrainingFactory.registry.catalogue import Catalogue
from TrainingFactory.registry.rows import Version

MAX_SHOWN_FLIPS = 20  # maximum flipped tasks shown with both episodes
MAX_AUDIT_BYTES = 16 << 20
VERSION_FIELDS = ("model", "number", "created", "who", "description", "digest", "tags")


def format_runs_option(runs_folder: Path) -> str:
    """Return the `--runs` option that a command needs; empty for the default folder."""
    return "" if runs_folder == Path("runs") else f" --runs {shlex.quote(str(runs_folder))}"


def list_models(catalogue: Catalogue) -> shapes.ModelList:
    rows: dict[str, shapes.ModelRow] = {}
    for version in catalogue.versions():
        row = rows.setdefault(version.model, shapes.ModelRow(name=version.model, versions=[], aliases={}))
        row.versions.append(_make_version_row(catalogue, version))
        row.aliases |= dict.fromkeys(version.aliases, version.number)
    return shapes.ModelList(models=list(rows.values()))


def _make_version_row(catalogue: Catalogue, version: Version) -> shapes.VersionRow:
    return shapes.VersionRow(
        **{name: getattr(version, name) for name in VERSION_FIELDS},
        version=str(version), aliases=list(version.aliases), run=version.lineage.get("run"),
        step=version.lineage.get("step"), kind="adapter" if version.base else "model",
        base=catalogue.get_base_name(version) if version.base else None,
        evaluations=[make_evaluation_row(record) for record in catalogue.evaluations(str(version))],
    )  # fmt: skip


def make_version_view(catalogue: Catalogue, name: str) -> shapes.VersionView:
    """Return a version by its name (agent:3, agent@champion); raise ValueError if it does not exist."""
    version = catalogue.get(name)
    return shapes.VersionView(
        version=_make_version_row(catalogue, version), folder=str(catalogue.get_model_folder(version)), commands=[],
        lineage=make_lineage_rows(version.lineage), decisions=catalogue.decisions(version.model),
    )  # fmt: skip


def make_comparison_view(first: str, second: str, runs: Path, catalogue: Catalogue) -> shapes.ComparisonView:
    """Compare two models by their recorded evaluations; play no episodes. A name is a run, sft@step-40, a version, a
    model or the id of a record, never a path. Use the latest pair of records with the most similar conditions, or all
    entries of a suite; raise ValueError if there is no pair."""
    records = [StoredRecord(*record) for record in read_all_records(runs)]
    first_records, second_records = (_find_records(name, records, catalogue) for name in (first, second))
    pairs = [(a, b) for a in first_records for b in second_records if a.record.id != b.record.id]
    if not pairs:
        command = f"tfactory compare {first} {second}{format_runs_option(runs)}"
        raise ValueError(f"no two recorded evaluations of {first} and {second}; run: {command}")
    matches = _find_similar(pairs)
    outcomes = [pair_up(a.record, b.record) for a, b in matches]
    first_model, second_model = (
        ComparedModel(name, [pair[side] for pair in matches]) for side, name in enumerate((first, second))
    )
    comparison = compare(first_model, second_model, [float(len(tasks)) for tasks in outcomes])
    if has_entries := len(matches) > 1:
        suite = matches[0][0].record.suite
        comparison.notes.append(f"{len(matches)} entries of suite {suite}: every task has equal weight")
    flips = [*comparison.losses, *comparison.wins][:MAX_SHOWN_FLIPS]
    episodes = {flip[:2]: pair for flip, pair in comparison.load_episodes(flips)}
    tasks = []
    for index, (a, b) in ((index, pair) for index, pairs in enumerate(outcomes) for pair in pairs):
        name = f"{matches[index][0].record.entry}: {a.task}" if has_entries else a.task
        task_pair = shapes.TaskPair(task=name, first=success_rate(a), second=success_rate(b))
        if task_pair.first != task_pair.second:
            task_pair.flipped = "better" if task_pair.second > task_pair.first else "worse"
        task_pair.episodes = [
            episode and make_episode_view(episode, 0) for episode in episodes.get((index, a.task), [])
        ]
        tasks.append(task_pair)
    tasks.sort(key=lambda pair: not pair.flipped)
    return shapes.ComparisonView(tasks=tasks, summary=comparison.as_json())


def _find_similar(pairs: list[tuple[StoredRecord, StoredRecord]]) -> list[tuple[StoredRecord, StoredRecord]]:
    """Return the pair of records with the most similar conditions; if these belong to a suite, the pairs of all its
    entries."""
    records = [(pair, *(stored.record for stored in pair)) for pair in pairs]
    candidates = [(a.conditions, b.conditions, a.time, b.time, pair, a, b) for pair, a, b in records]
    candidates.sort(key=lambda row: (row[0] == row[1], row[0].tasks == row[1].tasks, *row[2:4]))
    suite, pairs_by_entry = candidates[-1][-1].suite, dict[str | None, tuple[StoredRecord, StoredRecord]]()
    for first, second, *_, pair, a, b in candidates:
        if suite and (a.suite, a.entry, first.tasks) == (suite, b.entry, second.tasks) and b.suite == suite:
            pairs_by_entry[a.entry] = pair
    return list(pairs_by_entry.values()) or [candidates[-1][4]]


def _find_records(name: str, records: list[StoredRecord], catalogue: Catalogue) -> list[StoredRecord]:
    version, (run_name, _, step) = catalogue.find(name), name.partition("@step-")
    ids = {name} if version is None else {record.get("id") for record in catalogue.evaluations(str(version))}
    exact = [row for row in records if row.record.id in ids or row.record.model.name == name]
    run_records = [row for row in records if row.record.model.run == run_name]
    return exact or [row for row in run_records if not step or str(row.record.model.step) == step.lstrip("0")]


def load_audits(runs_folder: Path) -> shapes.AuditList:
    """Return the audits of `tfactory judge audit`, oldest first, from the last `MAX_AUDIT_BYTES` of their file. An
    invalid line becomes an entry with its problem."""
    audit_rows, (audit_lines, skipped_bytes) = [], read_last_lines(runs_folder / AUDITS_FILE, MAX_AUDIT_BYTES)
    for line in audit_lines:
        try:
            audit_rows.append(dict(read_json(line)))
        except (ValueError, TypeError) as error:
            audit_rows.append({"problem": f"a line of {AUDITS_FILE} cannot be read: {error}"})
    return shapes.AuditList(audits=audit_rows, left_out=skipped_bytes)
