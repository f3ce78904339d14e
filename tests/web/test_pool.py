"""Jobs in child processes, and what changes the registry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.kits.page import serving
from tests.kits.registry import made_run, model_folder
from tests.kits.waiting import wait_until
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.registry.catalogue import Catalogue
from TrainingFactory.web import pool, worker
from TrainingFactory.web.pool import Pool


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WORKER_FUNCTION", "tests.kits.jobs:answer")


@pytest.mark.usefixtures("pretended")
async def test_a_job_tells_and_ends() -> None:
    made, heard = Pool(), []
    try:
        assert await made.ask("check", "count", {"count": 3}, heard.append) == {"sum": 3}
        assert heard == [{"number": 0}, {"number": 1}, {"number": 2}]
        events = [each async for each in made.stream("check", "count", {"count": 1})]
        assert events == [
            {"event": "told", "data": '{"number": 0}'},
            {"event": "done", "data": '{"sum": 1}'},
        ]
        with pytest.raises(ApiError, match="no such model"):
            await made.ask("check", "wrong", {})
        with pytest.raises(ApiError, match="ended with status 3"):
            await made.ask("check", "die", {})
        assert await made.ask("check", "count", {"count": 0}) == {"sum": 0}  # in another one
    finally:
        await made.close()
    assert not [each for each in psutil.Process().children() if "child.py" in " ".join(each.cmdline())]


@pytest.mark.usefixtures("pretended")
def test_a_process_that_nobody_asks_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.05)

    async def run() -> None:
        made = Pool()
        await made.ask("check", "count", {"count": 0})
        while made._workers["check"].alive:
            await asyncio.sleep(0.02)
        assert not [each for each in psutil.Process().children() if "child.py" in " ".join(each.cmdline())]
        await made.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.usefixtures("pretended")
def test_there_are_only_so_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_PROCESSES", 2)

    async def run() -> None:
        made = Pool()
        for kind in ("a", "b", "a", "c"):
            await made.ask(kind, "count", {"count": 0})
        assert [kind for kind, each in made._workers.items() if each.alive] == ["a", "c"]
        await made.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.usefixtures("pretended")
def test_a_job_that_can_be_asked_to_end_keeps_its_process() -> None:
    async def run() -> None:
        made, left = Pool(), list[int]()
        events = made.stream("play", "count", {"count": 1}, lambda: left.append(1))
        assert (await anext(events))["event"] == "told"
        await events.aclose()
        process = made._workers["play"].pid
        assert left and await made.ask("play", "count", {"count": 2}) == {"sum": 2}
        assert made._workers["play"].pid == process is not None
        await made.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.usefixtures("pretended")
def test_a_job_whose_page_is_gone_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as page:
        assert page.page is not None
        events = page.events("/api/doctor", yaml="model: builtin:tiny")
        assert next(events) == ("told", {"text": "begun"})
        worker = page.page.pool._workers["check"]
        assert worker.alive
        events.close()
        wait_until(lambda: not worker.alive)


def test_a_mistake_in_a_job_is_told_in_its_words() -> None:
    found = worker.answer({"job": "doctor", "given": {"yaml": "modle: x"}}, lambda _: None)
    assert "unknown key; did you mean model?" in found["wrong"]


def test_aliases_and_rollbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    catalogue = Catalogue(runs / "registry.sqlite")
    made_run(runs, "mine")
    for content in "ab":
        catalogue.add("agent", model_folder(tmp_path / content, content), {"folder": content})
    (tmp_path / "release.yaml").write_text("entries: [{environment: search}]\ngate: {better: 0}\n")
    (tmp_path / "other.yaml").write_text("model: builtin:tiny\n")
    with serving(runs) as page:
        assert page.post("/api/models/agent/alias", number=1, alias="champion")["version"] == "agent:1"
        moved = page.post("/api/models/agent/alias", number=2, alias="champion")
        assert (moved["was"], moved["command"]) == (
            1,
            f"tfactory registry alias agent:2 champion --runs {runs}",
        )
        assert page.get("/api/models")["models"][0]["aliases"] == {"champion": 2}
        # Two pages that show version 2 take back that one, and not the one before it, too.
        assert page.post("/api/models/agent/rollback", alias="champion", number=2)["version"] == "agent:1"
        assert page.send("/api/models/agent/rollback", alias="champion", number=2).status_code == 409
        assert catalogue.alias("agent", "champion") == 1
        assert page.get("/api/models/agent/1")["version"]["aliases"] == ["champion"]
        assert page.send("/api/models/none/rollback", alias="champion").status_code == 400
        assert page.send("/api/models/agent/alias", number=9, alias="a").status_code == 400
        assert page.get("/api/suites") == {"suites": {"release": "release.yaml"}}
        for suite in ("other", "../release", "release.yaml", "none"):
            refused = page.send("/api/models/agent/promote", number=2, alias="champion", suite=suite)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suite")
