"""An engine in a child process: calls side by side, cancelling, and nothing left whatever dies. vLLM itself is replaced
by a stand-in; tests/sampling/test_vllm.py has the real one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from TrainingFactory.cluster import local_child
from TrainingFactory.cluster.local import LocalEngine, LocalEngineLauncher
from TrainingFactory.cluster.places import EngineLost
from TrainingFactory.types import Completion, EngineSpec, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
FAKE = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "fixtures" / "fake_vllm"), str(ROOT)])}
SPEC = EngineSpec("vllm", "a-model", 64, pushed=False)


def remains(log: Path) -> tuple[list[int], Path]:
    """The processes and the segment of shared memory that an engine has."""
    [line] = [line.split() for line in log.read_text().splitlines() if line.startswith("REMAINS")]
    return [int(each) for each in line[1:3]], Path("/dev/shm", line[3])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_goes(log: Path) -> None:
    """Wait until everything is gone, since a process that was killed may need a moment; else the suite's own limit ends
    the test."""
    pids, memory = remains(log)
    while memory.exists() or any(map(alive, pids)):
        time.sleep(0.05)


async def test_calls_side_by_side(tmp_path: Path) -> None:
    said: list[str] = []
    places = LocalEngineLauncher(SPEC, FAKE, notify=said.append, folder=tmp_path)
    place = await places.launch_engine(3)
    assert said[0].startswith("sampler 3, process ") and place.engine_info["versions"]["vllm"] == "0"
    params = SamplingParams(stop_ids=(1,))
    waiting = [asyncio.create_task(place.call("sample", [9], params)) for _ in range(3)]
    assert await place.call("sample", [1, 2], params) == Completion([2], [-0.1], "length")
    with pytest.raises(ValueError, match=r"^token id 10 is not in the model's vocabulary of 10$"):
        await place.call("sample", [10], params)
    for task in waiting[:2]:
        task.cancel()
    await asyncio.wait(waiting[:2])
    assert (await place.call("sample", [6], params)).token_ids == [2]  # two were given up there too
    assert not waiting[2].done()
    await places.close()
    with pytest.raises(EngineLost, match="is closed"):
        await waiting[2]
    with pytest.raises(EngineLost, match="is closed"):
        await place.call("sample", [1], params)
    all_goes(tmp_path / "sampler-3.log")


async def test_whoever_dies_is_lost_and_leaves_nothing(tmp_path: Path) -> None:
    async def lost(place: LocalEngine, token: int, words: str) -> None:
        waiting = asyncio.create_task(place.call("sample", [9], SamplingParams()))
        await asyncio.sleep(0)
        if token < 0:
            os.kill(place.engine_info["pid"], signal.SIGKILL)
            token = 9
        with pytest.raises(EngineLost, match=words):
            await place.call("sample", [token], SamplingParams())
        with pytest.raises(EngineLost, match=words):
            await place.call("sample", [1], SamplingParams())
        await place.close()
        with pytest.raises(EngineLost):
            await waiting

    earlier = "RuntimeError: of an earlier engine\n"
    (tmp_path / "sampler-0.log").write_text(earlier)
    places = LocalEngineLauncher(SPEC, FAKE, folder=tmp_path)
    made = await asyncio.gather(*map(places.launch_engine, range(3)))
    causes = [
        (-1, r"has exited \(log: .*sampler-0.log\)$"),
        (7, r"engine core has died.*\(log: .*sampler-1.log\)"),
        (8, "ended a request by itself: abort"),
    ]
    await asyncio.gather(*(lost(place, *cause) for place, cause in zip(made, causes, strict=True)))
    await places.close()
    assert (tmp_path / "sampler-0.log").read_text().startswith(earlier)
    for number in range(3):
        all_goes(tmp_path / f"sampler-{number}.log")


def test_the_watcher_hears_of_a_start_that_made_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would look for them as long as the engine lives."""

    class Engine:
        async def start(self) -> None: ...

        async def close(self) -> None:
            await asyncio.sleep(0)  # what was asked is answered first

    monkeypatch.setattr(local_child, "make_engine", lambda spec: Engine())
    monkeypatch.setattr(local_child, "find_segment_inodes", lambda group: set())
    lines, asks, answers, answer, told, tell = *os.pipe(), *os.pipe(), *os.pipe()
    asked = json.dumps(dataclasses.asdict(SPEC)), json.dumps(["0", "start", []]), ""
    os.write(asks, "\n".join(asked).encode())
    os.close(asks)
    asyncio.run(local_child.serve(os.fdopen(lines, "rb"), answer, tell))
    os.close(tell)
    assert os.read(told, 10) == b"\n"
    for each in (answers, answer, told):
        os.close(each)


def test_an_engine_ends_with_the_program_however_that_ends(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, signal
from pathlib import Path
from TrainingFactory.cluster.local import LocalEngineLauncher
from TrainingFactory.types import EngineSpec
async def main():
    spec = EngineSpec("vllm", "m", 64, pushed=False)
    place = await LocalEngineLauncher(spec, {FAKE!r}, folder=Path({str(tmp_path)!r})).launch_engine(0)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    all_goes(tmp_path / "sampler-0.log")


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    logs = tmp_path / "engines"

    async def make(spec: EngineSpec, seconds: float = 100.0) -> None:
        await LocalEngineLauncher(spec, FAKE, seconds, folder=logs).launch_engine(0)

    with pytest.raises(
        ValueError, match=r"Could not start sampler 0, .*: ValueError: Model architectures \['Odd'\] are not"
    ) as told:
        asyncio.run(make(EngineSpec("vllm", "broken", 64)))
    assert f"(log: {logs}/sampler-0.log)\nThe end of its log:\n    (EngineCore)" in str(told.value)
    assert "(EngineCore) ValueError" in (logs / "sampler-0.log").read_text()
    with pytest.raises(ValueError, match=r"longer than 0.01 s .*compute.start_timeout"):
        asyncio.run(make(SPEC, 0.01))
