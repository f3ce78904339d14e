"""What a run and the doctor report about folding."""

from __future__ import annotations

from typing import Any

import pytest

from TrainingFactory.config.schema import ContextSection
from TrainingFactory.runs.finding_rules import FindingTracker
from TrainingFactory.training.forecasts import forecast_rows

STEP = {"seconds/step": 1.0, "episodes": 8.0, "episodes/truncated": 0.0, "fold/folds": 2.0, "fold/rows": 3.0}


def findings(*steps: dict[str, float]) -> set[str]:
    tracker = FindingTracker()
    changes = [
        change for number, step in enumerate(steps) for change in tracker.look(number, STEP | step, ())
    ]
    return {change.name for change in changes if change.finding is not None}


@pytest.mark.parametrize(
    ("name", "metrics", "healthy"),
    [
        ("fold_loses_task", {"fold/task_lost": 3.0}, {"fold/task_lost": 0.0}),
        ("folds_every_turn", {"fold/every_turn": 0.9}, {"fold/every_turn": 0.1}),
        ("summaries_grow", {"fold/summaries_cut": 0.8}, {"fold/summaries_cut": 0.1}),
    ],
)
def test_three_bad_steps_are_reported(name: str, metrics: Any, healthy: Any) -> None:
    assert findings(*[metrics] * 3) == {name}
    assert not findings(*[healthy] * 3) and not findings(*[metrics] * 2)


def test_summaries_that_grow() -> None:
    assert findings(*[{"fold/summary_tokens": 20.0}] * 6, *[{"fold/summary_tokens": 40.0}] * 3) == {
        "summaries_grow"
    }
    assert not findings(*[{"fold/summary_tokens": 20.0}] * 6, *[{"fold/summary_tokens": 25.0}] * 3)


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
