"""The environment `web_page` in a real Chromium: pages, actions, rewards, no network, and a browser that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.browser import PROGRAM
from tests.kits.rollout import FakeChat
from TrainingFactory.assembly.environment import as_environment_factory, find_environment
from TrainingFactory.envs.web_page.devtools import Chromium, find_browser
from TrainingFactory.envs.web_page.environment import WebPageEnvironment
from TrainingFactory.rollout import play
from TrainingFactory.types import Message, Task, ToolCall, Trajectory

KINDS = ["button", "field", "boxes", "list"]
pytestmark = pytest.mark.xdist_group("browser")
slow = pytest.mark.slow
needs_browser = pytest.mark.skipif(
    not PROGRAM.is_file(),
    reason="there is no Chromium for this machine; make servers installs one where it can",
)


class SeeingChat(FakeChat):
    sees_images = True


def pages(**options: Any) -> type[WebPageEnvironment]:
    return as_environment_factory(find_environment("web_page"), {"browser": str(PROGRAM)} | options)


def closing(kind: type[WebPageEnvironment], work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        try:
            return await work()
        finally:
            await kind.pool.close()

    return asyncio.run(run())


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=[ToolCall(name, arguments)])


async def played(environment: WebPageEnvironment, turns: Any) -> Trajectory:
    return await play(environment, SeeingChat(), turns)


@needs_browser
def test_the_reference_solves_every_kind_and_nothing_else_does() -> None:
    kind = pages(kinds=KINDS)
    tasks = list({task.metadata["kind"]: task for task in kind.tasks("train", 0, 12)}.values())
    assert {task.metadata["kind"] for task in tasks} == set(KINDS)

    async def work() -> tuple[list[Trajectory], list[Trajectory]]:
        solved = [played(kind(task), kind(task).expert()) for task in tasks]
        idle = [played(kind(task), iter([call("done")])) for task in tasks[:1]]
        wrong = [played(kind(task), iter([call("tap", x=999, y=999), call("done")])) for task in tasks[:1]]
        return list(await asyncio.gather(*solved)), list(await asyncio.gather(*idle, *wrong))

    solved, others = closing(kind, work)
    for trajectory in solved:
        assert trajectory.reward is not None and trajectory.reward.outcome == 1.0, trajectory.error
        first = trajectory.prompt[-1].images[0].image
        assert (first.width, first.height) == (448, 320)
        shown = [reply.images[0].image for turn in trajectory.turns[:-1] for reply in turn.replies]
        assert shown[0].digest != first.digest or trajectory.task.metadata["kind"] in ("button", "list")
    assert [trajectory.reward.outcome for trajectory in others if trajectory.reward] == [0.0] * 2
    assert kind.pool.chromium is None
    assert kind.run_metrics() == {
        "environment/browser_restarts": 0,
        "environment/browser_requests_blocked": 0,
    }


@slow
@needs_browser
def test_pictures_repeat_and_blind_ones_are_empty() -> None:
    kind, blind = pages(kinds=["field"]), pages(kinds=["field"], blind=True)
    [task] = kind.tasks("train", 1, 1)

    async def look(kind: type[WebPageEnvironment]) -> list[str]:
        environment = kind(task)
        digests = [(await environment.reset())[-1].images[0].image.digest]
        for message in list(environment.expert())[:2]:  # a focused field, and text in it
            step = await environment.step(message)
            digests.append(step.replies[0].images[0].image.digest)
        await environment.close()
        return digests

    async def twice() -> list[list[str]]:
        return [await look(kind), await look(kind)]

    first, second = closing(kind, twice)
    assert first == second and len(set(first)) == 3
    assert len(set(closing(blind, lambda: look(blind)))) == 1


@slow
@needs_browser
def test_own_page_has_no_network(tmp_path: Path) -> None:
    """The page tries to reach a server of this machine in every way; the server sees no connection."""
    server = socket.create_server(("127.0.0.1", 0))
    port, connections = server.getsockname()[1], []

    def accept() -> None:
        while True:
            try:
                connections.append(server.accept())
            except OSError:
                return

    thread = threading.Thread(target=accept)
    thread.start()
    address = f"127.0.0.1:{port}"
    (tmp_path / "page.html").write_text(f"""<html><head><meta http-equiv="Content-Security-Policy" content="">
        <script src="http://{address}/s.js"></script><link rel="stylesheet" href="http://{address}/s.css">
        <link rel="preconnect" href="http://{address}"></head>
        <body onload="document.title = 'loaded'"><img src="http://{address}/i.png"><iframe src="http://{address}/f">
        </iframe><form action="http://{address}/go"><button style="position:fixed;inset:0;width:100%">Go</button></form>
        <script>
        fetch("http://{address}/fetch").catch(() => {{}});
        try {{ new WebSocket("ws://{address}/ws") }} catch (error) {{}}
        navigator.sendBeacon("http://{address}/beacon", "x");
        alert("hello");
        </script></body></html>""")
    kind = pages(page=str(tmp_path / "page.html"))
    with pytest.raises(
        ValueError, match=r"set data\.tasks to a file of tasks with the columns prompt and check"
    ):
        list(kind.tasks("train", 0, 1))

    async def work() -> list[float]:
        rewards = []
        for check in (
            "document.title === 'loaded'",
            "document.title",
            "window.open('http://" + address + "') === 1",
        ):
            task = Task("own", "Go.", metadata={"check": check})
            trajectory = await played(kind(task), iter([call("done")]))
            assert trajectory.reward is not None, trajectory.error
            rewards.append(trajectory.reward.outcome)
        environment = kind(Task("own", "Go.", metadata={"check": "true"}))
        await environment.reset()
        await environment.step(call("tap", x=500, y=500))  # leaves the page
        await environment.close()
        return rewards

    try:
        assert closing(kind, work) == [1.0, 0.0, 0.0]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
    assert not connections
    assert kind.run_metrics()["environment/browser_requests_blocked"] >= 4


@slow
@needs_browser
def test_a_browser_that_dies_is_restarted_and_its_episodes_fail() -> None:
    kind = pages()
    [task] = kind.tasks("train", 0, 1)

    async def work() -> tuple[Trajectory, Trajectory]:
        def dying() -> Any:
            assert kind.pool.chromium is not None
            os.killpg(kind.pool.chromium.process.pid, signal.SIGKILL)
            yield call("tap", x=1, y=1)
            yield call("done")

        lost = await played(kind(task), dying())
        return lost, await played(kind(task), kind(task).expert())

    lost, after = closing(kind, work)
    assert lost.status == "tool_failure" and "browser" in str(lost.error)
    assert after.reward is not None and after.reward.outcome == 1.0
    assert kind.run_metrics()["environment/browser_restarts"] == 1


@slow
@needs_browser
def test_mistakes_of_tasks_and_calls(tmp_path: Path) -> None:
    kind = pages()
    (tmp_path / "page.html").write_text("<title>x</title>")
    own = {"page": str(tmp_path / "page.html")}

    async def work() -> list[Trajectory]:
        tasks = [
            Task("none", "?"), Task("gone", "?", metadata={"page": "nowhere.html", "check": "true"}),
            Task("bad", "?", metadata=own | {"check": "missing()"}),
            Task("endless", "?", metadata=own | {"check": "(() => { while (true) {} })()"}),
        ]  # fmt: skip
        turns = [call("type_text", text=""), call("scroll", direction="left"), call("done")]
        return [await played(kind(task), iter(turns)) for task in tasks]

    kind.pool.timeout = 3.0
    none, gone, bad, endless = closing(kind, work)
    assert "needs the column `check`" in str(none.error) and "cannot read the page nowhere.html" in str(
        gone.error
    )
    assert bad.reward is None and "missing is not defined" in str(bad.error)
    assert endless.reward is None and "took longer than 3 s" in str(endless.error)
    errors = [result.error for turn in bad.turns for result in turn.tool_results]
    assert errors == ["exception", "schema", None]


@slow
@needs_browser
def test_the_browser_ends_with_its_pipe() -> None:
    async def work() -> int:
        chromium = await Chromium.start(str(PROGRAM), 20.0)
        children = [
            chromium.process.pid,
            *(child.pid for child in psutil.Process(chromium.process.pid).children(True)),
        ]
        chromium._command_writer.close()  # as the kernel does when this process is killed
        async with asyncio.timeout(60):
            await chromium.process.wait()
        await chromium.close()
        return sum(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in children)

    assert asyncio.run(work()) == 0


def test_a_missing_browser_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ValueError, match=r"needs Chromium, but no program of PATH is Chromium .*apt install chromium"
    ):
        find_browser(None)
    with pytest.raises(ValueError, match=r"environment.options.browser is not a program \(/no/chrome\)"):
        pages(browser="/no/chrome")


def test_tasks_do_not_tell_where_and_splits_are_disjoint() -> None:
    kind = type(
        "offline",
        (WebPageEnvironment,),
        {"options": find_environment("web_page").from_options({"kinds": KINDS}).options},
    )
    train, heldout = (list(kind.tasks(split, 0, 40)) for split in ("train", "heldout"))
    assert not {str(task.metadata) for task in train} & {str(task.metadata) for task in heldout}
    assert [task.metadata for task in kind.tasks("train", 0, 40)] == [task.metadata for task in train]
    places = []
    for task in train:
        names = [widget["name"] for widget in task.metadata["widgets"]]
        if task.metadata["kind"] == "button":
            places.append(names.index(task.metadata["expected"]["pressed"][0]))
    assert len(set(places)) > 3  # widgets are in reading order
