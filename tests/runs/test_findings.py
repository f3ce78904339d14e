"""What is going wrong in a run is said in words, once, and a healthy run hears nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kits.run import Offering, Quiet, brief, go_on, rows, small, train
from TrainingFactory.apps.views.runs import list_findings
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.runs.finding_rules import FINDING_RULES, FindingTracker, find_unparsed_call
from TrainingFactory.runs.findings import FindingChange
from TrainingFactory.runs.folder import FINDINGS, RunFolder
from TrainingFactory.training.source import compute_metrics
from TrainingFactory.types import (
    Completion,
    Group,
    Message,
    Reward,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)

HEALTHY = {
    "seconds/step": 1.0, "episodes": 16, "episodes/truncated": 1, "tools_offered": 2, "episodes/called": 12,
    "rows": 16, "reward": 0.5, "reward_std": 0.5, "accuracy": 0.5, "entropy": 0.3, "length": 40.0, "grad_norm": 0.2,
    "reward_right": 1.5, "reward_wrong": 0.7,
    "logprob_diff": 1e-6, "tool_success": 0.9, "judge/requests": 16, "judge/cached": 0, "judge/failed_timeout": 1,
    "environment/crashes": 0,
    "fold/task_lost": 0, "fold/every_turn": 0.1, "fold/summary_tokens": 20.0, "fold/summaries_cut": 0.1,
}  # fmt: skip
# finding -> what a step that shows it has
PROVOKED: dict[str, dict[str, float]] = {
    "no_tool_called": {"episodes/called": 0},
    "most_truncated": {"episodes/truncated": 9},
    "tied_groups": {"rows": 0},
    "wrong_rewarded": {"reward_wrong": 0.8},
    "entropy_collapse": {"entropy": 0.02},
    "length_explosion": {"length": 81.0},
    "logprob_gap": {"logprob_diff": 0.06},
    "gradient_jump": {"grad_norm": 1.1},
    "judge_failing": {"judge/failed_timeout": 4},
    "most_filtered": {"filters/dropped": 0.9},
    "tool_success_falling": {"tool_success": 0.6},
    "tools_failing": {"tool_success": 0.05},
    "forks_dropped": {"branching/dropped": 3},
    "budget_exceeded": {"budget_excess": 1.5},
    "environment_crashes": {"environment/crashes": 1},
    "fold_loses_task": {"fold/task_lost": 3},
    "folds_every_turn": {"fold/every_turn": 0.9},
    "summaries_grow": {"fold/summary_tokens": 40.0},
}


def told(table: FindingTracker, first: int, count: int, **changed: float) -> list[FindingChange]:
    changes = []
    for step in range(first, first + count):
        changes += table.observe(step, HEALTHY | changed, ())
    return changes


@pytest.mark.parametrize("name", PROVOKED)
def test_each_finding_is_said_once_until_it_has_gone(name: str) -> None:
    table = FindingTracker()
    assert told(table, 1, 10) == []
    assert told(table, 11, 2, **PROVOKED[name]) == []  # two steps are no pattern
    said = {change.name: change for change in told(table, 13, 1, **PROVOKED[name])}
    assert said[name].step == 13 and said[name].finding is not None
    assert told(table, 14, 4, **PROVOKED[name]) == []
    gone = told(table, 18, 6)
    assert [change.name for change in gone if change.name == name] == [name]
    assert all(change.finding is None for change in gone)
    assert name in {change.name for change in told(table, 24, 3, **PROVOKED[name])}  # it is back


@pytest.mark.parametrize("interruption", [{"episodes/called": 1}, {"episodes/called": 12}])
def test_single_step_with_calls_is_no_recovery(interruption: dict[str, float]) -> None:
    tracker, silent = FindingTracker(), {"episodes": 256, "episodes/called": 0}
    assert [change.name for change in told(tracker, 1, 3, **silent)] == ["no_tool_called"]
    for step in (4, 8, 10, 20):
        assert told(tracker, step, 1, **silent | interruption) == told(tracker, step + 1, 3, **silent) == []
    [gone] = told(tracker, 30, 3, **silent | {"episodes/called": 12})
    assert gone.step == 32 and gone.finding is None


def test_few_calls_count_as_none() -> None:
    [change] = told(FindingTracker(), 1, 3, **{"episodes": 256, "episodes/called": 2})
    assert change.finding is not None and "Only 6 of 768 episodes called a tool" in change.finding.sentence
    assert told(FindingTracker(), 1, 3, **{"episodes": 256, "episodes/called": 3}) == []


def test_every_check_is_provoked_and_has_its_place_in_the_docs() -> None:
    by_evaluations = {"heldout_falling"}
    assert {check.name for check in FINDING_RULES} == {*PROVOKED} | by_evaluations
    page = (Path(__file__).parents[2] / "docs" / "DOCTOR.md").read_text(encoding="utf-8")
    assert {check.name for check in FINDING_RULES} <= {*re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)}


def test_held_out_success_below_that_of_the_first_evaluation() -> None:
    def evaluated(success: float) -> dict[str, float]:
        return {
            "eval/success": success,
            "eval/success_low": success - 0.1,
            "eval/success_high": success + 0.1,
        }

    tracker = FindingTracker()
    assert tracker.observe(0, evaluated(0.5), ()) == []  # before the first step
    assert told(tracker, 1, 9) == told(tracker, 10, 1, **evaluated(0.35)) == []  # the intervals overlap
    [change] = told(tracker, 20, 1, **evaluated(0.25))
    assert change.finding is not None and "from 0.5 to 0.25" in change.finding.sentence
    assert told(tracker, 21, 9) == told(tracker, 30, 1, **evaluated(0.2)) == []  # reported once
    [gone] = told(tracker, 31, 1, **evaluated(0.45)) + told(tracker, 32, 4)
    assert (gone.name, gone.step, gone.finding) == ("heldout_falling", 33, None)


def test_what_looks_alike_and_is_healthy() -> None:
    solved = {"entropy": 0.01, "accuracy": 1.0, "reward": 1.0, "reward_std": 0.0, "rows": 0}
    longer = {"length": 90.0, "reward": 0.6}  # and better
    for steps in (solved, longer, {"tools_offered": 0, "episodes/called": 0}):
        table = FindingTracker()
        told(table, 1, 10)
        assert told(table, 11, 5, **steps) == []
    assert [change.name for change in told(FindingTracker(), 1, 3, **solved)] == [
        "tied_groups"
    ]  # there was nothing to learn
    # several updates of a step move the learner away from what was sampled
    assert told(FindingTracker(num_updates=4), 1, 5, logprob_diff=0.1) == []
    stale = {"logprob_diff": 0.3, "staleness_gap": 0.3}  # as it must be
    assert told(FindingTracker(), 1, 5, **stale) == told(FindingTracker(), 1, 5, **stale, mismatch=0.01) == []
    assert (
        told(FindingTracker(), 1, 5, **stale, mismatch=0.06)
        == told(FindingTracker(), 1, 5, logprob_diff=0.06)
        != []
    )


def test_a_gradient_that_is_not_finite() -> None:
    [change] = told(FindingTracker(), 1, 3, skipped=1.0, grad_norm=float("nan"))
    assert change.finding is not None and "not finite" in change.finding.sentence


def said(text: str, calls: int = 0, thought: str | None = None) -> Trajectory:
    message = Message("assistant", text, [ToolCall("search")] * calls, reasoning=thought)
    turn = Turn([1], Completion([2], [0.0], "stop"), message)
    return Trajectory(Task("t", "?"), "g", tools=[ToolSpec("search")], turns=[turn], reward=Reward(0.0))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "search"}', "<|python_tag|>x", '[TOOL_CALLS] [{"x": 1}]', '{"name": "f"}',
        "I will\nAction: search", "search(query='x')", '<function=search>{"a": 1}',
    ],
)  # fmt: skip
def test_text_that_looks_like_a_call(text: str) -> None:
    example = find_unparsed_call([said("No call."), said("Well. " + text)])
    assert example is not None and text.split("\n")[0] in example
    assert find_unparsed_call([said("", thought=text)]) is not None
    assert find_unparsed_call([said(text, calls=1), said("I would search for the name of it.")]) is None


def test_metrics_tell_what_wrong_episodes_earn() -> None:
    def earned(*rewards: Reward) -> dict[str, float]:
        group = [replace(said("x"), reward=reward) for reward in rewards]
        found = compute_metrics([Group(0, group, [], 0, 0)], 1.0, None)
        return {
            name: value for name, value in found.items() if name.startswith("reward_") and "std" not in name
        }

    right, wrong, better = Reward(1.0, [0.5]), Reward(0.0, [0.7]), Reward(0.0, [0.1])
    assert earned(right, wrong, better) == pytest.approx({"reward_right": 1.5, "reward_wrong": 0.4})
    assert earned(right) == {"reward_right": 1.5} and earned(Reward(1.0), Reward(0.0)) == {}


def test_metrics_tell_who_calls() -> None:
    found = rollout_metrics([said("x"), said("y", calls=2)])
    assert (found["tools_offered"], found["episodes/called"]) == (1, 1)


class Same(Offering):
    def reward(self, episode: Any) -> float:
        return 0.0


def test_a_run_says_what_it_sees_and_goes_on_saying_it(tmp_path: Path) -> None:
    """An untrained model calls no tool, and a reward that is always the same teaches nothing."""
    watcher = Quiet()
    report = train(brief(tmp_path), "a", watcher, environment=Same)
    names = [f"FINDING step 3: {name}: " for name in ("no_tool_called", "most_truncated", "tied_groups")]
    heard = [text for text in watcher.said if text.startswith("FINDING")]
    assert len(heard) == 3 and all(map(str.startswith, heard, names)) and "same reward (0)" in heard[2]
    lines = rows(report.run / FINDINGS)
    assert [(line["step"], line["severity"]) for line in lines] == [(3, "warning")] * 3
    told = [(found.when, found.name) for found in list_findings(RunFolder(report.run))]
    assert told[2] == ("since step 3", "tied_groups")
    # a run that was broken off says the same at the same steps, and what it had said before only once
    broken = tmp_path / "b"
    with pytest.raises(RuntimeError, match="broken off"):
        train(brief(tmp_path), "b", Quiet(fail_at=4), environment=Same)
    go_on(broken, Same)
    assert rows(broken / FINDINGS) == lines


class Fading(Offering):
    """Rewards the four episodes of the first evaluation, and none after them."""

    num_scored = 0

    def reward(self, episode: Any) -> float:
        Fading.num_scored += 1
        return float(Fading.num_scored <= 4)


def test_a_run_compares_with_the_evaluation_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fading, "num_scored", 0)
    watcher = Quiet()
    config = brief(tmp_path, training={"eval_every": 4}, data={"heldout_count": 4})
    train(config, "a", watcher, environment=Fading)
    [heard] = [text for text in watcher.said if "heldout_falling" in text]
    assert heard.startswith("FINDING step 4: ") and "from 1 to 0" in heard


def test_findings_have_their_steps(tmp_path: Path) -> None:
    finding = {"sentence": "s", "remedy": "r", "severity": "warning"}
    names = [(3, "a", {}), (4, "b", {}), (9, "a", {"gone": True}), (12, "a", {})]
    names += [(13, "c", {}), (14, "c", {"gone": True})]
    for step, name, more in names:
        RunFolder(tmp_path).append(FINDINGS, {"step": step, "name": name} | (more or finding))
    told = [(found.when, found.name) for found in list_findings(RunFolder(tmp_path))]
    # one that comes and goes is told once
    assert told == [
        ("since step 12, 2 times in total", "a"), ("since step 4", "b"), ("steps 13 to 13, resolved", "c"),
    ]  # fmt: skip


def test_calls_that_nobody_reads_are_shown(warm: Path, tmp_path: Path) -> None:
    """The model writes calls in its own form, and the config reads those of another family."""
    from tests.kits.warm import SECTIONS, Homes

    model = {"name": str(warm), "family": "deepseek", "max_length": 512}
    config = small(tmp_path, **SECTIONS | {"model": model, "training": {"max_steps": 3, "batch_size": 2}})
    watcher = Quiet()
    train(config, "a", watcher, environment=Homes)
    [heard] = [text for text in watcher.said if "no_tool_called" in text]
    assert "<tool_call>" in heard and "model.family" in heard
