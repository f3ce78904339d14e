"""Runs one engine in the process that `local` has started: calls come as lines of JSON, many at a time.

A second, small process watches over it. When the program that wants the samples closes its pipe, or is gone, or the
engine's process is, it ends everything that the engine has started and removes the segments of shared memory that
they leave: nobody else is there to do it after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from TrainingFactory.cluster.engines import make_engine
from TrainingFactory.cluster.messages import LARGEST, METHODS, from_json, to_json
from TrainingFactory.common.workers.child import explain, send, take_pipes
from TrainingFactory.types import EngineSpec

TICK = 0.25  # seconds between two looks at the engine's process
ROUNDS = 80  # ticks in which all that an engine has started must end
# As Python, vLLM and torch name them; by inode, because a semaphore is mapped under a name that is gone.
SEGMENT = re.compile(r" (\d+) +/dev/shm/(?:psm_|sem\.|vllm|torch_)[^/\s]+")


def main() -> None:
    watcher = watch(int(sys.argv[1]))
    asyncio.run(serve(*take_pipes(), watcher))


async def serve(lines: BinaryIO, answers: int, watcher: int) -> None:
    reader, loop = asyncio.StreamReader(limit=LARGEST), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), lines)
    engine = make_engine(EngineSpec(**json.loads(await reader.readline())))
    calls: dict[str, asyncio.Task[None]] = {}

    async def answer(ticket: str, method: str, args: list[Any]) -> None:
        found, problem = None, None
        try:
            assert method in METHODS, method
            found = to_json(await getattr(engine, method)(*map(from_json, args)))
        except Exception as error:  # whatever a model or vLLM raises
            problem = f"ValueError: {error}" if isinstance(error, ValueError) else explain(error)
        finally:
            calls.pop(ticket, None)
        if method == "start":
            os.write(watcher, f"{' '.join(segments(os.getpid()))}\n".encode())  # heard even if there are none
        send(answers, ticket, found, problem)

    while line := await reader.readline():
        ticket, method, args = json.loads(line)
        if method != "cancel":
            calls[ticket] = asyncio.create_task(answer(ticket, method, args))
        elif ticket in calls:
            calls[ticket].cancel()
    await engine.close()


def watch(life: int) -> int:
    """Fork the process that watches over this one; return where it takes the segments that there are after the start,
    since those who have them may be gone at the end. Until then it looks itself. `life` is a pipe to which nobody
    writes."""
    watched, (told, tell) = os.getpid(), os.pipe()
    if os.fork():
        os.close(life)
        return tell
    os.setsid()
    os.close(0)  # and no more: it holds the pipe of answers until everything is gone
    left, hears, over = set[str](), [life, told], False
    while not over:
        over = os.getppid() != watched
        heard = select.select(hears, [], [], 0 if over else TICK)[0]
        if told in heard:
            left.update(os.read(told, LARGEST).decode().split())
            hears = [life]
        elif told in hears:
            left |= segments(watched)
        over = over or life in heard
    left |= segments(watched)
    for _ in range(ROUNDS):
        for folder in (living := members(watched)):
            with suppress(OSError):  # Python's own tracker removes what it knows of when all others are gone
                if b"resource_tracker" not in (folder / "cmdline").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
        if not living:
            break
        time.sleep(TICK)
    with suppress(ProcessLookupError):
        os.killpg(watched, signal.SIGKILL)
    for path in Path("/dev/shm").iterdir() if left else ():
        with suppress(OSError):
            if str(path.stat().st_ino) in left:
                path.unlink()
    os._exit(0)


def segments(group: int) -> set[str]:
    """Return the segments of shared memory that the processes of a group have."""
    found: set[str] = set()
    for folder in members(group):
        with suppress(OSError):  # it may end meanwhile
            found.update(SEGMENT.findall((folder / "maps").read_text()))
    return found


def members(group: int) -> list[Path]:
    """Return the folders in /proc of a group's processes that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its) == group and state != "Z":
                found.append(folder)
    return found


if __name__ == "__main__":
    main()
