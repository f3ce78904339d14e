"""The pages in a real Chromium: each shows what is on disk, text of episodes stays text, and its buttons do what they
say. One browser and one server for all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.apps.test_views_registry import evaluated
from tests.kits.browser import Browser, Tab
from tests.kits.page import Served
from tests.kits.registry import made_run, model_folder
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.runs.folder import FINDINGS, METRICS, TRAJECTORIES, RunFolder, Status
from TrainingFactory.web.site import STATIC_FOLDER

pytestmark = pytest.mark.xdist_group("browser")

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
    '"><svg onload=window.broken=3> \x1b[2J\x00\u202e{{constructor.constructor("window.broken=4")()}}'
)
GROUPS = 45  # of 8 episodes: more than a page of the list
SUITE = """
entries:
  - {environment: search, count: 2, max_turns: 1, sampling: {max_tokens: 2}}
gate:
  guards:
    - {metric: tokens, at_most: 100}
"""
TINY = """
environment: search
training: {max_steps: 500, batch_size: 1, group_size: 2}
sampling: {max_tokens: 4}
"""


def episode(step: int, task: str, member: int, reward: float, said: str = "Tunis") -> dict[str, Any]:
    call = {
        "id": "call_0_0",
        "type": "function",
        "function": {"name": "search", "arguments": json.dumps({"query": said})},
    }
    result = {
        "content": said,
        "ok": member != 1,
        "error": None if member != 1 else "timeout",
        "cached": member == 2,
    }
    sampled = {"token_ids": [1, 2, 3], "logprobs": [-0.1] * 3, "finish": "stop", "policy_version": step}
    first = {
        "message": {"role": "assistant", "content": "", "tool_calls": [call]},
        "replies": [{"role": "tool", "content": said, "tool_call_id": "call_0_0", "name": "search"}],
        "tool_results": [result | {"seconds": 0.25, "attachments": [], "id": "call_0_0"}],
    }
    last = {"message": {"role": "assistant", "content": said}, "replies": [], "tool_results": []}
    more = {"signals": {}, "continues": False, "new_ids": [5], "completion": sampled}
    return {
        "task": {"id": task, "prompt": "Where?", "answer": "Tunis", "metadata": {"note": said}},
        "group": f"{step - 1}/{task}",
        "member": member,
        "status": "done",
        "reward": {"outcome": reward, "steps": [0.25, 0.0], "parts": {"rule": reward}},
        "error": None,
        "seconds": 1.5,
        "tools": [],
        "prompt": [{"role": "user", "content": said}],
        "turns": [first | more, last | more],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is met: a run with episodes, one that was killed, one that cannot be read, a registered model."""
    folder = tmp_path_factory.mktemp("page")
    runs = folder / "runs"
    run = made_run(runs, "rl", (1, 2, 3), training={"algorithm": "grpo", "learning_rate": 0.0005})
    for step in range(4, 20):
        metrics = {"step": step, "time": 1e9 + step, "reward": step / 20, "reward_std": 0.1, "loss": 1 / step}
        run.append(
            METRICS, metrics | {"tokens_per_second": 900.0, "tools/search/success": 0.5, "odd/one": 1.0}
        )
    finding = {
        "sentence": "calls cannot be read",
        "remedy": "Raise sampling.max_tokens.",
        "severity": "warning",
    }
    run.append(FINDINGS, {"step": 2, "name": "malformed_calls"} | finding)
    for group in range(GROUPS):
        for member in range(8):
            said = HOSTILE if (group, member) == (0, 3) else "Tunis"
            played = episode(group + 1, f"task-{group}", member, float(member % 2), said)
            if group == GROUPS - 1 and member > 3:  # the last step took its task twice
                played |= {"group": f"{group}/task-{group}#2", "member": member - 4}
            run.append(TRAJECTORIES, played)
    origins = {2: (0, 1), 3: (1, 1)}  # two roots that fork after their first turn
    for member, reward in enumerate((1.0, 0.0, 0.0, 0.0)):
        parent, turn = origins.get(member, (None, 0))
        played = episode(GROUPS + 1, "forked", member, reward)
        run.append(TRAJECTORIES, played if parent is None else played | {"parent": parent, "fork_turn": turn})
    made_run(runs, "sft", training={"algorithm": "sft"}, environment={})
    for name, won in (("rl", "0011"), ("sft", "0111")):
        evaluated(runs, name, won)
    made_run(runs, "dead").write_status(Status("running", 1, 2, HOSTILE))
    (made_run(runs, "strange").path / "config.yaml").write_text("training: {speed: 11}")
    catalogue = Catalogue(get_registry_path(runs))
    catalogue.add("agent", ROOT / "examples/own_agent/model", {"folder": "warm"})
    (folder / "release.yaml").write_text(SUITE)
    for content in "ab":
        found = catalogue.add("zoo", model_folder(folder / content, content), {"folder": content})
        catalogue.set_alias(str(found), "champion")
    return runs


def show(tab: Tab, page: Served, route: str, seen: str) -> None:
    tab.goto(f"{page.url}/#/{route}")
    tab.wait(f"document.querySelector('main').innerText.includes({json.dumps(seen)})")


def count(tab: Tab, selector: str) -> int:
    return tab.run(f"document.querySelectorAll({json.dumps(selector)}).length")


def test_runs_are_listed_filtered_sorted_and_overlaid(tab: Tab, page: Served, runs: Path) -> None:
    tab.wait("document.querySelectorAll('.runs tbody tr').length == 4")
    states = tab.run("[...document.querySelectorAll('.runs tbody tr')].map(row => row.innerText).join('|')")
    assert "killed" in states and "speed" in states
    held = "[...document.querySelectorAll('.runs td.c-heldout')].map(each => each.innerText.replace(/\\s+/g, ' '))"
    assert set(tab.run(held)) == {"75.0%", "50.0%", "75.0% eval"}  # the last is of `tfactory eval`
    assert count(tab, '[title="step 2, tfactory eval, 4 tasks of calculator"]') == 1
    tab.press("/")
    tab.fill(".filters input", "grpo rl")
    tab.wait("document.querySelectorAll('.runs tbody tr').length == 1")
    tab.press("Escape")
    tab.press("j")
    tab.press("x")
    tab.wait("document.querySelectorAll('.overlay .chart canvas').length > 3")
    assert "1 run selected" in tab.text(".selection") and "select=rl" in tab.run("location.hash")
    with (runs / "rl" / METRICS).open("a") as file:  # the run goes on while its curves are looked at
        file.write(json.dumps({"step": 20, "time": 1e9 + 20, "reward": 0.9876, "loss": 0.05}) + "\n")
    tab.wait("document.querySelector('.overlay .chart .value').innerText.includes('0.988')")
    tab.press("Enter")
    tab.wait("document.querySelector('h1').innerText == 'rl'")


def test_a_run_shows_curves_findings_config_and_lineage(tab: Tab, page: Served, runs: Path) -> None:
    show(tab, page, "run/rl?with=sft", "Held-out success")
    tab.wait("document.querySelectorAll('.chart canvas').length > 5")
    titles = tab.run("[...document.querySelectorAll('.chart h3')].map(each => each.innerText)")
    assert {"Reward", "Held-out success", "Tool success"} <= set(titles)
    assert "odd/one" in tab.run(
        "document.querySelector('details .charts').textContent"
    )  # nothing is left out
    zoomed(tab)
    tab.click('[aria-label="Vertical scale"] button:nth-child(2)')
    tab.click('[aria-label="Horizontal axis"] button:nth-child(2)')
    tab.wait("location.hash.includes('log=1') && location.hash.includes('axis=time')")
    show(tab, page, "run/rl/findings", "Raise sampling.max_tokens.")
    show(tab, page, "run/rl/config?against=sft", "training.algorithm")
    assert "grpo" in tab.text("table") and "sft" in tab.text("table")
    assert f"tfactory runs compare {runs / 'rl'} sft --runs {runs}" in tab.text("main")
    show(tab, page, "run/rl/lineage", "trajectories.jsonl")
    assert count(tab, "svg.lineage .node") >= 2
    tab.click(".head .actions > button:last-child")
    tab.wait("document.querySelector('dialog').innerText.includes('tfactory')")


def zoomed(tab: Tab) -> None:
    """Charts by keyboard: they zoom around the cursor, all of them at once, and back."""
    xs = "[...document.querySelectorAll('.canvas')].filter(each => each.card.plot).map(each => each.card.plot.scales.x)"
    tab.run("document.querySelector('.canvas').focus()")
    tab.press("ArrowLeft")  # reads the last step
    tab.wait(
        "document.querySelector('.chart .legend, .chart .value').closest('.chart').innerText.includes('step')"
    )
    [(first, last)] = {(x["min"], x["max"]) for x in tab.run(f"{xs}.map(({{min, max}}) => ({{min, max}}))")}
    for key, size in (("+", 2), ("+", 4), ("-", 2), ("0", 1)):
        tab.press(key)
        wide = (last - first) / size
        tab.wait(f"{xs}.every(({{min, max}}) => max == {last} && Math.abs(max - min - {wide}) < 1e-9)")
        whole = "[...document.querySelectorAll('button')].find(each => each.innerText == 'Whole range')"
        assert tab.run(f"{whole}.hidden") == (key == "0")


def test_hostile_episodes_are_text(tab: Tab, page: Served) -> None:
    show(tab, page, "run/rl/episodes?number=4", "onerror")
    shown = tab.run("document.querySelector('.detail').textContent")
    assert "<script>window.broken = 1</script><img src=x" in shown and "␛[2J␀⟨U+202E⟩" in shown
    assert count(tab, "main script, main img, main .detail svg[onload]") == 0
    tab.wait("document.querySelector('.detail').innerText.includes('Expected')")
    assert tab.run("window.broken") is None
    tab.click(".detail summary")
    assert tab.run("window.broken") is None
    show(tab, page, "run/dead", "onerror")  # what a file of a run says is such a text, too
    tab.wait("!document.querySelector('.detail')")  # which had it as well
    tab.wait("document.querySelector('main').innerText.includes('␛[2J␀⟨U+202E⟩')")
    assert tab.run("window.broken") is None


def test_the_forks_of_a_task_are_drawn(tab: Tab, page: Served) -> None:
    """Values at the forks; lines are coloured by their advantage, and a leaf leads to its episode."""
    show(tab, page, f"run/rl/episodes?number={GROUPS * 8 + 1}", "Forks of this task")
    values = "[...document.querySelectorAll('.forks .fork text')].map(each => each.textContent)"
    assert tab.run(values) == ["0.75", "0.25"]  # the mean of 1.25 and 0.25; 0.25 twice
    lines = "[...document.querySelectorAll('.forks .path')].map(each => each.getAttribute('class'))"
    assert tab.run(lines) == ["path plus here", "path plus here", "path minus", "path minus", "path", "path"]
    tab.run("document.querySelectorAll('.forks .leaf')[1].dispatchEvent(new MouseEvent('click'))")
    tab.wait(f"location.hash.includes('number={GROUPS * 8 + 3}')")
    tab.wait("document.querySelector('.detail header').innerText.includes('member 2')")
    tab.wait("document.querySelectorAll('.forks .leaf')[1].classList.contains('here')")
    assert tab.errors == []


def test_episodes_are_read_a_page_at_a_time(tab: Tab, page: Served) -> None:
    total = GROUPS * 8 + 4
    show(tab, page, "run/rl/episodes", f"{total} episodes")
    tab.run("document.querySelector('.virtual').scrollTop = 1e9")
    tab.wait(f"document.querySelector('#episode-{total}')")
    asked = [address for address in tab.requests if "/episodes?" in address]
    assert len(asked) <= 3 and count(tab, ".virtual .row") < 100
    tab.run("document.querySelector('.virtual').scrollTop = 0")
    tab.press("j")
    tab.press("j")
    tab.wait("document.querySelector('#episode-2.at') && location.hash.includes('number=2')")
    tab.wait("document.querySelector('.result.failed')?.innerText.includes('timeout')")
    tab.fill('.filters input[name="step"]', "2")
    tab.wait("document.querySelector('.told').innerText == '8 of 364 episodes'")
    tab.run("document.querySelector('[aria-label=\"Tool that failed\"]').value = '*'")
    tab.run("document.querySelector('[aria-label=\"Tool that failed\"]').dispatchEvent(new Event('change'))")
    tab.wait("document.querySelector('.told').innerText == '1 of 364 episodes'")


def test_groups_of_one_task_in_one_step_are_told_apart(
    tab: Tab, page: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(*_: Any) -> Any:
        raise ApiError("there is no such process")

    monkeypatch.setattr("TrainingFactory.web.pool.Pool.ask", ask)  # credit takes one, and seconds
    name = f"task-{GROUPS - 1}"
    for number, group in ((GROUPS * 8, f"{name}#2"), (GROUPS * 8 - 4, name)):
        show(tab, page, f"run/rl/episodes?step={GROUPS}&number={number}&group=1", "4 members")
        tab.wait(f"document.querySelector('.detail h2')?.innerText == '{group}'")
        members = "[...document.querySelectorAll('.member header b:first-child')].map(each => each.innerText)"
        tab.wait(
            f"{members}.join() == 'Member 0,Member 1,Member 2,Member 3'"
        )  # drawn again once credit is known
    listed = tab.run("[...document.querySelectorAll('.virtual .task')].map(each => each.innerText)")
    assert listed == [f"{each} · {n}" for each in (name, f"{name}#2") for n in range(4)]


def test_the_form_tells_mistakes_at_their_fields(tab: Tab, page: Served) -> None:
    show(tab, page, "start?from=empty:", "no environment is named")
    assert tab.run("document.querySelector('#start').disabled")
    tab.fill("#option-environment-environment_id", "search")
    tab.wait("document.querySelector('.told-config').innerText.includes('The config is valid.')")
    tab.fill("#option-training-batch_size", "many")
    field = "document.querySelector('[data-key=\"training.batch_size\"]')"
    tab.wait(f"{field}.innerText.includes('must be')")
    assert tab.run("document.querySelector('#start').disabled")
    tab.fill("#option-training-batch_size", "3")
    tab.wait("document.querySelector('#yaml').value.includes('batch_size: 3')")
    tab.wait(f"!{field}.innerText.includes('must be')")
    tab.fill("#option-model-name", "r")
    tab.wait("document.querySelector('[data-key=\"model.name\"]').innerText.includes('did you mean rl?')")
    assert "name: r" in tab.run(
        "document.querySelector('#yaml').value"
    )  # what is missing can still be copied
    tab.run("document.querySelector('#source').value = 'run:rl'")
    tab.run("document.querySelector('#source').dispatchEvent(new Event('change'))")
    tab.wait("document.querySelector('#option-training-learning_rate').value == '0.0005'")


@pytest.mark.usefixtures("forked_jobs")
def test_a_promotion_and_a_run_by_the_form(browser: Browser, tab: Tab, page: Served, runs: Path) -> None:
    with browser.tab(page.entry) as other:
        other.goto(f"{page.url}/#/registry")
        other.click(".registry td button")
        other.wait("document.querySelector('dialog').innerText.includes('--first')")
        other.click("dialog button.main")
        # While a process for it reads the model, a run is started, watched and stopped.
        show(tab, page, "start?from=empty:", "no environment is named")
        tab.fill("#yaml", TINY)
        tab.fill("#run-name", "mine")
        tab.wait("document.querySelector('#option-training-max_steps').value == '500'")
        tab.click("#start")
        tab.wait("location.hash == '#/run/mine'")
        told = "Number(document.querySelector('.tiles .progress .num').innerText.split('/')[0])"
        tab.wait(f"{told} >= 2")
        tab.wait("document.querySelectorAll('.chart canvas').length > 5")
        first = tab.run(told)
        tab.wait(f"{told} > {first}")  # nothing was pressed: it goes on by itself
        tab.click("#stop")
        tab.click("dialog button.danger")
        tab.wait("document.querySelector('#resume')")
        assert RunFolder(runs / "mine").state == "interrupted"
        other.wait("document.querySelector('.job')?.innerText.includes('agent:1 is agent@champion')")
        other.wait("document.querySelector('.registry .tag.accent')?.innerText == 'champion'")
        assert Catalogue(get_registry_path(runs)).get("agent@champion").number == 1
        assert other.errors == []


def test_a_rollback_and_a_comparison(tab: Tab, page: Served, runs: Path) -> None:
    show(tab, page, "registry/zoo", "Roll back champion")
    tab.run(
        "[...document.querySelectorAll('button')].find(each => each.innerText == 'Roll back champion').click()"
    )
    tab.wait(f"document.querySelector('dialog').innerText.includes('--alias champion --runs {runs}')")
    tab.click("dialog button.danger")
    tab.wait("document.body.innerText.includes('zoo@champion is zoo:1 again.')")
    assert Catalogue(get_registry_path(runs)).get("zoo@champion").number == 1
    show(tab, page, "registry/compare?first=rl&second=sft", "Now right")
    assert f"tfactory compare rl sft --runs {runs}" in tab.text("main")


def test_keys_and_theme(tab: Tab, page: Served) -> None:
    tab.wait("document.querySelectorAll('.runs tbody tr').length >= 4")
    tab.press("?")
    tab.wait("document.querySelector('dialog').innerText.includes('Next run')")
    tab.press("Escape")
    tab.wait("!document.querySelector('dialog')")
    for theme in ("light", "dark"):
        tab.press("t")
        tab.wait(f"document.documentElement.dataset.theme == '{theme}'")
    tab.press("g")
    tab.press("m")
    tab.wait("document.querySelector('h1').innerText == 'Registry'")
    unnamed = "[...document.querySelectorAll('button, a, input, select, textarea')].filter(each => "
    unnamed += "!(each.innerText || each.ariaLabel || each.title || each.labels?.length)).length"
    assert tab.run(unnamed) == 0


def test_the_page_is_small() -> None:
    files = [path for path in STATIC_FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 400_000
    html = (STATIC_FOLDER / "index.html").read_text()
    modules = {path.name for path in STATIC_FOLDER.glob("*.js")} - {"docs.js"}
    assert modules == {name for name in modules if f'"/static/{name}"' in html}  # all are asked for at once
    for path in files:
        if path.parent.name != "vendor" and path.suffix in (".js", ".css", ".html"):
            assert len(path.read_text().splitlines()) <= 400, path.name
