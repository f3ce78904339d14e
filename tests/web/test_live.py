"""What the page is told while a run goes, and what the server needs for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kits.cli import ROOT
from tests.kits.page import serving
from tests.kits.registry import made_run
from TrainingFactory.config import TrainingConfig
from TrainingFactory.runs.folder import FINDINGS, METRICS, RunFolder, Status


def running(runs: Path, name: str = "live") -> RunFolder:
    return RunFolder.create(TrainingConfig(logging={"output_dir": str(runs)}), name, {}, 9)


def until(events: Any, wanted: str) -> Any:
    """The data of the next event of that name that says anything."""
    return next(data for name, data in events if name == wanted and data != {"runs": [], "gone": []})


def test_what_is_written_comes_as_events(tmp_path: Path) -> None:
    run = running(tmp_path)
    run.append(METRICS, {"step": 1, "time": 1.0, "reward": 0.5})
    with serving(tmp_path) as page:
        events = page.events("/api/events?run=live")
        assert next(events) == ("runs", {"runs": [], "gone": []})
        run.append(METRICS, {"step": 2, "time": 2.0, "reward": float("nan")})
        run.write_status(Status("running", 2, 9))
        with (run.path / METRICS).open("a") as file:
            file.write('{"step": 3, "rew')  # half a line
        row = until(events, "runs")["runs"][0]
        assert (row["name"], row["state"], row["step"]) == ("live", "running", 2)
        news = until(events, "metrics")
        first = page.get("/api/runs/live/metrics")
        assert (news["steps"], news["series"]["reward"]) == ([2], [None])
        assert (news["offset"], first["steps"]) == (first["offset"], [1, 2])
        assert page.get("/api/runs/live/metrics", after=news["start"])["steps"] == [2]
        (run.path / "run.log").write_text("said <b>\n")
        assert until(events, "log")["text"] == "said <b>\n"
        found = {"name": "n", "sentence": "s", "remedy": "r", "severity": "warning"}
        run.append(FINDINGS, {"step": 2} | found)
        assert until(events, "findings")["findings"][0]["sentence"] == "s"


def test_runs_that_come_go_and_are_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as page:
        events = page.events("/api/events")
        next(events)
        run = running(tmp_path)
        assert until(events, "runs")["runs"][0]["state"] == "running"
        run.unlock()  # as the system does when a process is killed
        assert until(events, "runs")["runs"][0]["state"] == "killed"
        run.discard()
        assert until(events, "runs")["gone"] == ["live"]


def test_a_file_that_is_cut_back_is_told_from_its_beginning(tmp_path: Path) -> None:
    run = running(tmp_path)
    for step in (1, 2, 3):
        run.append(METRICS, {"step": step, "time": 0.0, "loss": 1.0})
    with serving(tmp_path) as page:
        events = page.events("/api/events?run=live")
        next(events)
        run.rewind({METRICS: 0})
        run.append(METRICS, {"step": 1, "time": 0.0, "loss": 2.0})
        news = until(events, "metrics")
        assert (news["again"], news["steps"], news["series"]["loss"]) == (True, [1], [2.0])


def test_what_is_half_written_or_foreign_breaks_nothing(tmp_path: Path) -> None:
    good = made_run(tmp_path, "good")
    for name, file, text in (
        ("half", "config.yaml", "model: {"),
        ("newer", "config.yaml", "model: builtin:tiny\nfuture_section: {x: 1}\n"),
        ("status", "status.json", "{"),
        ("about", "environment.json", "[]"),
    ):
        (made_run(tmp_path, name).path / file).write_text(text)
    (tmp_path / "empty").mkdir()
    with serving(tmp_path) as page:
        rows = {row["name"]: row for row in page.get("/api/runs")["runs"]}
        assert rows["good"]["state"] == "finished"
        assert {"half", "newer", "status", "about"} <= rows.keys() and rows["newer"]["problem"]
        for name in rows:
            for end in ("", "/config", "/metrics", "/log", "/episodes"):
                assert page.client.get(f"/api/runs/{name}{end}").status_code in (200, 400), (name, end)
        assert page.get("/api/runs/good")["row"]["step"] == good.status.step


def test_the_server_is_small_and_never_loads_torch(tmp_path: Path) -> None:
    """The whole API is asked once, in a process of its own."""
    made_run(tmp_path, "mine")
    code = """
import json, sys
from pathlib import Path
import psutil
from tests.kits.page import serving
with serving(Path(sys.argv[1])) as page:
    paths = page.get("/api/openapi.json")["paths"]
    for path, methods in paths.items():
        if "get" in methods and path != "/api/events":
            query = {"credit": 0, "step": 1, "task": "a", "first": "mine", "second": "mine"}
            page.client.get(path.format(name="mine", other="mine", number=1, digest="0" * 64), params=query)
    page.post("/api/check", yaml="environment: search")
    print(json.dumps([psutil.Process().memory_info().rss, [n for n in ("torch", "transformers") if n in sys.modules]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    memory, heavy = json.loads(done.stdout or done.stderr)
    assert heavy == []
    assert memory < 200e6


def test_the_api_describes_itself(tmp_path: Path) -> None:
    with serving(tmp_path) as page:
        told = page.get("/api/openapi.json")
        for path, methods in told["paths"].items():
            for route in methods.values():
                assert path.startswith("/api/") and len(route["description"]) > 10, path
        assert "RunRow" in told["components"]["schemas"]
        refused = page.client.get("/api/runs/none").json()["error"]
        assert refused["param"] == "name" and "none" in refused["message"]
        assert page.client.get("/api/runs/x/metrics?after=y").json()["error"]["param"] == "after"


def test_all_readers_share_a_look(tmp_path: Path) -> None:
    made_run(tmp_path, "done")
    with serving(tmp_path) as page:
        assert page.page is not None
        looks, rows = [], page.page.runs.list_rows
        page.page.runs.list_rows = lambda: looks.append(1) or rows()  # type: ignore[method-assign]
        readers = [page.events("/api/events") for _ in range(20)]
        for events in readers:
            next(events)
        before = len(looks)
        running(tmp_path).unlock()
        for events in readers:
            assert until(events, "runs")["runs"][0]["name"] == "live"
        assert len(looks) - before < len(readers)
