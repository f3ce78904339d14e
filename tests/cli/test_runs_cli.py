"""`tfactory runs` on a folder that an earlier version wrote, and among folders that cannot be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.kits.cli import Run
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.learning import learner
from TrainingFactory.runs.folder import RunFolder

BEFORE = Path(__file__).parents[1] / "fixtures" / "run_before"


@pytest.fixture
def before(tfactory: Run) -> Path:
    """A copy of the run in ./runs, with its environment beside it: interrupted after 3 of 4 steps."""
    run = Path("runs/before")
    shutil.copytree(BEFORE, run)
    environment = (run / "parity.py").rename("parity.py").absolute()
    about = json.loads((run / "environment.json").read_text())
    about["files"]["parity.py"]["path"] = str(environment)
    (run / "environment.json").write_text(json.dumps(about))
    return run


def test_a_run_of_an_earlier_version_is_shown(before: Path, tfactory: Run) -> None:
    status, out, err = tfactory("runs", "list")
    assert status == 0 and "before  interrupted  3/4    eval/success 1.000  grpo parity.py" in out, err
    status, out, err = tfactory("runs", "show", "before")
    assert status == 0, err
    for text in ("3 of 4", "grpo in parity.py", "step-000003", "reward", "entropy", "seconds/update"):
        assert text in out
    assert "tfactory runs resume before" in err
    status, out, err = tfactory("runs", "episodes", "before", "--step", "1", "--show", "2")
    assert status == 0 and out.count("member") == 8 and "advantage +" in out, err
    status, out, err = tfactory("export", "before", "--merge", "--out", "model")
    assert status == 0 and Path("model/config.json").is_file(), err


def test_a_run_of_an_earlier_version_goes_on(
    before: Path, tfactory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch drew the built-in weights under its adapter, which differ by processor type: on another one than its own
    the run is rejected in one line. With that check switched off it resumes there too, to results that are alike."""
    identity = before / "checkpoints" / "step-000003" / "learner.json"
    status, _, err = tfactory("runs", "resume", "before")
    same = status == 0
    if not same:
        [line] = [line for line in err.splitlines() if line.startswith("error:")]
        assert "Traceback" not in err and "resumes only on the processor type that started it" in line
        stored = json.loads(identity.read_text())["model"]["frozen"]
        monkeypatch.setattr(learner, "hash_frozen_weights", lambda model: stored)
        status, _, err = tfactory("runs", "resume", "before")
    assert status == 0, err
    run = RunFolder(before)
    assert run.state == "finished" and run.checkpoints()[-1].name == "step-000004"
    metrics = run.metrics()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert all("clip_fraction" in row and "clipped" not in row for row in metrics[1:])  # under today's names
    # As the earlier version itself went on.
    if same:
        assert metrics[-1]["reward"] == 0.25 and metrics[-1]["eval/success"] == 0.0
        assert metrics[-1]["grad_norm"] == pytest.approx(0.946030, rel=1e-3)
    assert metrics[-1]["entropy"] == pytest.approx(6.890465, rel=1e-2)
    assert len(list(load_trajectories(before / "trajectories.jsonl"))) == 32
    status, out, err = tfactory("eval", "before", "--tasks", "2")
    assert status == 0 and "success" in out, err


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("config.yaml", "training: [", "config.yaml"),
        ("config.yaml", "training: {learning_rat: 1}", "learning_rat"),
        ("environment.json", None, "Incomplete run"),
    ],
)
def test_one_unreadable_run_does_not_hide_the_others(
    before: Path, tfactory: Run, file: str, text: str | None, reason: str
) -> None:
    spoilt = Path(shutil.copytree(before, "runs/spoilt")) / file
    spoilt.unlink() if text is None else spoilt.write_text(text)
    Path("runs/rollouts").mkdir()  # no run
    status, out, err = tfactory("runs", "list")
    assert status == 0 and "Traceback" not in err, err
    [whole] = [line for line in out.splitlines() if line.startswith("before")]
    [told] = [line for line in out.splitlines() if line.startswith("spoilt")]
    assert "3/4" in whole and ("unreadable" in told) == (text is None) and "rollouts" not in out
    assert reason in out


@pytest.mark.parametrize("text", ['{"status": "fini', '["finished"]', '{"status": 5}', "", None])
def test_a_status_is_told_from_the_other_files(before: Path, tfactory: Run, text: str | None) -> None:
    path = before / "status.json"
    path.unlink() if text is None else path.write_text(text)
    status, out, err = tfactory("runs", "list")
    assert status == 0 and "before  killed  3/4" in out, out + err
    status, out, err = tfactory("runs", "show", "before")
    assert status == 0 and "killed: cannot read status.json" in out and "runs resume before" in err, err


@pytest.mark.parametrize("command", ["resume", "show"])
@pytest.mark.parametrize("text", ['{"day": ', "[]", "{}", "\x00", None])
def test_a_damaged_run_says_what_is_wrong(
    before: Path, tfactory: Run, command: str, text: str | None
) -> None:
    path = before / "environment.json"
    path.unlink() if text is None else path.write_text(text)
    status, _, err = tfactory("runs", command, "before")
    told = " ".join(err.split())
    assert status == 2 and "runs/before" in told and "environment.json" in told and "Traceback" not in told
    assert ("tfactory train runs/before/config.yaml" if text is not None else "Restore") in told
    assert tfactory("runs", "list")[0] == 0


def test_strange_names_among_checkpoints(before: Path, tfactory: Run) -> None:
    for name in ("step-000003.bak", "step-", "step-x", "step-000009.damaged"):
        (before / "checkpoints" / name).mkdir()
    (before / "checkpoints" / "step-notes.txt").touch()
    assert [path.name for path in RunFolder(before).checkpoints()] == ["step-000003"]
    assert tfactory("runs", "show", "before")[0] == 0


def test_the_whole_run_is_plotted(before: Path, tfactory: Run) -> None:
    rows = [{"step": n, "loss": 5.0 if n <= 100 else 1.0} for n in range(1, 201)]
    (before / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "█" * 20 + "▁" * 20 in tfactory("runs", "show", "before")[1]


@pytest.mark.parametrize(
    ("lines", "objects", "told"),
    [
        ("environment: weather.py", [], "grpo in weather.py"),
        ("training: {algorithm: sft}\ndata: {dataset: chats.jsonl}", [], "sft on chats.jsonl"),
        ("training: {algorithm: grpo}", ["tools", "tasks"], "grpo with tools and tasks from Python"),
    ],
)
def test_what_a_run_learns_from(
    before: Path, tfactory: Run, lines: str, objects: list[str], told: str
) -> None:
    (before / "config.yaml").write_text(lines)
    about = json.loads((before / "environment.json").read_text())
    (before / "environment.json").write_text(json.dumps(about | {"objects": objects}))
    out = tfactory("runs", "show", "before")[1]
    assert told in out and "no environment" not in out
