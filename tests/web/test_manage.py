"""Managing runs over the API: annotations, renaming, deleting, evaluations and exports."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.cli import ROOT
from tests.kits.page import Served, command, serving
from tests.kits.registry import made_run
from tests.kits.waiting import wait_until
from TrainingFactory.runs.annotations import read_annotations
from TrainingFactory.runs.folder import EVALUATIONS, RunFolder, Status
from TrainingFactory.web import processes

# Prints its arguments, waits for the file `go`, and fails if one of the arguments is step-9.
PRETENDED = """
import pathlib, sys, time
print("got", *sys.argv[1:], flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
sys.exit("error: no such checkpoint" if "@step-9" in " ".join(sys.argv) else 0)
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "CLI_COMMAND", [sys.executable, "-c", PRETENDED])
    made_run(tmp_path / "runs", "one")
    with serving(tmp_path / "runs") as served:
        yield served


def row(page: Served, name: str) -> dict[str, object]:
    return next(row for row in page.get("/api/runs")["runs"] if row["name"] == name)


def test_annotations(page: Served, tmp_path: Path) -> None:
    before = row(page, "one")
    page.post("/api/runs/one/annotate", tags={"team": "search", "baseline": ""}, note="first")
    page.post("/api/runs/one/annotate", tags={"baseline": ""}, archived=True)
    after = row(page, "one")
    assert (after["tags"], after["note"], after["archived"]) == ({"baseline": ""}, "first", True)
    assert after["updated"] == before["updated"]
    assert page.send("/api/runs/one/annotate", tags={"a b": ""}).status_code == 400
    assert page.send("/api/runs/none/annotate", note="x").status_code == 404
    assert read_annotations(RunFolder(tmp_path / "runs" / "one")).tags == {"baseline": ""}


def test_a_row_names_seed_and_changed_options(page: Served, tmp_path: Path) -> None:
    made_run(
        tmp_path / "runs", "two", training={"seed": 7, "learning_rate": 0.5}, tools=[{"name": "x" * 300}]
    )
    two = row(page, "two")
    assert two["seed"] == 7
    options: dict[str, object] = dict(two["options"])  # type: ignore[call-overload]
    tools = str(options.pop("tools"))
    assert options == {
        "environment.environment_id": "search",
        "training.seed": 7,
        "training.learning_rate": 0.5,
    }
    assert len(tools) < 100 and tools.startswith("[{")


def test_renaming_and_deleting(page: Served, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "labels").mkdir()
    (runs / "labels" / "one.jsonl").write_text("{}\n")
    assert page.post("/api/runs/one/rename", new_name="two")["command"].startswith(
        "tfactory runs rename one two"
    )
    assert (runs / "labels" / "two.jsonl").is_file() and not (runs / "one").exists()
    child = made_run(runs, "child", model={"name": "two"})
    child.write_status(Status("interrupted", 1, 2))
    listed = page.get("/api/runs/two/references")
    assert listed["needed_by"] == ["run child uses checkpoints/step-000002"] and listed["bytes"] > 1000
    refused = page.send("/api/runs/two/delete", confirm="two")
    assert refused.status_code == 409 and "run child uses" in refused.json()["error"]["message"]
    assert page.send("/api/runs/two/rename", new_name="one").status_code == 409
    assert page.send("/api/runs/two/delete", confirm="tow", force=True).status_code == 400
    running = RunFolder(child.path)
    running.lock()
    assert page.send("/api/runs/child/delete", confirm="child", force=True).status_code == 409
    running.unlock()
    for name in ("..", "registry.sqlite", ".two.gone"):
        assert page.send(f"/api/runs/{name}/delete", confirm=name).status_code in (404, 405)
    page.post("/api/runs/two/delete", confirm="two", force=True)
    assert [row["name"] for row in page.get("/api/runs")["runs"]] == ["child"]


def test_evaluations_and_exports_are_processes(page: Served, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    started = page.post("/api/runs/one/evaluate", checkpoint="best", tasks=8, temperature=0.5)
    run = f"{runs / 'one'}@best"
    told = f"eval {run} logging.output_dir={runs} --tasks 8 --temperature 0.5"
    assert started["command"] == f"tfactory {told}"
    assert page.send("/api/runs/one/evaluate").status_code == 409  # one at a time
    page.post("/api/runs/one/export", checkpoint="step-9", folder="mine", merge=True, dtype="bfloat16")
    refused = page.send("/api/runs/one/delete", confirm="one")
    assert refused.status_code == 409 and "in use by its eval" in refused.json()["error"]["message"]
    for folder, status in (("../x", 400), ("", 400)):
        assert page.send("/api/runs/one/export", folder=folder).status_code == status
    assert page.send("/api/runs/one/evaluate", checkpoint="/etc").status_code == 422

    def jobs() -> list[dict[str, str]]:
        return page.get("/api/runs/one/jobs")["jobs"]

    wait_until(lambda: all("got" in job["output"] for job in jobs()))
    assert [job["state"] for job in jobs()] == ["running", "running"]
    Path("go").touch()
    wait_until(lambda: all(job["state"] != "running" for job in jobs()))
    export, evaluation = jobs()
    assert evaluation["state"] == "finished" and evaluation["output"] == f"got {told}"
    assert export["state"] == "failed" and export["output"].endswith("error: no such checkpoint")
    assert f"--out {runs / 'exports' / 'mine'} --merge --dtype bfloat16" in export["output"]
    Path("go").unlink()
    page.post("/api/runs/one/evaluate")
    assert page.post("/api/runs/one/cancel")["jobs"][0]["kind"] == "eval"
    wait_until(lambda: jobs()[0]["state"] == "failed")


@pytest.mark.slow
def test_a_real_run_is_evaluated_and_exported(tmp_path: Path) -> None:
    config = (
        "model: builtin:tiny\nenvironment: search\ntraining: {algorithm: sft, max_steps: 1, batch_size: 2}\n"
        "sampling: {max_tokens: 4}\n"
    )
    with command(tmp_path) as (page, _):
        page.post("/api/train", yaml=config, name="mine")
        run = RunFolder(tmp_path / "runs" / "mine")
        wait_until(lambda: run.state == "finished")
        page.post("/api/runs/mine/evaluate", tasks=2)
        page.post("/api/runs/mine/export", folder="model")
        wait_until(lambda: all(job["state"] != "running" for job in page.get("/api/runs/mine/jobs")["jobs"]))
        jobs = page.get("/api/runs/mine/jobs")["jobs"]
        assert [job["state"] for job in jobs] == ["finished", "finished"], jobs
        record = json.loads((run.path / EVALUATIONS).read_text())
        assert record["conditions"]["count"] == 2
        assert (tmp_path / "runs" / "exports" / "model" / "config.json").is_file()
        assert str(ROOT) not in str(run.path)
