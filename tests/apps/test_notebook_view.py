"""Runs, trainers and episodes as a notebook displays them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from TrainingFactory.common.charts import Chart, Curve
from TrainingFactory.runs.folder import TrainingReport
from TrainingFactory.runs.notebook_view import episodes_table, make_charts, make_default_watcher, render_run
from TrainingFactory.runs.tracking import PlainLines
from TrainingFactory.trainers.trainers import GRPOTrainer
from TrainingFactory.types import Completion, Message, Reward, Task, Trajectory, Turn

HOSTILE = "<script>alert(1)</script>\x1b[2J"
ROWS = [
    {"step": 1.0, "reward": 0.25, "loss": 0.5},
    {"step": 2.0, "reward": 0.75, "loss": 0.1, "eval/success": 1.0},
]


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html.replace("&nbsp;", " "))


def labels(element: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in element.iter("text")]


def test_a_report_is_a_table_and_charts_with_labelled_axes() -> None:
    report = TrainingReport(Path("runs/first"), 2, "finished", metrics=ROWS[-1], rows=ROWS)
    root = parsed(report._repr_html_())
    cells = ["".join(cell.itertext()) for cell in root.iter("td")]
    assert cells[:3] == ["runs/first", "finished", "2"] and "reward 0.750" in cells[3]
    reward, success, loss = root.iter("svg")
    assert labels(reward) == ["0.25", "0.5", "0.75", "1", "2", "step", "reward"]
    assert labels(success)[-1] == "held-out success" and labels(loss)[-1] == "loss"
    assert (
        repr(report) == "TrainingReport(run=PosixPath('runs/first'), steps=2, state='finished', version=None)"
    )


def test_charts_take_the_colour_of_the_page_and_its_width() -> None:
    html = render_run("a run", [], ROWS)
    assert html.count('fill="currentColor"') == html.count("<svg") == 3
    assert html.count("width:100%;max-width:") == 3


def test_a_single_step_is_a_dot() -> None:
    [chart] = make_charts([{"step": 1.0, "loss": 0.5}])
    [dot] = parsed(chart.draw()).iter("circle")
    assert float(dot.attrib["cx"]) == Chart.left


def test_curves_that_share_a_chart_have_a_legend() -> None:
    rows = [{"step": float(step), "loss": 1 / step, "eval/loss": 2 / step} for step in (1, 2)]
    assert "training" in render_run("a run", [], rows) and "held-out" in render_run("a run", [], rows)
    assert "training" not in render_run("a run", [], ROWS[:1])


def test_hostile_texts_stay_texts() -> None:
    turn = Turn([1], Completion([2], [0.0], "stop"), Message("assistant", HOSTILE))
    episode = Trajectory(Task("t", HOSTILE, "x"), "0/t", prompt=[Message("user", HOSTILE)], turns=[turn])
    episode.reward = Reward(1.0)
    pages = [
        episodes_table([episode])._repr_html_(),
        render_run(HOSTILE, [("run", HOSTILE)], [], [HOSTILE]),
        Chart(HOSTILE, [Curve(HOSTILE, [(1, 1.0)])]).draw(),
    ]
    for page in pages:
        assert "<script" not in page and "\x1b" not in page and "&lt;script&gt;" in page


def test_long_lists_of_episodes_are_cut() -> None:
    episodes = [Trajectory(Task(str(number), "?"), "0/t") for number in range(5)]
    html = episodes_table(episodes, limit=2)._repr_html_()
    assert html.count("<tr>") == 3 and "3 more episodes are not shown" in html


def test_a_trainer_shows_what_it_trains() -> None:
    def temperature(city: str) -> str:
        """The temperature of a city."""
        return city

    trainer = GRPOTrainer(
        "builtin:tiny", tools=[temperature], tasks=[Task("a", "How warm?", "4")], max_steps=3
    )
    assert (
        repr(trainer) == "GRPOTrainer(model='builtin:tiny', tools='temperature', tasks='1 task', steps='3')"
    )
    text = " ".join(parsed(trainer._repr_html_()).itertext())
    assert "GRPOTrainer" in text and "temperature" in text


def test_outside_a_notebook_progress_is_lines() -> None:
    assert isinstance(make_default_watcher(), PlainLines)
