"""`tfactory runs delete`, `archive`, `rename`, `tag` and `note`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kits.cli import Run
from tests.kits.registry import made_run
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.registry.lineage import make_run_node
from TrainingFactory.runs.annotations import ANNOTATIONS_FILE
from TrainingFactory.runs.folder import RunFolder, Status

RUNS = Path("runs")


@pytest.fixture
def parent(tfactory: Run) -> RunFolder:
    """A run from which `child` was started, which registered a model."""
    parent = made_run(RUNS, "parent")
    Catalogue(get_registry_path(RUNS)).add(
        "agent", parent.checkpoint_folder(2), make_run_node(parent, parent.checkpoint_folder(2))
    )
    made_run(RUNS, "child", model={"name": "parent@step-2"})
    return parent


def test_tags_notes_and_the_archive(tfactory: Run) -> None:
    run = made_run(RUNS, "one")
    assert tfactory("runs", "tag", "one", "baseline", "team=search")[:2] == (0, "baseline\nteam=search\n")
    assert tfactory("runs", "tag", "one", "--remove", "team")[:2] == (0, "baseline\n")
    assert tfactory("runs", "note", "one", "compare with sft")[0] == 0
    assert tfactory("runs", "note", "one")[1] == "compare with sft\n"
    assert tfactory("runs", "archive", "one")[0] == 0
    status, out, err = tfactory("runs", "list")
    assert status == 0 and "one" not in out and "1 archived run hidden" in err
    [row] = json.loads(tfactory("runs", "list", "--json")[1])["runs"]
    assert (row["tags"], row["note"], row["archived"]) == ({"baseline": ""}, "compare with sft", True)
    assert "[baseline]" in tfactory("runs", "list", "--archived")[1]
    out = tfactory("runs", "show", "one")[1]
    assert "baseline" in out and "compare with sft" in out
    assert tfactory("runs", "archive", "one", "--undo")[0] == 0 and "one" in tfactory("runs", "list")[1]
    for mistake, text in (
        (["a b"], "invalid tag 'a b'"),
        (["x=a\nb"], "one line"),
        (["--remove", "x"], "baseline"),
    ):
        status, _, err = tfactory("runs", "tag", "one", *mistake)
        assert status == 2 and text in err
    (run.path / ANNOTATIONS_FILE).write_text("[]")
    assert ANNOTATIONS_FILE in tfactory("runs", "note", "one")[2]
    assert ANNOTATIONS_FILE in tfactory("runs", "list")[1]  # the run is listed with its problem


def test_a_deleted_run_is_gone_and_nothing_else(tfactory: Run) -> None:
    made_run(RUNS, "one")
    made_run(RUNS, "two")
    made_run(Path("elsewhere"), "far")
    status, _, err = tfactory("runs", "delete", "one")
    assert status == 2 and "--yes" in err and (RUNS / "one").is_dir()  # not a terminal
    status, _, err = tfactory("runs", "delete", "elsewhere/far", "--yes")
    assert status == 2 and "elsewhere/far is not a folder in runs" in err
    (RUNS / "link").symlink_to(Path("elsewhere/far").resolve())
    assert tfactory("runs", "delete", "link", "--yes")[0] == 2 and Path("elsewhere/far/config.yaml").is_file()
    status, out, err = tfactory("runs", "delete", "one", "--yes")
    assert status == 0 and "deleted one" in out, err
    assert sorted(path.name for path in RUNS.iterdir()) == ["link", "two"]


def test_a_running_run_stays(tfactory: Run) -> None:
    run = RunFolder(made_run(RUNS, "one").path)
    run.write_status(Status("running", 1, 2))
    run.lock()
    for command in (("delete", "one", "--yes", "--force"), ("rename", "one", "other")):
        status, _, err = tfactory("runs", *command)
        assert status == 2 and "tfactory runs stop one" in err
    run.unlock()
    assert (RUNS / "one" / "config.yaml").is_file()


def test_a_run_that_others_need_stays(parent: RunFolder, tfactory: Run) -> None:
    child = RunFolder(RUNS / "child")
    child.write_status(Status("interrupted", 1, 2))
    needed = "run child uses checkpoints/step-000002"
    for command in (("delete", "parent", "--yes"), ("rename", "parent", "other")):
        status, _, err = tfactory("runs", *command)
        assert (
            status == 2 and f"{needed}. " in err and "agent:1" in err + "agent:1" * (command[0] == "rename")
        )
    replayed = json.loads((child.path / "environment.json").read_text())
    replayed["replay"], replayed["model"] = str(parent.path.resolve()), None
    (child.path / "environment.json").write_text(json.dumps(replayed))
    assert "its recorded tool calls" in tfactory("runs", "delete", "parent", "--yes")[2]
    assert tfactory("runs", "delete", "parent", "--yes", "--force")[0] == 0


def test_a_finished_run_needs_its_parent_no_more(parent: RunFolder, tfactory: Run) -> None:
    status, out, err = tfactory("runs", "rename", "parent", "base")
    assert status == 0 and "renamed to base" in out, err
    assert RunFolder(RUNS / "base").state == "finished" and not parent.path.exists()
    assert tfactory("runs", "rename", "base", "child")[0] == 2  # exists
    assert tfactory("runs", "rename", "base", "../x")[0] == 2


def test_an_adapter_needs_its_base(tfactory: Run) -> None:
    made_run(RUNS, "base")
    made_run(RUNS, "lora", adapter=True, model={"name": "base"}, lora={"enabled": True})
    status, _, err = tfactory("runs", "delete", "base", "--yes")
    assert status == 2 and "run lora uses checkpoints/step-000002" in err
