"""Wizard, play and labels in a real Chromium: from a paste to a finished run, a conversation with an edited turn that
is kept, and labels by the keyboard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.kits.browser import Tab
from tests.kits.forked import HOLD, forked_runs
from tests.kits.page import Served
from tests.kits.teacher import teaching
from tests.web.test_pages import HOSTILE, episode
from tests.web.test_play import made_runs
from tests.web.test_wizard import TINY
from TrainingFactory.agent_api.turns.responses import CHUNK_TOKENS
from TrainingFactory.data.examples import load_examples
from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.usefixtures("forked_jobs")]
LONG = 120.0  # seconds: a process is started, and a model loaded


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = made_runs(tmp_path_factory.mktemp("work"))
    run = RunFolder(runs / "homes")
    run.append("metrics.jsonl", {"step": 3, "reward": 0.5})
    for number in range(5):
        run.append(
            TRAJECTORIES, episode(1, f"task-{number}", 0, number % 2, HOSTILE if number == 1 else "Tunis")
        )
    return runs


def test_the_wizard_from_pasted_servers_to_a_finished_run(tab: Tab, page: Served, runs: Path) -> None:
    tab.goto(f"{page.url}/#/wizard")
    tab.fill("#servers", json.dumps({"mcpServers": {"tiny": {"command": sys.executable, "args": [TINY]}}}))
    tab.click("#read-servers")
    tab.wait("document.querySelector('#confirm-servers')")
    assert TINY in tab.text(".confirm") and not list(runs.glob("wizard/*/mcp.json"))
    tab.fill(
        "#servers",
        json.dumps({"mcpServers": {"tiny": {"command": sys.executable, "args": [TINY, "schema"]}}}),
    )
    tab.wait("!document.querySelector('#confirm-servers')")  # another text is another confirmation
    tab.fill("#servers", json.dumps({"mcpServers": {"tiny": {"command": sys.executable, "args": [TINY]}}}))
    tab.click("#read-servers")
    tab.click("#confirm-servers")
    tab.wait("document.querySelectorAll('.tool').length == 5", LONG)
    for name in ("die", "fail"):
        tab.click(f".tool input[value={name}]")
    tab.wait("document.querySelector('#step-tools header').innerText.includes('3 of 5 tools')")
    tab.fill("#tasks", '{"prompt": "Say red.", "answer": "red"}\n{"prmpt": 1}')
    tab.wait("document.querySelector('#step-tasks').innerText.includes('line 2 has no')")
    tab.fill("#tasks", '{"prompt": "Say red.", "answer": "red"}\n{"prompt": "Say blue."}')
    tab.wait("document.querySelector('#step-tasks table')")
    tab.wait("document.querySelector('.told-config').innerText.includes('1 of the tasks have no')")
    assert tab.run("document.querySelector('#train').disabled")
    tab.click("input[value=rule_based]")
    for option, value in (("training-max_steps", 1), ("training-batch_size", 1), ("training-group_size", 2)):
        tab.fill(f"#wizard-{option}", str(value))
    tab.fill("#wizard-sampling-max_tokens", "6")
    tab.wait("!document.querySelector('#sample').disabled")
    assert "rule: auto" in tab.text("#wizard-yaml") and "- name: number" in tab.text("#wizard-yaml")
    assert "rule%3A%20auto" in tab.run("document.querySelector('#download').href")
    tab.click("#sample")
    tab.wait("document.querySelectorAll('#step-samples .member').length == 2", LONG)
    assert "2 episodes" in tab.text("#step-samples header")
    tab.fill("#wizard-name", "wizard-1")
    with forked_runs():
        tab.click("#train")
        tab.wait("document.querySelector('h1')?.innerText == 'wizard-1'", LONG)
    tab.wait("document.querySelector('.state')?.innerText == 'finished'", LONG)
    assert "run:wizard-1" in [each["name"] for each in page.get("/api/play")["environments"]]
    config = RunFolder(runs / "wizard-1").config
    assert [entry.name for entry in config.tools] == ["say", "count", "number"]
    assert (config.reward.type, config.reward.options["rule"], config.training.group_size) == (
        "rule_based",
        "auto",
        2,
    )


def test_play_with_an_edited_turn_and_a_kept_demonstration(tab: Tab, page: Served, runs: Path) -> None:
    tab.goto(f"{page.url}/#/play?model=agent%3A1&environment=run%3Ahomes")
    tab.wait("document.querySelector('.chat .role-user')", LONG)
    tab.fill("#temperature", "0")
    tab.click("#send")
    ended = (
        "!document.querySelector('.chat .live') && document.querySelectorAll('.chat .role-assistant').length"
    )
    tab.wait(f"{ended} == 2", LONG)
    assert "lookup" in tab.text(".chat .call .asked") and tab.text(".chat .call .result pre")
    tab.fill("#say", "Omar?")
    tab.press("Enter")
    tab.wait(f"{ended} > 2", LONG)
    assert "tokenized again" not in tab.text(".notes")
    tab.run("document.querySelector('.chat .role-user .acts button').click()")
    tab.fill(".edit-text", "Vera?")
    tab.click(".edit-go")
    tab.wait(f"{ended} > 0", LONG)
    assert tab.text(".chat .role-user pre") == "Vera?"
    tab.wait("!document.querySelector('#keep-demonstration').disabled")
    tab.click("#keep-demonstration")
    tab.wait("document.querySelector('.keep .command')")
    [kept] = load_examples(str(runs / "datasets" / "play.sft.jsonl"), "sft").usable
    assert [each.content for each in kept.conversations[0].messages if each.role == "user"] == ["Vera?"]
    tab.fill("#temperature", "1.5")
    tab.click("h1")
    tab.press("a")
    tab.click("#better-1")
    tab.wait("document.querySelector('.keep .command code').innerText.includes('dpo')", LONG)
    assert len(load_examples(str(runs / "datasets" / "play.dpo.jsonl"), "dpo").usable) == 1
    tab.fill("#max-tokens", "2000")
    tab.fill("#temperature", "5")
    tab.fill("#say", "Talk!")
    hold = runs.parent / HOLD
    hold.touch()  # the model waits after its first tokens, so that the answer cannot end before it is stopped
    tab.click("#send")
    tab.wait("document.querySelector('.live pre')?.innerText", LONG)
    tab.click("#stop-answer")
    tab.wait(
        "performance.getEntriesByType('resource').some(it => it.name.endsWith('/stop') && it.responseEnd)"
    )
    hold.unlink()
    tab.wait("document.querySelector('.notes').innerText.includes('Stopped.')", LONG)
    tokens = tab.run("[...document.querySelectorAll('.chat .facts')].at(-1).innerText")
    assert 1 <= int(tokens.split()[0]) <= CHUNK_TOKENS  # what was sampled before the stop


def test_play_with_an_endpoint(tab: Tab, page: Served, runs: Path) -> None:
    failure = 401, b"unknown key"
    with teaching(fails=lambda number, question: failure if number == 3 else None) as teacher:
        options = {
            "model": "teacher",
            "api": "anthropic",
            "base_url": teacher.url,
            "input_price": 1,
            "max_cost": 1,
        }
        (runs.parent / "teacher.yaml").write_text(json.dumps(options))
        tab.goto(f"{page.url}/#/play?model=teacher.yaml&environment=environment%3Asearch")
        tab.wait("document.querySelector('.chat .role-user')", LONG)
        labels = "[...document.querySelectorAll('.settings label')]"
        shown = f"{labels}.filter(it => it.checkVisibility()).map(it => it.innerText)"
        assert tab.run(shown) == ["Max tokens"] and "anthropic's API has none" in tab.text(".side")
        tab.click("#send")
        tab.wait("[...document.querySelectorAll('.chat .tag')].some(it => it.innerText == 'reward +1')", LONG)
        assert "100 tokens in, 10 out, cost 0.0001" in tab.text(".chat .facts:last-child")
        assert "300 tokens in, 30 out, cost 0.0003" in tab.text(".side .pairs")
        tab.fill("#say", "Sure?")
        tab.press("Enter")
        tab.wait("document.querySelector('.notes').innerText.includes('status 401')", LONG)
        assert tab.run("document.querySelectorAll('.chat .role-assistant').length") == 3
        tab.click("#send")  # the message is still there: ask again
        tab.wait("document.querySelectorAll('.chat .role-assistant:not(.live)').length == 4", LONG)
        assert "5 requests, 400 tokens in" in tab.text(".side .pairs") and tab.text(".notes") == ""
        tab.look(390, 844)
        assert tab.run("document.documentElement.scrollWidth - innerWidth") == 0
        tab.look()


def test_labels_by_the_keyboard(tab: Tab, page: Served, runs: Path) -> None:
    tab.goto(f"{page.url}/#/judges/label?run=homes")
    tab.wait("document.querySelector('#good')")
    assert "task-0" in tab.text(".labelling header") and "reward: " not in tab.text(".verdicts")
    for key, following in (("1", "task-1"), ("2", "task-2"), (" ", "task-3"), ("1", "task-4")):
        tab.press(key)
        tab.wait(f"document.querySelector('.labelling header').innerText.includes('{following}')")
        if following == "task-1":
            assert (
                "<script>window.broken" in tab.text(".labelling .talk") and tab.run("window.broken") is None
            )
    assert "reward: 1.25" in tab.text(".verdicts")
    rows = [json.loads(line) for line in (runs / "labels" / "homes.jsonl").read_text().splitlines()]
    assert [(row["number"], row["label"]) for row in rows] == [(1, True), (2, False), (4, True)]
    tab.press("k")
    tab.wait("document.querySelector('#good[aria-pressed=true]')")
    tab.press("u")
    tab.wait("!document.querySelector('#good[aria-pressed=true]')")
    tab.goto(f"{page.url}/#/judges")
    tab.wait("document.querySelector('main').innerText.includes('No judge audits yet')")
