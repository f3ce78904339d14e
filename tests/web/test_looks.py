"""The pages in a real Chromium: figures, charts, layout at three widths, and feedback."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.kits.browser import Browser, Tab
from tests.kits.page import Served
from tests.kits.registry import made_run
from TrainingFactory.runs.folder import METRICS
from TrainingFactory.web.site import STATIC_FOLDER

pytestmark = pytest.mark.xdist_group("browser")

LONG = "a-long-name-" + "x" * 110
# Pixels of a chart's lines and points: blue, while frame, grid and numbers are grey.
COLOURED = """(title) => {
  const chart = [...document.querySelectorAll(".chart")].find((it) => it.querySelector("h3").innerText == title);
  const { width, height } = chart.querySelector("canvas");
  const { data } = chart.querySelector("canvas").getContext("2d").getImageData(0, 0, width, height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += data[at + 3] > 200 && data[at + 2] - data[at] > 80;
  return [count, width];
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("looks") / "runs"
    made_run(runs, LONG)
    one = made_run(runs, "one", (1,))
    one.append(METRICS, {"step": 1, "time": 1e9, "reward": 0.25, "kl": 0.0})
    sft = made_run(runs, "sft", (1,), training={"algorithm": "sft"}, environment={"environment_id": None})
    for step in range(2, 132):
        loss = 0.1219 if step == 131 else 2 / step
        sft.append(
            METRICS, {"step": step, "time": 1e9 + step, "loss": loss, "grad_norm": 0.0, "accuracy": 0.0}
        )
    return runs


@pytest.fixture(scope="module")
def tab(browser: Browser, page: Served) -> Iterator[Tab]:
    """One tab for all tests, which must not report an error."""
    with browser.tab(page.entry) as tab:
        yield tab
        assert tab.errors == []


def show(tab: Tab, page: Served, route: str, there: str) -> None:
    tab.goto(f"{page.url}/#/{route}")
    tab.wait(f"document.querySelector({json.dumps(there)})")


def coloured(tab: Tab, title: str) -> tuple[int, int]:
    count, width = tab.run(f"({COLOURED})({json.dumps(title)})")
    return count, width


def test_the_loss_at_the_last_step_is_the_last_loss(tab: Tab, page: Served) -> None:
    show(tab, page, "run/sft", ".tiles")
    tab.wait(r"/Loss\s+0\.122\s+at the last step/.test(document.querySelector('.tiles')?.innerText)")
    assert "at the last step" in tab.text(".tiles")


def test_one_step_is_a_dot_and_zeros_are_a_line(tab: Tab, page: Served) -> None:
    show(tab, page, "run/one", ".chart canvas")
    tab.wait("document.querySelectorAll('.chart canvas').length > 2")
    for title in ("Reward", "KL to the reference"):
        assert 9 < coloured(tab, title)[0] < 60
    show(tab, page, "run/sft", ".chart canvas")
    tab.wait(
        "document.querySelector('h1').innerText == 'sft' && document.querySelectorAll('.chart canvas').length > 2"
    )
    for title in ("Gradient norm", "Accuracy"):
        count, width = coloured(tab, title)
        assert count > 0.7 * width
        chart = f"[...document.querySelectorAll('.canvas')].find(it => it.ariaLabel.startsWith('{title}'))"
        assert tab.run(f"{chart}.card.plot.scales.y.min") < 0  # not on the frame


def test_curves_are_drawn_under_the_posix_locale(browser: Browser, page: Served) -> None:
    with browser.tab() as tab:
        language = "Object.defineProperty(Navigator.prototype, 'language', {get: () => 'en-US@posix'})"
        tab.send("Page.addScriptToEvaluateOnNewDocument", source=language)
        tab.enter(page.entry)
        show(tab, page, "run/sft", "main > *")
        tab.wait("document.querySelectorAll('.chart canvas, .empty').length > 0")
        assert tab.errors == [] and tab.run("document.querySelectorAll('.chart canvas').length") > 2


def test_pages_fit_the_window(tab: Tab, page: Served) -> None:
    boxes = "[...document.querySelectorAll('.runs td, .runs th, #rail a, .tabs a, h1, select')]"
    outside = (
        f"{boxes}.filter(it => it.checkVisibility() && it.getBoundingClientRect().right > innerWidth).length"
    )
    right = "document.querySelector('{}').getBoundingClientRect().right"
    for route, there in (("runs", ".runs tr"), (f"run/{LONG}", ".tabs"), ("start", ".told-config p")):
        show(tab, page, route, there)
        for width in (390, 1024, 1280, 1400):
            tab.look(width)
            assert tab.run("document.documentElement.scrollWidth - innerWidth") == 0, (route, width)
            assert tab.run(outside) == 0, (route, width)
            if route == "runs":
                assert tab.run(right.format(".runs table")) <= tab.run(right.format(".runs")), width


def test_unknown_addresses_are_not_found(tab: Tab, page: Served) -> None:
    for route in ("nowhere", "start/more", "run", "run/one/nothing", "judges/nothing"):
        show(tab, page, route, "main .empty")
        assert tab.text("h1") == "Page not found" and f"#/{route}" in tab.text("main")
        show(tab, page, "runs", ".runs tbody tr")


def test_starting_a_run_shows_that_it_starts_and_toasts_leave_with_their_page(
    tab: Tab, page: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    async def train(*_: Any) -> tuple[str, str]:
        while not begun.is_set():
            await asyncio.sleep(0.02)
        return "one", "tfactory train"

    monkeypatch.setattr("TrainingFactory.web.processes.train", train)
    show(tab, page, "start", ".told-config .right")
    tab.click("#start")
    tab.wait("document.querySelector('.go [role=status]').innerText.includes('Starting the run')")
    assert tab.run(
        "document.querySelector('#start').disabled && document.querySelector('#start.busy') !== null"
    )
    begun.set()
    tab.wait("location.hash == '#/run/one' && document.querySelector('.tiles')")
    assert "Started one" in tab.text("#toasts")
    show(tab, page, "run/one/log", ".tabs")
    assert "Started one" in tab.text("#toasts")  # another view of the same run
    show(tab, page, "runs", ".runs tbody tr")
    assert tab.text("#toasts") == ""


def test_play_takes_no_message_before_it_has_begun(tab: Tab, page: Served) -> None:
    show(tab, page, "play", "#say")
    assert tab.run("document.querySelector('#say').disabled")
    assert "Begin" in tab.run("document.querySelector('#say').placeholder")


def test_the_wizard_names_options_as_the_config_does(tab: Tab, page: Served) -> None:
    show(tab, page, "wizard", ".told-config li")
    labels = tab.run("[...document.querySelectorAll('#step-model label')].map(it => it.innerText)")
    assert {"Batch size", "Group size", "System prompt", "Max turns", "Max tokens", "Max steps"} <= set(
        labels
    )
    assert "Add tasks in step 2." in tab.text(".told-config")
    assert "batch_size: 4" in tab.text("#wizard-yaml")
    assert (
        tab.run("getComputedStyle(document.querySelector('.told-config p a')).textDecorationLine")
        == "underline"
    )


def test_text_has_the_contrast_of_wcag_aa() -> None:
    light, dark = re.findall(r":root[^{]*{([^}]*)}", (STATIC_FOLDER / "base.css").read_text())[:2]
    first = dict(re.findall(r"--([\w-]+): (#\w{6});", light))
    for colours in (first, first | dict(re.findall(r"--([\w-]+): (#\w{6});", dark))):
        for text, back in product(("faint", "soft", "accent"), ("paper", "surface", "sunken", "accent-soft")):
            lighter, darker = sorted(map(luminance, (colours[text], colours[back])), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (text, back)


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
