"""What the web page reads, and how often it asks: `python -m benchmarks.ui`.

A folder of 200 runs, one of them with 100,000 short episodes, and one live: a thread adds a step to it while it is
looked at. For the list of runs, the first page of episodes, a filter, a sort, a scroll through ten pages, a search and
one episode it says how many requests were made and how many bytes were read, as counted by the system for the process
that reads (`/proc/self/io`, `rchar`), beside the size of the files and the seconds of processor time. Nothing but the
first requests on the large run and a search in all of it may read more than a tenth of its file in a request; what is
read beyond the answer is the index, which is a file of its own. `peak_mb` is the memory of the process that reads.
`--server` asks a real `tfactory ui` over HTTP instead of calling the functions; `paint_ms` is when a real Chromium
paints the page for the first time (`first`), something in it (`content`), and when the rows of the list are there
(`rows`): in a new profile each time, at once after the server's start, and again.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.kits.browser import PROGRAM, Browser
from TrainingFactory.apps.views.index import EpisodeIndex, Query
from TrainingFactory.apps.views.runs import Runs, read_metrics_part
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import trajectory_to_dict
from TrainingFactory.runs.folder import METRICS, TRAJECTORIES, RunFolder, Status
from TrainingFactory.types import Completion, Message, Reward, Task, ToolCall, ToolResult, Trajectory, Turn

RUNS, STEPS, EPISODES, TASKS, GROUP = 200, 200, 100_000, 25, 8
MOST_MB = 200
Ask = Callable[[str, dict[str, Any]], Any]


def make_runs(folder: Path, runs: int, episodes: int) -> RunFolder:
    """Write the runs, and return the live one, which is held by this process."""
    config = TrainingConfig.model_validate({"environment": "search", "logging": {"output_dir": str(folder)}})
    for number in range(runs):
        name = "large" if number == 0 else f"run-{number:03d}"
        run = RunFolder.create(config, name, {}, STEPS)
        with (run.path / METRICS).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_metrics(step)) + "\n" for step in range(1, STEPS + 1))
        run.write_status(Status("finished", STEPS, STEPS))
        run.unlock()
        if number == 0:
            with (run.path / TRAJECTORIES).open("w", encoding="utf-8") as file:
                file.writelines(_episode(place) for place in range(episodes))
    return RunFolder.create(config, "live", {}, STEPS)


def _metrics(step: int) -> dict[str, float]:
    more = {
        f"tools/t{n}/{what}": 0.5 for n in range(4) for what in ("calls", "success", "p50", "p95", "retries")
    }
    held = {"eval/success": 0.5, "eval/success_low": 0.4, "eval/success_high": 0.6} if step % 20 == 0 else {}
    return {"step": step, "time": time.time(), "reward": step / STEPS, "loss": 1 / step} | more | held


def _episode(place: int) -> str:
    step, task, member = place // (TASKS * GROUP), place // GROUP % TASKS, place % GROUP
    call = ToolCall("search", {"query": f"item {place}"}, "call_0_0")
    turns = [
        Turn([*range(40)], Completion([*range(12)], [-0.25] * 12, "stop"), Message("assistant", "", [call]),
             [Message("tool", "Nothing found.", tool_call_id="call_0_0")],
             [ToolResult("Nothing found.", place % 7 > 0, seconds=0.01, id="call_0_0")]),
        Turn([*range(60)], Completion([*range(6)], [-0.5] * 6, "stop"), Message("assistant", f"It is number {place}.")),
    ]  # fmt: skip
    played = Trajectory(
        Task(f"task-{task}", "Where is it?"), f"{step}/task-{task}", member, [Message("user", "Where is it?")],
        turns=turns, status="done" if place % 11 else "truncated", reward=Reward(float(place % 3 == 0)), seconds=1.5,
    )  # fmt: skip
    return json.dumps(trajectory_to_dict(played)) + "\n"


def by_function(folder: Path) -> Ask:
    """Return what asks the functions themselves."""
    runs = Runs(folder)
    index = EpisodeIndex(runs.find("large"))

    def ask(path: str, given: dict[str, Any]) -> Any:
        if path == "/api/runs":
            return {"runs": [row.model_dump() for row in runs.list_rows()]}
        if path.endswith("/metrics"):
            return read_metrics_part(runs.find("live"), given.get("after", 0)).model_dump()
        if path.endswith("/episodes"):
            return index.get_page(Query(**given)).model_dump()
        return index.get_episode(int(path.rpartition("/")[2])).model_dump()

    return ask


def by_server(port: int) -> Ask:
    def ask(path: str, given: dict[str, Any]) -> Any:
        query = urllib.parse.urlencode(
            {key: int(value) if value is True else value for key, value in given.items()}
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}?{query}", timeout=120) as answer:
            return json.load(answer)

    return ask


def measured(ask: Ask, reader: psutil.Process, episodes: int) -> dict[str, dict[str, float]]:
    """Return requests, bytes and seconds for each thing that a user does."""
    found: dict[str, dict[str, float]] = {}
    large, live = "/api/runs/large/episodes", "/api/runs/live/metrics"

    def did(name: str, *asked: tuple[str, dict[str, Any]], pages: int = 1, until: bool = False) -> Any:
        before, started, count, answer = reader.io_counters().read_chars, _cpu(reader), 0, None
        for path, given in asked:
            for _ in range(pages if not until else 1000):
                after = (
                    {} if not count or answer is None or not answer.get("next") else {"after": answer["next"]}
                )
                answer, count = ask(path, given | ({} if until else after)), count + 1
                if not answer["partial"] if until else not answer.get("next"):
                    break
        read = reader.io_counters().read_chars - before
        found[name] = {"requests": count, "bytes": read, "cpu_seconds": round(_cpu(reader) - started, 2)}
        return answer

    did("list of runs, first", ("/api/runs", {}))
    did("list of runs, again", ("/api/runs", {}))
    did("episodes, first answer", (large, {"limit": 50}))
    did("episodes, until all are known", (large, {"limit": 50}), until=True)
    did("first page", (large, {"limit": 50}))
    did("filter", (large, {"step": 300, "failed_tool": "search", "least": 0.5}))
    did("sort", (large, {"sort": "reward", "down": True}))
    did("scroll, ten pages", (large, {"limit": 50}), pages=10)
    did("search for a word in a step", (large, {"step": 300, "text": "nothing"}))
    did("search for a word in all", (large, {"text": f"number {episodes - 1}"}), pages=100)
    did("one episode", (f"{large}/99", {}))
    offset = did("metrics of the live run", (live, {"after": 0}))["offset"]
    time.sleep(0.5)
    did("what is new of them", (live, {"after": offset}))
    return found


def paint(port: int) -> list[dict[str, float]]:
    """Return when the list of runs is painted; nothing where there is no Chromium."""
    if not PROGRAM.exists():
        return []
    browser, found = Browser(), list[dict[str, float]]()
    try:
        with browser.tab():
            pass  # so that the browser itself has started
        for _ in range(3):
            with browser.tab(f"http://127.0.0.1:{port}/#/runs") as tab:
                rows = tab.wait("document.querySelector('.runs tbody tr') && performance.now()", 60)
                painted = tab.run("performance.getEntriesByType('paint').map((each) => each.startTime)")
                found.append({"first": round(painted[0]), "content": round(painted[-1]), "rows": round(rows)})
    finally:
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tfactory-ui-") as name:
        folder = Path(name) / "runs"
        live, stop = make_runs(folder, options.runs, options.episodes), threading.Event()

        def goes_on() -> None:
            step = 0
            while not stop.wait(0.1):
                live.append(METRICS, _metrics(step := step + 1))

        writer = threading.Thread(target=goes_on)
        writer.start()
        server, port, painted = None, _free_port(), list[dict[str, float]]()
        try:
            if options.server:
                command = [
                    sys.executable,
                    "-m",
                    "TrainingFactory.cli",
                    "ui",
                    "--no-token",
                    "--runs",
                    str(folder),
                    "--port",
                    str(port),
                ]
                server = subprocess.Popen(command)
                _wait(port)
                painted = paint(port)
            reader = psutil.Process(server.pid if server else None)
            found = measured(by_server(port) if server else by_function(folder), reader, options.episodes)
            peak = _peak(reader)
        finally:
            stop.set()
            writer.join()
            if server is not None:
                server.terminate()
                server.wait()
        size = (folder / "large" / TRAJECTORIES).stat().st_size
    bounded = [name for name in found if not name.startswith(("list of runs, first", "episodes", "search"))]
    each = max(found[name]["bytes"] / found[name]["requests"] for name in bounded)
    held = each <= size / 10 and peak <= MOST_MB
    result = {
        "asked": "server" if options.server else "functions",
        "paint_ms": painted,
        "runs": options.runs,
        "episodes": options.episodes,
    }
    print("RESULT", json.dumps(result | {"file_bytes": size, "peak_mb": peak, "held": held, "found": found}))
    sys.exit(not held)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _peak(process: psutil.Process) -> int:
    if process.pid == psutil.Process().pid:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def _wait(port: int) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/about", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
