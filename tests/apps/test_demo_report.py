"""The HTML report: well-formed, complete in itself, and safe with any text in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.kits.html_report import HOSTILE, SHOWN, parsed, words
from TrainingFactory.apps.demo.report import DemoReport, DemoStats, Trial
from TrainingFactory.common.charts import compute_running_mean
from TrainingFactory.config import TrainingConfig
from TrainingFactory.types import Completion, Message, Reward, Task, ToolCall, Trajectory, Turn


def episode(text: str, won: bool) -> Trajectory:
    calls = [ToolCall("search", {"query": text}), ToolCall(text, error=text)]
    said = Completion([2], [0.0], "stop")
    turns = [Turn([1], said, Message("assistant", tool_calls=calls), [Message("tool", text)])]
    turns += [Turn([1], said, Message("assistant", text))]
    prompt = [Message("system", "rules"), Message("user", text)]
    return Trajectory(Task(text, text, text), "g", prompt=prompt, turns=turns, reward=Reward(float(won)))


def report(text: str, **changed: Any) -> DemoReport:
    given: dict[str, Any] = {
        "folders": ("runs/a & b-warm-start", "runs/a & b"),
        "configs": (TrainingConfig().model_dump(), TrainingConfig(environment="search").model_dump()),
        "seconds": (40.0, 60.0),
        "versions": {text: text},
        "before": DemoStats(200, 0.45, 0.38, 0.52, None, 2.1, {0: 60, 1: 50, 2: 90}),
        "after": DemoStats(200, 0.97, 0.93, 0.99, 0.99, 3.0, {2: 196, 3: 4}),
        "curve": [n / 9 for n in range(10)],
        "trial": Trial(episode(text, False), episode(text, True)),
    }
    return DemoReport(**given | changed)


def test_hostile_text_is_shown_as_text() -> None:
    told = words(parsed(report(f"{HOSTILE}\x00\ud800").render_page()))
    assert told.count(SHOWN) >= 6 and "\\x1b[31m" in told and "\\u202e" in told


def test_a_reader_sees_what_was_learned() -> None:
    text = words(parsed(report("Oslo").render_page().replace("</td>", " </td>").replace("</th>", " </th>")))
    assert "from 45.0% to 97.0%" in text and "chain two lookups" in text
    for row in (
        "success 45.0% (38% to 52%) 97.0%",
        "no calls 99.0%",
        "episode 2.10 3.00",
        "2 calls 45.0% 98.0%",
    ):
        assert row in text
    assert "answer is Oslo" in text and "right" in text
    assert "tfactory rollout search --split heldout --model runs/a & b/model" in text


def test_nothing_is_claimed_that_was_not_measured() -> None:
    good = report("x")
    same = report("x", after=dataclasses.replace(good.after, success=0.5, low=0.43, high=0.57))
    assert "It learned" in good.learned_text and "It learned" not in same.learned_text
    page = words(parsed(same.render_page()))
    assert "did not improve" in page and "learned" not in page


def test_the_curve() -> None:
    [svg] = parsed(report("x", curve=[0.0, 1.0, 0.5]).render_page()).iter("svg")
    heights = [float(circle.attrib["cy"]) for circle in svg.iter("circle")]
    assert heights[1] < heights[2] < heights[0]  # up is better
    assert heights[2] == pytest.approx((heights[0] + heights[1]) / 2)
    line = [point.split(",") for point in next(svg.iter("polyline")).attrib["points"].split()]
    assert len(line) == 3 and float(line[2][1]) == pytest.approx(heights[2], abs=0.1)
    for values in ([], [0.5]):
        parsed(report("x", curve=values).render_page())


def test_running_mean() -> None:
    assert compute_running_mean([1.0, 0.0, 1.0], window=2) == [1.0, 0.5, 0.5]
    assert compute_running_mean([]) == []
