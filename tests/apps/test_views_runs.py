"""Runs as the web page and `--json` show them: only what is new is read, and what is damaged says so."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.apps.test_views_registry import evaluated
from tests.kits.cli import Run
from tests.kits.registry import made_run
from TrainingFactory.apps.views import files
from TrainingFactory.apps.views.files import FilePosition, read_json, read_new_lines
from TrainingFactory.apps.views.index import EpisodeIndex, Query
from TrainingFactory.apps.views.runs import (
    LOG,
    Runs,
    diff_runs,
    list_findings,
    make_config_view,
    make_run_view,
    read_log_part,
    read_metrics_part,
)
from TrainingFactory.runs.folder import (
    CONFIG,
    ENVIRONMENT,
    EVALUATIONS,
    FINDINGS,
    METRICS,
    STATUS,
    TRAJECTORIES,
    RunFolder,
    Status,
)
from TrainingFactory.tools.recording import SPECS_FILE


def lines(path: Path, place: FilePosition, most: int = 1 << 20) -> tuple[list[bytes], FilePosition, bool]:
    part = read_new_lines(path, place, most)
    return part.lines, part.position, part.was_truncated


def test_a_growing_file_is_read_once_and_cutting_it_back_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert lines(path, FilePosition()) == ([], FilePosition(), False)
    path.write_bytes(b"one\ntwo\nhal")
    found, place, again = lines(path, FilePosition())
    assert (found, place.offset, again) == ([b"one", b"two"], 8, False)
    assert lines(path, place) == ([], place, False)
    with path.open("ab") as file:
        file.write(b"f\n")
    found, place, again = lines(path, place)
    assert (found, again) == ([b"half"], False)
    os.truncate(path, 4)
    assert lines(path, place)[0::2] == ([b"one"], True)
    path.write_bytes(b"one\nTWO\nhalf\nmore\n")  # cut back, and longer than before
    assert lines(path, place)[0::2] == ([b"one", b"TWO", b"half", b"more"], True)
    path.unlink()
    assert lines(path, place) == ([], FilePosition(), True)


def test_a_part_is_whole_lines_however_long_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100 + b"\n" + b"y" * 3 + b"\nz\n")
    found, place, _ = lines(path, FilePosition(), 10)
    assert found == [b"x" * 100] and read_new_lines(path, FilePosition(), 10).has_more
    assert lines(path, place, 5)[0] == [b"yyy"] and not read_new_lines(path, place, 50).has_more


@pytest.mark.parametrize(
    "line", [b"[" * 10**5, b"{", b"\xff\xfe", b""], ids=["deep", "half", "bytes", "none"]
)
def test_what_is_no_json_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        read_json(line)


def test_half_a_character_becomes_a_mark() -> None:
    assert read_json(b'["\\ud83d", "\\ud83d\\ude00"]') == ["?", "\U0001f600"]
    assert read_json(b'["\xed\xa0\xbd"]') == ["\ufffd" * 3]


def test_rows_are_read_again_only_where_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = made_run(tmp_path, "one"), made_run(tmp_path, "two")
    runs = Runs(tmp_path)
    first = runs.list_rows()
    assert [row.name for row in first] == ["one", "two"] and first[0].heldout is not None
    assert (first[0].state, first[0].step, first[0].heldout.value, first[0].heldout.step) == (
        "finished",
        2,
        0.5,
        2,
    )
    read: list[int] = []
    monkeypatch.setattr(
        "TrainingFactory.apps.views.runs.read_new_lines",
        lambda *given: (part := files.read_new_lines(*given), read.append(part.position.offset - part.start))[
            0
        ],
    )
    assert all(a is b for a, b in zip(runs.list_rows(), first, strict=True)) and not read
    row = {"step": 3, "reward": 0.25, "loss": math.nan, "tokens_per_second": 7.0}
    two.append(METRICS, row)
    again = runs.list_rows()
    assert again[0] is first[0] and again[1].reward == 0.25
    assert json.loads(again[1].model_dump_json())["loss"] is None and again[1].spark == [0.25]
    assert read == [len(json.dumps(row)) + 1]
    assert runs.find("one").path == one.path
    (one.path / "checkpoints").rename(tmp_path / "kept")
    for path in [*one.path.iterdir()]:
        path.unlink()
    one.path.rmdir()
    assert [row.name for row in runs.list_rows()] == ["two"]


def test_held_out_success_is_the_newest_of_the_run_and_of_evaluations_after_it(tmp_path: Path) -> None:
    run, runs = made_run(tmp_path, "a", (1, 2, 3), environment="calculator"), Runs(tmp_path)

    def told() -> tuple[float, int, str]:
        found = runs.list_rows()[0].heldout
        assert found is not None
        return found.value, found.step, found.by

    assert told() == (0.75, 3, "training")
    for step, won, more in (
        (2, "1110", {}),  # of an earlier step than the run has measured itself
        (3, "0111", {"suite": "release", "entry": "sums"}),
        (3, "1111", {"by": "training"}),
    ):
        evaluated(tmp_path, "a", won, step, **more)
        assert told() == (0.75, 3, "training")
    evaluated(tmp_path, "a", "10", 3)
    assert told() == (0.5, 3, "tfactory eval, 2 tasks of calculator")
    run.append(METRICS, {"step": 4, "eval/success": 0.25})
    evaluated(tmp_path, "a", "1", 3)  # the best checkpoint
    with (run.path / EVALUATIONS).open("a") as file:
        file.write('{"by": "eval", nonsense}\n{"by": "eval", "metrics": []}\n')
    assert told() == (1.0, 3, "tfactory eval, 1 task of calculator") and runs.list_rows()[0].problem is None
    run.lock()
    run.write_status(Status("running", 4, 5))
    assert told() == (0.25, 4, "training")  # it goes on
    run.unlock()
    made_run(tmp_path, "b", environment="search")
    evaluated(tmp_path, "b", "1", 2)  # in another environment than its own
    other = runs.list_rows()[1].heldout
    assert other is not None and other.by == "training"


def test_what_a_run_is_played_in_is_told(tmp_path: Path) -> None:
    made_run(tmp_path, "a", environment={}, data={"tasks": "tasks.jsonl"})
    made_run(tmp_path, "b", environment={"command": "python agent.py"})
    made_run(tmp_path, "c", environment={}, data={"dataset": "rows.jsonl"})
    made_run(tmp_path, "d", environment={"environment_id": "search"}, data={"tasks": "tasks.jsonl"})
    found = {row.name: row.environment for row in Runs(tmp_path).list_rows()}
    assert found == {"a": "conversation", "b": "python agent.py", "c": "rows.jsonl", "d": "search"}


def test_a_live_run_that_is_killed_shows_as_killed(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a")
    run.lock()
    run.write_status(Status("running", 1, 4))
    runs = Runs(tmp_path)
    [live] = runs.list_rows()
    assert live.state == "running" and runs.list_rows()[0] is live
    run.unlock()  # as the system does for a process that has died; no file changes
    assert runs.list_rows()[0].state == "killed"
    run.lock()  # resumed: it reads the model, and has written nothing yet
    assert runs.list_rows()[0].state == "running"
    run.unlock()


def test_the_small_curve_is_thinned_and_starts_anew_when_a_run_is_rewound(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a")
    for step in range(3, 123):
        run.append(METRICS, {"step": step, "reward": float(step)})
    runs = Runs(tmp_path)
    [row] = runs.list_rows()
    assert (len(row.spark), row.spark[0], row.spark[-1], row.spark_of) == (60, 3.0, 122.0, "reward")
    # The 118 values between the ends, as 58 means of two or, where that does not come out even, three.
    assert row.spark[1:3] == [4.5, 6.5] and row.spark == sorted(row.spark)
    size = len((run.path / METRICS).read_bytes().splitlines(keepends=True)[0])
    run.rewind({METRICS: size})
    run.append(METRICS, {"step": 2, "loss": 0.5})
    [row] = runs.list_rows()
    assert (row.spark, row.spark_of, row.reward) == ([0.5], "loss", None)


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("config.yaml", "training: [", "config.yaml"),
        ("config.yaml", "training: {option_of_tomorrow: 1}", "option_of_tomorrow"),
        ("config.yaml", "a: &a [x]\nb: [*a, *a]", "config.yaml"),
        ("environment.json", '{"day": ', "environment.json"),
        (FINDINGS, '{"step": 3, "name": "x"}\n', FINDINGS),
    ],
)
def test_what_cannot_be_read_says_so_and_breaks_nothing(
    tmp_path: Path, file: str, text: str, problem: str
) -> None:
    run = made_run(tmp_path, "a")
    made_run(tmp_path, "b")
    (run.path / file).write_text(text)
    runs = Runs(tmp_path)
    rows = {row.name: row for row in runs.list_rows()}
    assert problem in (rows["a"].problem or "") and (rows["b"].problem, rows["b"].state) == (None, "finished")
    assert rows["a"].heldout is not None  # the rest is shown
    view = make_run_view(run, runs)
    assert [each["name"] for each in view.checkpoints] == ["step-000001", "step-000002"] and view.files
    assert view.notes or file == "config.yaml"
    assert (make_config_view(run).problem is None) == (file != "config.yaml") and make_config_view(run).yaml


def test_a_run_in_full(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", training={"learning_rate": 0.5})
    view = make_run_view(run, Runs(tmp_path))
    assert view.checkpoints[1] == {"name": "step-000002", "step": 2, "best": True}
    assert view.tools == ["search"] and view.about["digest"] == "d" and not view.notes
    assert view.commands["resume"] == f"tfactory runs resume {run.path}" and "model" not in view.about
    found = make_config_view(run)
    assert found.options["training.learning_rate"] == 0.5 and "training.learning_rate" in found.changed
    assert "training.seed" not in found.changed
    other = made_run(tmp_path, "b", steps=(1,))
    told = {row["key"]: row["values"] for row in diff_runs([run, other]).rows}
    assert told["training.learning_rate"][0] == 0.5 and "model.name" not in told
    assert {"key": "eval/success", "values": [0.5, 0.25]} in diff_runs([run, other]).metrics
    with pytest.raises(ValueError, match="there is no run"):
        Runs(tmp_path).find("../" + tmp_path.name + "/a")


def test_metrics_come_as_columns_from_a_byte_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    rows = [
        {"step": 1, "time": 5.0, "clipped": 1},
        {"step": 2, "reward": math.nan},
        {"step": 3, "reward": 2.0},
    ]
    for row in rows:
        run.append(METRICS, row)
    with (run.path / METRICS).open("a") as file:
        file.write('nonsense\n[1]\n{"step": 4, "rew')
    part = read_metrics_part(run)
    assert (part.steps, part.times, part.unread) == ([1, 2, 3], [5.0, None, None], 2)
    assert json.loads(part.model_dump_json())["series"] == {
        "clip_fraction": [1, None, None],
        "reward": [None, None, 2],
    }
    with (run.path / METRICS).open("a") as file:
        file.write('ard": 4.0}\n')
    more = read_metrics_part(run, part.offset)
    assert (more.steps, more.series, more.again) == ([4], {"reward": [4.0]}, False)
    run.rewind({METRICS: 20})
    assert read_metrics_part(run, more.offset).again


def test_a_log_from_its_end(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert read_log_part(run).text == ""
    (run.path / LOG).write_bytes(b"one\ntwo\xff\nthree\nhalf a l")
    assert read_log_part(run).text == "one\ntwo\ufffd\nthree\n"
    end = read_log_part(run, -18)
    assert end.text == "three\n" and not read_log_part(run, end.offset).text
    assert read_log_part(run, -1000).text.startswith("one")


BOMB = (
    "environment: {environment_id: search, options: {x: [&a [x,x,x,x,x,x,x,x,x],&b [*a,*a,*a,*a,*a,*a,*a,*a,*a]"
    + "".join(f",&{name} [{','.join(['*' + before] * 9)}]" for before, name in pairwise("bcdefghij"))
)


def test_aliases_in_brackets_are_counted(tmp_path: Path) -> None:
    run, other = made_run(tmp_path, "a"), made_run(tmp_path, "b")
    (run.path / CONFIG).write_text(BOMB + "]}}")
    assert "too large" in (Runs(tmp_path).get_row(run).problem or "")
    assert "too large" in (make_config_view(run).problem or "")
    with pytest.raises(ValueError, match="too large"):
        diff_runs([run, other])


FILES = [METRICS, STATUS, FINDINGS, EVALUATIONS, ENVIRONMENT, CONFIG, LOG, TRAJECTORIES, SPECS_FILE, "lock"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs")
@pytest.mark.parametrize("target", ["fifo", "/dev/zero", "outside"])
@pytest.mark.parametrize("name", FILES)
def test_only_regular_files_of_the_folder_are_read(tmp_path: Path, name: str, target: str) -> None:
    secret = tmp_path / "outside"
    secret.write_text(
        '{"step": 7, "reward": 7.0, "name": "secret", "day": "secret", "tools": [{"name": "secret"}]}\n'
    )
    run = made_run(tmp_path / "runs", "a")
    path = run.path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path) if target == "fifo" else path.symlink_to(tmp_path / target)
    runs = Runs(tmp_path / "runs")
    [row] = runs.list_rows()
    views: list[Callable[[], Any]] = [
        lambda: row, lambda: make_run_view(run, runs), lambda: make_config_view(run), lambda: diff_runs([run, run]),
        lambda: read_metrics_part(run), lambda: read_log_part(run), lambda: EpisodeIndex(run).get_page(Query()),
    ]  # fmt: skip
    for view in views:
        with contextlib.suppress(ValueError, OSError):
            assert "secret" not in view().model_dump_json()
    assert row.reward != 7.0 and (name in (LOG, TRAJECTORIES, SPECS_FILE, "lock", STATUS) or row.problem)


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a")
    (run.path / METRICS).rename(run.path / "kept.metrics")
    (run.path / METRICS).symlink_to("kept.metrics")
    assert Runs(tmp_path).list_rows()[0].problem is None and read_metrics_part(run).steps == [1, 2]


def test_a_line_without_an_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path, "a")
    for module in ("data.disk", "apps.views.files"):
        monkeypatch.setattr(f"TrainingFactory.{module}.MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("TrainingFactory.apps.views.runs.MAX_METRICS_BYTES", 1000)
    for name in (METRICS, EVALUATIONS, TRAJECTORIES):
        (run.path / name).touch()
        os.truncate(run.path / name, 1 << 40)  # takes no room on the disk
    runs = Runs(tmp_path)
    assert "1000 bytes" in (runs.list_rows()[0].problem or "")
    notes = make_run_view(run, runs).notes
    assert len([note for note in notes if "1000 bytes" in note]) == 3, notes
    with pytest.raises(ValueError, match="1000 bytes"):
        read_metrics_part(run, read_metrics_part(run).offset)


def test_a_finding_that_is_none_hides_no_other(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a")
    whole = {"step": 1, "name": "x", "sentence": "s", "remedy": "r", "severity": "warning"}
    for row in ({"step": 3}, whole, {"name": []}, {"name": "x", "gone": True}):
        run.append(FINDINGS, row)
    runs = Runs(tmp_path)
    [row] = runs.list_rows()
    assert (row.state, row.findings, row.algorithm) == ("finished", 1, "grpo")
    assert row.problem == "findings.jsonl: row 1 is not a finding: 'name' is missing"
    view = make_run_view(run, runs)
    assert [each.name for each in view.findings] == ["x"] and len(view.notes) == 3


def test_what_environment_json_says_of_the_model_may_be_nonsense(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a")
    (run.path / ENVIRONMENT).write_text(json.dumps(run.run_info | {"model": 3}))
    view = make_run_view(run, Runs(tmp_path))
    assert view.checkpoints and view.about["digest"] == "d" and ENVIRONMENT in view.notes[0]


def test_findings_that_are_gone_before_they_came_are_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append(FINDINGS, {"step": 2, "name": "x", "gone": True})
    assert list_findings(run) == []


def test_the_command_line_prints_the_same(tfactory: Run) -> None:
    made_run(Path("runs"), "a")
    made_run(Path("runs"), "b")
    (Path("runs/b") / STATUS).unlink()
    runs = Runs("runs")

    def said(*arguments: str) -> object:
        status, out, err = tfactory("runs", *arguments, "--json")
        assert status == 0, err
        return json.loads(out)

    assert said("list") == {"runs": [row.model_dump(mode="json") for row in runs.list_rows()]}
    assert said("show", "a") == make_run_view(runs.find("a"), runs).model_dump(mode="json")
    assert said("compare", "a", "b") == diff_runs([runs.find("a"), runs.find("b")]).model_dump(mode="json")
