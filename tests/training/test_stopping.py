"""Runs that end by their evaluations, and the checkpoint that did best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kits.run import Quiet, assert_same_run, brief, go_on, train
from TrainingFactory.apps.views.run_tables import label_metrics
from TrainingFactory.config import TrainingConfig
from TrainingFactory.evaluation.records import read_records
from TrainingFactory.runs.folder import RunFolder, Status
from TrainingFactory.runs.scores import Scores


def scores(values: list[float], measure: str = "eval/success", **stop_when: float) -> Scores:
    rows = [{"step": 10 * n, measure: value} for n, value in enumerate(values)]
    return Scores.from_rows([{"step": 5, "reward": 1.0}, *rows], stop_when)


def test_the_first_of_the_best_counts() -> None:
    assert scores([0.1, 0.5, 0.3, 0.5]).best == (10, 0.5)
    assert scores([3.0, 1.0, 2.0], "eval/loss").best == (10, 1.0)
    assert scores([]).best is None and scores([], patience=1).find_stop_reason() is None
    both = Scores.from_rows(
        [{"step": 1, "eval/success": 0.2, "eval/loss": 9.0}, {"step": 2, "eval/loss": 1.0}]
    )
    assert both.points == [(1, 0.2)]  # one metric for the whole run


def test_when_a_run_ends() -> None:
    assert scores([0.1, 0.5, 0.5], patience=2).find_stop_reason() is None
    ended = scores([0.1, 0.5, 0.5, 0.2], patience=2).find_stop_reason()
    assert ended is not None and "0.500 (step 10) for 2 evaluations" in ended
    assert scores([2.0, 1.0, 1.5], "eval/loss", patience=1).find_stop_reason() is not None
    assert scores([0.1, 0.89], target=0.9).find_stop_reason() is None
    assert "reached 0.900 at step 10" in str(scores([0.1, 0.9], target=0.9, patience=5).find_stop_reason())
    assert scores([0.9] * 9).find_stop_reason() is None
    with pytest.raises(ValueError, match=r"eval/loss.*training.stop_when.patience"):
        scores([1.0], "eval/loss", target=0.5).find_stop_reason()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"patience": 0}, "integer of at least 1"),
        ({"patience": 1.5}, "number of evaluations"),
        ({"target": 1.2}, "at most 1"),
        ({"patince": 2}, "did you mean patience"),
    ],
)
def test_options_that_make_no_sense(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TrainingConfig(training={"stop_when": given})


def test_there_must_be_evaluations(tmp_path: Path) -> None:
    for sections, key in (
        ({"training": {"stop_when": {"patience": 1}}}, "training.stop_when"),
        ({"logging": {"output_dir": str(tmp_path), "keep_best": True}}, "logging.keep_best"),
    ):
        with pytest.raises(ValueError, match=f"{key} needs evaluations.*eval_every"):
            train(brief(tmp_path, **sections), "none")


def test_a_run_ends_early_keeps_its_best_and_decides_the_same_when_resumed(tmp_path: Path) -> None:
    config = brief(
        tmp_path,
        training={"max_steps": 9, "eval_every": 1, "stop_when": {"patience": 2}, "seed": 2},
        sampling={"max_tokens": 6},
        data={"heldout_count": 7},
        logging={
            "output_dir": str(tmp_path),
            "checkpoint_every": 2,
            "keep_best": True,
            "keep_checkpoints": 1,
        },
    )
    watcher = Quiet()
    report = train(config, "whole", watcher)
    run = RunFolder(report.run)
    found = Scores.from_rows(run.metrics(), {"patience": 2})
    values, best = [value for _, value in found.points], found.best
    # The environment's rewards are as good as random, so that it ends long before the last step.
    assert report.state == "finished" and report.steps == len(values) - 1 < 9 and best is not None
    assert values.index(max(values)) == best[0] == report.steps - 2
    assert run.status.reason == found.find_stop_reason() and str(run.status.reason) in watcher.said[-1]
    kept = [int(path.name.removeprefix("step-")) for path in run.checkpoints()]
    assert kept == [best[0], report.steps] and best[0] > 0  # with this seed
    assert run.best() == report.best == run.checkpoint_folder(best[0])
    # Broken off in the step after which it would have ended, it ends there when it goes on.
    with pytest.raises(RuntimeError):
        train(config, "broken", Quiet(fail_at=report.steps))
    assert go_on(tmp_path / "broken").state == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    ours, theirs = (read_records(tmp_path / name / "evaluations.jsonl") for name in ("whole", "broken"))
    assert [each.outcomes for each in ours] == [each.outcomes for each in theirs]
    assert RunFolder(tmp_path / "broken").status.reason == run.status.reason
    # Killed when it had just ended, it does nothing more.
    run.write_status(Status("running", report.steps, 9))
    again = go_on(run.path)
    assert (again.state, again.steps, again.rows) == ("finished", report.steps, [])
    assert run.status.reason == found.find_stop_reason()


def test_plain_names_come_first() -> None:
    rows = [
        {
            "step": 1,
            "steps_per_second": 2.0,
            "loss": 1.0,
            "reward": 0.5,
            "tool_success": 1.0,
            "eval/success": 0.5,
        }
    ]
    labels = [label for label, _, _ in label_metrics(rows)]
    assert labels == [
        "steps per second (steps_per_second)",
        "reward",
        "tool-call success (tool_success)",
        "accuracy (eval/success)",
        "loss",
    ]
