"""Views of registered models, of comparisons of recorded evaluations, and of judge audits."""

from __future__ import annotations

import shlex
from pathlib import Path

from TrainingFactory.apps.judge_audit.report import AUDITS
from TrainingFactory.apps.views import shapes
from TrainingFactory.apps.views.episodes import episode_view
from TrainingFactory.apps.views.files import read_json, read_last_lines
from TrainingFactory.apps.views.runs import evaluation_row, lineage_rows
from TrainingFactory.evaluation.comparison import ComparedModel, StoredRecord, compare, paired, success_rate
from TrainingFactory.evaluation.records import read_all_records
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
    """Compare two models by their recorded evaluations; play no episodes. A name is a run, sft@step-40, a version, a
    model or the id of a record, never a path. Use the latest pair of records with the most similar conditions, or all
    entries of a suite; raise ValueError if there is no pair."""
    records = [StoredRecord(*record) for record in read_all_records(runs)]
    ours, theirs = (_recorded(name, records, catalogue) for name in (first, second))
    pairs = [(a, b) for a in ours for b in theirs if a.record.id != b.record.id]
    if not pairs:
        again = f"tfactory compare {first} {second}{runs_option(runs)}"
        raise ValueError(f"no two recorded evaluations of {first} and {second}; run: {again}")
    matching = _alike(pairs)
    outcomes = [paired(a.record, b.record) for a, b in matching]
    one, other = (
        ComparedModel(name, [pair[at] for pair in matching]) for at, name in enumerate((first, second))
    )
    comparison = compare(one, other, [float(len(tasks)) for tasks in outcomes])
    several = f"{len(matching)} entries of suite {matching[0][0].record.suite}" if len(matching) > 1 else ""
    comparison.notes += [f"{several}: every task has equal weight"] if several else []
    flips = [*comparison.worse, *comparison.better][:MAX_SHOWN_FLIPS]
    episodes = {flip[:2]: pair for flip, pair in comparison.episodes(flips)}
    tasks = []
    for place, (a, b) in ((place, pair) for place, pairs in enumerate(outcomes) for pair in pairs):
        name = f"{matching[place][0].record.entry}: {a.task}" if several else a.task
        pair = shapes.TaskPair(task=name, first=success_rate(a), second=success_rate(b))
        if pair.first != pair.second:
            pair.flipped = "better" if pair.second > pair.first else "worse"
        pair.episodes = [each and episode_view(each, 0) for each in episodes.get((place, a.task), [])]
        tasks.append(pair)
    tasks.sort(key=lambda pair: not pair.flipped)
    return shapes.ComparisonView(tasks=tasks, summary=comparison.as_json())


def _alike(pairs: list[tuple[StoredRecord, StoredRecord]]) -> list[tuple[StoredRecord, StoredRecord]]:
    """Return the pair of records with the most similar conditions; if these belong to a suite, the pairs of all its
    entries."""
    records = [(pair, *(each.record for each in pair)) for pair in pairs]
    candidates = [(a.conditions, b.conditions, a.time, b.time, pair, a, b) for pair, a, b in records]
    candidates.sort(key=lambda each: (each[0] == each[1], each[0].tasks == each[1].tasks, *each[2:4]))
    suite, entries = candidates[-1][-1].suite, dict[str | None, tuple[StoredRecord, StoredRecord]]()
    for one, other, *_, pair, a, b in candidates:
        if suite and (a.suite, a.entry, one.tasks) == (suite, b.entry, other.tasks) and b.suite == suite:
            entries[a.entry] = pair
    return list(entries.values()) or [candidates[-1][4]]


def _recorded(name: str, records: list[StoredRecord], catalogue: Catalogue) -> list[StoredRecord]:
    version, (run, _, step) = catalogue.find(name), name.partition("@step-")
    ids = {name} if version is None else {record.get("id") for record in catalogue.evaluations(str(version))}
    direct = [each for each in records if each.record.id in ids or each.record.model.name == name]
    of_run = [each for each in records if each.record.model.run == run]
    return direct or [each for each in of_run if not step or str(each.record.model.step) == step.lstrip("0")]


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
