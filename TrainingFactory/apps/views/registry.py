"""Registered models, comparisons of two by what was recorded, and audits of judges, as shapes."""

from __future__ import annotations

import shlex
from pathlib import Path

from TrainingFactory.apps.judge_audit.report import AUDITS
from TrainingFactory.apps.views import shapes
from TrainingFactory.apps.views.episodes import episode_view
from TrainingFactory.apps.views.files import read_end, read_json
from TrainingFactory.apps.views.runs import evaluation_row, lineage_rows
from TrainingFactory.evaluation.comparison import Found, Side, compare, paired, share
from TrainingFactory.evaluation.records import all_records
from TrainingFactory.registry.catalogue import Catalogue
from TrainingFactory.registry.rows import Version

SHOWN, MOST = 20, 16 << 20  # flipped tasks with both episodes; bytes of audits
SAME = ("model", "number", "created", "who", "description", "digest", "tags")


def where_of(runs: Path) -> str:
    """Return what a command needs to find the runs, where they are not in the usual folder."""
    return "" if runs == Path("runs") else f" --runs {shlex.quote(str(runs))}"


def models(catalogue: Catalogue) -> shapes.ModelList:
    """Return the registered models with all their versions."""
    found: dict[str, shapes.ModelRow] = {}
    for each in catalogue.versions():
        row = found.setdefault(each.model, shapes.ModelRow(name=each.model, versions=[], aliases={}))
        row.versions.append(_version(catalogue, each))
        row.aliases |= dict.fromkeys(each.aliases, each.number)
    return shapes.ModelList(models=list(found.values()))


def _version(catalogue: Catalogue, found: Version) -> shapes.VersionRow:
    return shapes.VersionRow(
        **{name: getattr(found, name) for name in SAME}, version=str(found), aliases=list(found.aliases),
        run=found.lineage.get("run"), step=found.lineage.get("step"), kind="adapter" if found.base else "model",
        base=catalogue.base_name(found) if found.base else None,
        evaluations=[evaluation_row(record) for record in catalogue.evaluations(str(found))],
    )  # fmt: skip


def version_view(catalogue: Catalogue, name: str) -> shapes.VersionView:
    """Return a version (agent:3, agent@champion); raise ValueError where there is none."""
    found = catalogue.get(name)
    return shapes.VersionView(
        version=_version(catalogue, found), folder=str(catalogue.folder(found)), lineage=lineage_rows(found.lineage),
        commands=[], decisions=catalogue.decisions(found.model),
    )  # fmt: skip


def comparison_view(first: str, second: str, runs: Path, catalogue: Catalogue) -> shapes.ComparisonView:
    """Compare two of what was evaluated (runs, sft@step-40, versions, models, ids of records) by those of their records
    that fit best, of these the last; of a suite by all its entries. Nothing is played, and names are no paths; raise
    ValueError where none fit."""
    known = [Found(*each) for each in all_records(runs)]
    ours, theirs = (_recorded(name, known, catalogue) for name in (first, second))
    pairs = [(a, b) for a in ours for b in theirs if a.record.id != b.record.id]
    if not pairs:
        again = f"tfactory compare {first} {second}{where_of(runs)}"
        raise ValueError(f"there are no two recorded evaluations of these: {again}")
    chosen = _alike(pairs)
    outcomes = [paired(a.record, b.record) for a, b in chosen]
    one, other = (Side(name, [pair[at] for pair in chosen]) for at, name in enumerate((first, second)))
    made = compare(one, other, [float(len(each)) for each in outcomes])
    several = f"{len(chosen)} entries of suite {chosen[0][0].record.suite}" if len(chosen) > 1 else ""
    made.notes += [f"{several}: every task counts alike"] if several else []
    told = {flip[:2]: each for flip, each in made.episodes([*made.worse, *made.better][:SHOWN])}
    tasks = []
    for place, (a, b) in ((place, each) for place, found in enumerate(outcomes) for each in found):
        name = f"{chosen[place][0].record.entry}: {a.task}" if several else a.task
        pair = shapes.TaskPair(task=name, first=share(a), second=share(b))
        if pair.first != pair.second:
            pair.flipped = "better" if pair.second > pair.first else "worse"
        pair.episodes = [each and episode_view(each, 0) for each in told.get((place, a.task), [])]
        tasks.append(pair)
    tasks.sort(key=lambda pair: not pair.flipped)
    return shapes.ComparisonView(tasks=tasks, summary=made.as_json())


def _alike(pairs: list[tuple[Found, Found]]) -> list[tuple[Found, Found]]:
    """Return the two records that fit best, and where they are of a suite those of its other entries."""
    made = [(pair, *(each.record for each in pair)) for pair in pairs]
    asked = [(a.conditions, b.conditions, a.time, b.time, pair, a, b) for pair, a, b in made]
    asked.sort(key=lambda each: (each[0] == each[1], each[0].tasks == each[1].tasks, *each[2:4]))
    suite, entries = asked[-1][-1].suite, dict[str | None, tuple[Found, Found]]()
    for one, other, *_, pair, a, b in asked:
        if suite and (a.suite, a.entry, one.tasks) == (suite, b.entry, other.tasks) and b.suite == suite:
            entries[a.entry] = pair
    return list(entries.values()) or [asked[-1][4]]


def _recorded(name: str, known: list[Found], catalogue: Catalogue) -> list[Found]:
    version, (run, _, step) = catalogue.find(name), name.partition("@step-")
    ids = {name} if version is None else {each.get("id") for each in catalogue.evaluations(str(version))}
    direct = [each for each in known if each.record.id in ids or each.record.model.name == name]
    made = [each for each in known if each.record.model.run == run]
    return direct or [each for each in made if not step or str(each.record.model.step) == step.lstrip("0")]


def audits(runs: Path) -> shapes.AuditList:
    """Return what `tfactory judge audit` has found, the oldest first; a line that cannot be read says so. Of a long
    file these are the newest."""
    found, (lines, left_out) = [], read_end(runs / AUDITS, MOST)
    for line in lines:
        try:
            found.append(dict(read_json(line)))
        except (ValueError, TypeError) as error:
            found.append({"problem": f"a line of {AUDITS} cannot be read: {error}"})
    return shapes.AuditList(audits=found, left_out=left_out)
