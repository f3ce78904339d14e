"""Run management in a real Chromium: groups, columns, exports, tags, names, deletion, jobs, and the phone layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.kits.browser import Tab
from tests.kits.page import Served
from tests.kits.registry import made_run
from TrainingFactory.runs.annotations import read_annotations
from TrainingFactory.runs.folder import METRICS, RunFolder
from TrainingFactory.web import processes

pytestmark = pytest.mark.xdist_group("browser")

# Keeps what the page saves instead of downloading it.
SAVED = "URL.createObjectURL = (blob) => { window.saved = blob; return '#' }"
SMALL = """[...document.querySelectorAll("button, .button, select, #rail a, .tabs a, input, label.tap")].filter((it) =>
  it.checkVisibility() && it.getBoundingClientRect().height < 44 && !it.closest("label")).map((it) => it.outerHTML)"""
ROWS = "[...document.querySelectorAll('.runs tbody .name')].map((it) => it.innerText.trim().split('\\n')[0])"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("manage") / "runs"
    for rate, seed in ((0.5, 0), (0.5, 1), (0.25, 0)):
        run = made_run(runs, f"r{rate}-{seed}", training={"learning_rate": rate, "seed": seed})
        for step in (3, 4, 5):
            row = {"step": step, "time": 1e9 + step, "reward": rate + seed / 4 + step, "system/gpu/0": 0.5}
            run.append(
                METRICS, row | {"system/cpu": 0.25, "system/memory": 3.0, "system/process_memory": 1.0}
            )
    return runs


def show(tab: Tab, page: Served, route: str, there: str) -> None:
    tab.goto(f"{page.url}/#/{route}")
    tab.wait(f"document.querySelector({json.dumps(there)})")


def choose(tab: Tab, text: str) -> None:
    """Press a button of an open menu or dialog."""
    wanted = f"[...document.querySelectorAll('.menu-list button, dialog button')].find(it => it.innerText == '{text}')"
    tab.wait(wanted)
    tab.run(f"{wanted}.click()")


def test_runs_are_grouped_exported_and_listed_by_column(tab: Tab, page: Served) -> None:
    show(tab, page, "runs?by=config&select=r0.5-0,r0.5-1", ".overlay .chart canvas")
    tab.run(SAVED)
    assert [name.partition("learning_rate=")[2] for name in tab.run(ROWS)] == ["0.5", "0.25"]
    assert "5.63 ± 0.177" in tab.run("document.querySelector('.grouped tbody tr').innerText")
    # The mean of the group with its deviation, and no other curve.
    line = "document.querySelector('.overlay .canvas').card.chart.lines"
    assert tab.run(f"{line}.length") == 1 and tab.run(f"{line}[0].y.at(-1)") == 5.625
    assert tab.run(f"{line}[0].high.at(-1)") == pytest.approx(5.625 + 0.125 * 2**0.5)
    tab.click(".filters .buttons button:last-child")
    heads, first, *_ = tab.run("window.saved.text()").splitlines()
    assert (
        heads.startswith("group,runs,names,reward_mean,reward_deviation")
        and ",2,r0.5-1 r0.5-0,5.625," in first
    )
    tab.run('localStorage.setItem(\'columns\', \'["state", "seed", "option:training.learning_rate"]\')')
    tab.run("location.hash = '#/start'")
    show(tab, page, "runs?sort=seed", ".runs.chosen tbody tr")
    table = (
        "[...document.querySelectorAll('.runs tr')].map((it) => it.innerText.split(/\\s+/).join(' ').trim())"
    )
    assert tab.run(table)[:2] == [
        "Run State Seed learning_rate",
        "r0.5-1 builtin:tiny · search finished 1 0.5",
    ]
    tab.run("localStorage.removeItem('columns')")


def test_a_run_is_managed_from_its_page(
    tab: Tab, page: Served, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        processes, "CLI_COMMAND", [sys.executable, "-c", "import sys; print('got', *sys.argv[1:])"]
    )
    show(tab, page, "run/r0.25-0", ".chart canvas")
    titles = tab.run("[...document.querySelectorAll('.chart h3')].map((it) => it.innerText)")
    assert {"CPU use", "Memory (GB)", "GPU use"} <= set(titles)
    tab.run(SAVED)
    tab.run("document.querySelector('.chart [aria-label$=PNG]').click()")
    tab.wait("window.saved?.type == 'image/png' && window.saved.size > 1000")
    tab.click("#manage summary")
    choose(tab, "Evaluate…")
    tab.fill("#eval-tasks", "3")
    choose(tab, "Evaluate")
    tab.wait(
        "document.querySelector('.jobs')?.innerText.includes('--tasks 3') && "
        "!document.querySelector('.jobs button.danger')"
    )
    tab.click("#manage summary")
    choose(tab, "Edit name, tags, note…")
    tab.fill("#run-tags", "baseline, team=search")
    tab.fill("#run-name", "renamed")
    choose(tab, "Save")
    tab.wait(
        "document.querySelector('h1').innerText == 'renamed' && document.querySelector('.run-tags .tag')"
    )
    assert read_annotations(RunFolder(runs / "renamed")).tags == {"baseline": "", "team": "search"}
    tab.look(390, 844)
    assert tab.run("document.documentElement.scrollWidth - innerWidth") == 0 and tab.run(SMALL) == []
    show(tab, page, "runs", ".runs tbody tr")
    assert tab.run("document.documentElement.scrollWidth - innerWidth") == 0 and tab.run(SMALL) == []
    tab.look()
    show(tab, page, "run/renamed", "#manage")
    tab.click("#manage summary")
    choose(tab, "Delete…")
    tab.wait("document.querySelector('dialog')?.innerText.includes('cannot be undone')")
    assert (runs / "renamed").is_dir()
    choose(tab, "Delete")
    tab.wait("location.hash == '#/runs'")
    assert not (runs / "renamed").exists() and (runs / "r0.5-0").is_dir()
