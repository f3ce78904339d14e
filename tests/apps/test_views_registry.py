"""Registered models, comparisons and audits as the web page and `--json` show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.test_evaluation_records import played, record_of
from tests.kits.cli import Run
from tests.kits.registry import made_run
from TrainingFactory.apps.judge_audit.report import AUDITS_FILE, Audit, save_audit
from TrainingFactory.apps.views import registry as registry_views
from TrainingFactory.apps.views.registry import (
    list_models,
    load_audits,
    make_comparison_view,
    make_version_view,
)
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.evaluation.records import EvaluationRecord, ModelIdentity, append_record
from TrainingFactory.promotion.model_registry import ModelRegistry


def evaluated(runs: Path, name: str, won: str, step: int = 2, **more: str) -> EvaluationRecord:
    """A record of a run's model: 1 is right, 0 wrong."""
    tasks = [played(f"t{n}", each == "1") for n, each in enumerate(won)]
    model = ModelIdentity(name=f"runs/{name}", digest=None, run=name, run_id=name, step=step)
    record = record_of(*tasks).model_copy(update={"model": model, "id": f"eval-{name}{step}{won}"} | more)
    if "episodes_file" in more:
        save_trajectories(runs / name / more["episodes_file"], [each for group in tasks for each in group])
    append_record(runs / name / "evaluations.jsonl", record)
    return record


def test_models_and_a_version(tmp_path: Path, tfactory: Run) -> None:
    made_run(tmp_path, "sft", adapter=True)
    record = evaluated(tmp_path, "sft", "110")
    registry = ModelRegistry(runs=tmp_path)
    registry.register("agent", "sft", "the first", {"team": "search"})
    registry.register("agent", "sft@step-1")
    registry.set_alias("agent:1", "champion")
    registry.add_evaluation("agent:2", {"version": 99, "of_tomorrow": True})
    [model] = list_models(registry).models
    assert (model.name, model.aliases, [each.number for each in model.versions]) == (
        "agent",
        {"champion": 1},
        [1, 2],
    )
    first, second = model.versions
    assert (first.run, first.step, first.kind, first.tags) == ("sft", 2, "adapter", {"team": "search"})
    assert first.evaluations[0].id == record.id and first.evaluations[0].success == pytest.approx(2 / 3)
    assert second.evaluations[0].success is None  # shown as far as it is known
    view = make_version_view(registry, "agent@champion")
    assert view.version == first and view.lineage[-1]["name"] == "sft"
    told = [str(view.lineage[-1]["rows"]), tfactory("runs", "show", "sft", "--runs", str(tmp_path))[1]]
    assert all("torch" in each and "commit" not in each for each in told)  # it was not in a git repository
    assert [each["kind"] for each in view.decisions] == ["alias"] and Path(view.folder).is_dir()
    where = ("--runs", str(tmp_path), "--json")
    assert json.loads(tfactory("registry", "list", *where)[1]) == list_models(registry).model_dump(
        mode="json"
    )
    assert json.loads(tfactory("registry", "show", "agent:1", *where)[1]) == view.model_dump(mode="json")
    with pytest.raises(ValueError, match="no registered model"):
        make_version_view(registry, "agnt")


def test_two_runs_are_compared_by_the_records_that_fit(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made_run(tmp_path, name)
    evaluated(tmp_path, "a", "0101", episodes_file="a.jsonl")
    evaluated(tmp_path, "b", "11111", step=1)  # other tasks
    wanted = evaluated(tmp_path, "b", "1001", episodes_file="gone.jsonl")
    (tmp_path / "b" / "gone.jsonl").unlink()
    registry = ModelRegistry(runs=tmp_path)
    found = make_comparison_view("a", "b", tmp_path, registry)
    assert found.summary["records"][1] == [wanted.id] and found.summary["difference"] == 0
    told = [(each.task, each.first, each.second, each.flipped) for each in found.tasks]
    assert told == [
        ("t0", 0.0, 1.0, "better"), ("t1", 1.0, 0.0, "worse"), ("t2", 0.0, 0.0, None), ("t3", 1.0, 1.0, None),
    ]  # fmt: skip
    first, second = found.tasks[0].episodes
    assert first is not None and first.task["id"] == "t0" and second is None and not found.tasks[2].episodes
    assert make_comparison_view("a", "b@step-000001", tmp_path, registry).summary["better"] == ["t0", "t2"]
    assert make_comparison_view("a", wanted.id, tmp_path, registry).summary["worse"] == ["t1"]
    registry.register("agent", "b")
    assert make_comparison_view("a", "agent:1", tmp_path, registry).summary["worse"] == ["t1"]
    for name in ("nobody", str(tmp_path / "a" / "evaluations.jsonl"), "a"):
        with pytest.raises(ValueError, match=f"no two recorded evaluations.* --runs {tmp_path}$"):
            make_comparison_view("a", name, tmp_path, registry)


def test_two_are_compared_on_all_entries_of_a_suite(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made_run(tmp_path, name)
    for entry, ours, theirs in (("search", "0011", "0111"), ("sums", "01", "10")):
        for name, won in (("a", ours), ("b", theirs)):
            evaluated(tmp_path, name, won, suite="release", entry=entry, episodes_file=f"{entry}.jsonl")
    found = make_comparison_view("a", "b", tmp_path, ModelRegistry(runs=tmp_path))
    told = {each.task: (each.first, each.second) for each in found.tasks if each.flipped}
    assert told == {"search: t1": (0, 1), "sums: t0": (0, 1), "sums: t1": (1, 0)} and len(found.tasks) == 6
    assert found.summary["difference"] == pytest.approx(1 / 6) and "2 entries" in found.summary["notes"][-1]
    [pair] = [each for each in found.tasks if each.task == "sums: t1"]
    assert [each and each.row.reward for each in pair.episodes] == [1.0, 0.0]


def test_audits_that_were_kept(tmp_path: Path) -> None:
    assert load_audits(tmp_path).audits == []
    save_audit(tmp_path / "runs", Audit(items=3, judged=3, pearson=0.5), "judge", "gold.jsonl")
    with (tmp_path / "runs" / AUDITS_FILE).open("a") as file:
        file.write("nonsense\n" + '{"half')
    first, second = load_audits(tmp_path / "runs").audits
    assert (first["judge"], first["gold"], first["pearson"]) == ("judge", "gold.jsonl", 0.5)
    assert first["rows"] == [["Pearson", "0.5", "correlation with the gold scores"]]
    assert first["verdict"] and "cannot be read" in second["problem"]


def test_of_many_audits_the_newest_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"judge": f"j{n}"}) + "\n" for n in range(9)]
    (tmp_path / AUDITS_FILE).write_text("".join(lines))
    for most, shown in ((1000, 9), (len(lines[0]) * 3, 3), (len(lines[0]) * 3 - 1, 2), (1, 0)):
        monkeypatch.setattr(registry_views, "MAX_AUDIT_BYTES", most)
        found = load_audits(tmp_path)
        assert [each["judge"] for each in found.audits] == [f"j{n}" for n in range(9 - shown, 9)]
        assert found.left_out == len(lines[0]) * (9 - shown)
