"""A run as a page, in a terminal, and its episodes in the trackers."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.html_report import HOSTILE, SHOWN, parsed, words
from tests.kits.run import small, train
from TrainingFactory.apps.views.run_report import make_charts, render_run_page
from TrainingFactory.assembly import trackers
from TrainingFactory.cli.display import plot, sparkline
from TrainingFactory.common.charts import Chart, Curve, thin_out
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.runs.episode_texts import pick_best_and_worst
from TrainingFactory.runs.folder import FINDINGS, METRICS, TRAJECTORIES, RunFolder
from TrainingFactory.types import Completion, Message, Reward, Task, ToolCall, Trajectory, Turn


def test_every_curve_of_a_run() -> None:
    names = (
        "loss",
        "accuracy",
        "kl",
        "entropy",
        "clip_fraction",
        "grad_norm",
        "length",
        "length_max",
        "tool_success",
    )
    seconds = ("seconds/generate", "seconds/update", "seconds/reward", "eval/seconds")
    row = dict.fromkeys((*names, *seconds, "reward", "reward_std", "eval/success"), 0.5)
    row |= {"eval/success_low": 0.4, "eval/success_high": 0.6}
    found = {chart.title: chart for chart in make_charts([row | {"step": step} for step in (1, 2, 3)])}
    assert [len(chart.curves) for chart in found.values()] == [1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 4]
    [reward], [heldout] = (found[title].curves for title in list(found)[:2])
    assert [*reward.low] == [(1, 0.0), (2, 0.0), (3, 0.0)] and [*heldout.high] == [
        (1, 0.6),
        (2, 0.6),
        (3, 0.6),
    ]
    assert make_charts([{"step": 0}]) == []


def test_places_on_the_sheet() -> None:
    chart = Chart(
        "x", [Curve("a", [(1, 0.0), (2, float("nan")), (3, 1.0)], low=[(1, -1.0)], high=[(3, 1.0)])]
    )
    assert (chart.bottom, chart.top, chart.first_step, chart.last_step) == (-1.0, 1.0, 1, 3)
    (left, middle), (right, top) = chart.to_pixels(chart.curves[0].points)
    assert (
        left < right
        and [height for height, _ in chart.grid_lines] == [196, middle, top]
        and middle == (196 + top) / 2
    )
    many = thin_out([(step, float(step)) for step in range(9_600)])
    assert len(many) == 320 and sum(value for _, value in many) / 320 == 4799.5


def episode(text: str, reward: float | None) -> Trajectory:
    calls = [ToolCall("search", {"query": text})]
    turn = Turn(
        [1], Completion([2], [0.0], "stop"), Message("assistant", text, calls), [Message("tool", text)]
    )
    scored = None if reward is None else Reward(reward, parts={text: reward})
    prompt = [Message("system", "rules"), Message("user", text)]
    return Trajectory(Task(text, text), f"0/{text}", prompt=prompt, turns=[turn], reward=scored, error=text)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunFolder:
    """A finished run, with a finding."""
    shutil.copytree(whole, tmp_path / "runs" / "done")
    return RunFolder(tmp_path / "runs" / "done")


def test_the_page_of_a_run(run: RunFolder, tfactory: Run) -> None:
    status, _, err = tfactory("runs", "report", "done")
    assert status == 0 and "runs/done/run.html" in err
    root = parsed((run.path / "run.html").read_text(encoding="utf-8"))
    told = words(root)
    assert len(list(root.iter("svg"))) >= 7 and "Seconds by phase" in told and "output_dir" in told
    assert (
        "most_truncated (since step 3)" in told and "Step 1, best: task" in told and "Step 4, worst" in told
    )
    status, out, err = tfactory("runs", "show", "done")
    assert status == 0 and "reward, steps 1 to 4" in out and "warning, since step 3: most_truncated" in err


def test_text_of_others_is_text(run: RunFolder) -> None:
    save_trajectories(run.path / TRAJECTORIES, [episode(HOSTILE, 1.0), episode(HOSTILE, 0.0)])
    finding = {"name": "no_tool_called", "sentence": HOSTILE, "remedy": HOSTILE, "severity": "warning"}
    (run.path / FINDINGS).write_text(json.dumps({"step": 3} | finding) + "\n", encoding="utf-8")
    assert words(parsed(render_run_page(run))).count(SHOWN) >= 8


def test_a_run_with_nothing_to_show(run: RunFolder) -> None:
    for name in (METRICS, TRAJECTORIES, FINDINGS):
        (run.path / name).unlink()
    assert "No problems found" in words(parsed(render_run_page(run)))


def test_best_and_worst() -> None:
    low, high, none = episode("a", 0.0), episode("b", 1.0), episode("c", None)
    assert pick_best_and_worst([low, none, high]) == {"best": high, "worst": low}
    assert pick_best_and_worst([none, low, low]) == {"all alike": low}
    assert pick_best_and_worst([none]) == {"not scored": none} and pick_best_and_worst([]) == {}


def test_plots() -> None:
    assert sparkline([0.0, 7.0]) == "▁█" and sparkline([1.0]) == "▁"
    lines = plot([0.0, 5.0, 10.0], height=3)
    assert lines == ["  █", " ▅█", "▁██"]
    assert len(plot(list(map(float, range(1000))))[0]) == 72


class Noted(types.ModuleType):
    """Stands for wandb and for torch.utils.tensorboard, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__("noted")
        self.told: list[Any] = []

    def init(self, **options: Any) -> Noted:
        return self

    def SummaryWriter(self, folder: str) -> Noted:
        return self

    def Table(self, **given: Any) -> dict[str, Any]:
        return given

    def log(self, row: dict[str, Any], step: int) -> None:
        self.told.append((step, row))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.told.append((step, name, text))


def test_episodes_in_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, table = Noted(), Noted()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", table)
    config = small(tmp_path, logging={"trackers": ["tensorboard", "wandb"]})
    run = RunFolder.create(config, "a", {})
    run.unlock()
    both = trackers.Trackers(run.path, config)
    both.episodes(7, [episode("Oslo\x1b", 1.0), episode("<b>", 0.0)])
    [(step, name, text), (_, other, _)] = board.told
    assert (step, name, other) == (7, "episodes/best", "episodes/worst")
    lines = text.split("\n")
    assert all(line.startswith("    ") for line in lines) and "    user: Oslo\\x1b" in lines
    [(step, row)] = table.told
    assert step == 7 and [each[:2] for each in row["episodes"]["data"]] == [[7, "best"], [7, "worst"]]
    assert "calls: search" in row["episodes"]["data"][0][2]


def test_a_run_hands_over_episodes_when_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(trackers.Trackers, "episodes", lambda self, step, episodes: told.append(step))
    report = train(small(tmp_path, training={"max_steps": 3, "batch_size": 1}), "a")
    assert told == [1, 2, 3] and report.state == "finished"
