"""What a run and the doctor report about folding."""

from __future__ import annotations

from typing import Any

import pytest

from TrainingFactory.apps.doctor.checks import check_folding
from TrainingFactory.config import load_config
from TrainingFactory.config.schema import ContextSection
from TrainingFactory.runs.diagnosis import Diagnosis
from TrainingFactory.runs.finding_rules import FindingTracker
from TrainingFactory.training.forecasts import forecast_rows
from TrainingFactory.types import Completion, Message, Task, Trajectory, Turn


def test_summaries_that_are_cut() -> None:
    step = {"seconds/step": 1.0, "fold/summaries_cut": 0.8}
    tracker = FindingTracker()
    changes = [change for number in range(3) for change in tracker.observe(number, step, ())]
    assert [change.name for change in changes] == ["summaries_grow"]
    assert changes[0].finding is not None and "summary_tokens" in changes[0].finding.sentence


@pytest.mark.parametrize(
    ("context", "rows"),
    [
        (
            {"fold": "window", "limit": 300, "keep_turns": 1},
            5,
        ),  # 100 200 300 400|200 300 400|200 300 400|200 ...
        ({"fold": "window", "limit": 5000, "keep_turns": 1}, 1),
        ({"fold": "summary", "limit": 300, "summary_tokens": 50}, 5),
        ({"fold": "window", "limit": 300, "keep_turns": 1, "max_folds": 2}, 3),
    ],
)
def test_the_forecast_of_rows(context: Any, rows: int) -> None:
    assert forecast_rows(ContextSection(**context), 100, 100, 11) == rows


@pytest.mark.parametrize(
    ("metrics", "finding", "words"),
    [
        ({"branching/dropped": 3.0, "branching/forks": 5.0}, ["forks_dropped"], "3 forks"),
        ({"branching/dropped": 0.0}, ["forks_dropped"], "no episode forked"),
        ({"branching/dropped": 0.0, "branching/forks": 5.0}, [], ""),
        ({"budget_excess": 1.8}, ["budget_exceeded"], "1.8 times training.token_budget"),
    ],
)
def test_dropped_forks_and_passes_over_the_budget(
    metrics: dict[str, float], finding: list[str], words: str
) -> None:
    tracker = FindingTracker()
    step = {"seconds/step": 1.0} | metrics
    changes = [change for number in range(3) for change in tracker.observe(number, step, ())]
    assert [change.name for change in changes] == finding
    assert all(change.finding is not None and words in change.finding.sentence for change in changes)


def test_the_doctor_reports_rows_per_episode_and_missing_room() -> None:
    """Each turn adds 100 tokens to a prompt of 100; the second of the two dry episodes was folded once."""
    plain = Trajectory(Task("t", "?"), "g", turns=[written(100), written(200)])
    folded = Trajectory(Task("t", "?"), "g", turns=[written(100), written(200), written(150, fold="window")])
    context = ContextSection(fold="window", limit=300, keep_turns=1)
    config = load_config(None, ["environment.max_turns=11", "sampling.max_reply_tokens=1000"])
    diagnosis = Diagnosis()
    check_folding(diagnosis, [plain, folded], context, config, 1000)
    fact = diagnosis.facts["folding"]
    assert (
        "window above 300 tokens: 1.5 rows per episode" in fact and "11 turns with about 100 tokens" in fact
    )
    assert [finding.name for finding in diagnosis.findings] == ["fold_room"]
    check_folding(roomy := Diagnosis(), [plain, folded], context, config, 1300)
    assert not roomy.findings
    check_folding(empty := Diagnosis(), [], context, config, 1300)
    assert not empty.facts


def written(prompt_tokens: int, fold: str | None = None) -> Turn:
    completion = Completion([1], [0.0], "stop")
    prompt = [2 if fold else 1] * prompt_tokens
    return Turn(prompt, completion, Message("assistant", "a"), fold=fold)
