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
from TrainingFactory.types import EngineSpec
from TrainingFactory.workers.child import explain, send, take_pipes

TICK = 0.25  # seconds between two looks at the engine's process
SEGMENT = re.compile(r" /dev/shm/((?:psm_|sem\.|vllm|torch_)[^/\s]+)")  # as Python, vLLM and torch name them


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
            os.kill(watcher, signal.SIGUSR1)
        send(answers, ticket, found, problem)

    while line := await reader.readline():
        ticket, method, args = json.loads(line)
        if method != "cancel":
            calls[ticket] = asyncio.create_task(answer(ticket, method, args))
        elif ticket in calls:
            calls[ticket].cancel()
    await engine.close()


def watch(life: int) -> int:
    """Fork the process that watches over this one, and return its number. `life` is a pipe to which nobody writes. On
    SIGUSR1 it looks what segments there are: those who have them may be gone at the end."""
    watched = os.getpid()
    if watcher := os.fork():
        os.close(life)
        return watcher
    left: set[str] = set()
    signal.signal(signal.SIGUSR1, lambda *_: left.update(segments(watched)))
    os.setsid()
    os.close(0)  # and no more: it holds the pipe of answers until everything is gone
    while os.getppid() == watched and not select.select([life], [], [], TICK)[0]:
        pass
    left |= segments(watched)
    for folder in members(watched):
        with suppress(OSError):
            if b"resource_tracker" not in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
    time.sleep(TICK)  # in which Python's own tracker removes what it knows of
    with suppress(ProcessLookupError):
        os.killpg(watched, signal.SIGKILL)
    for name in left:
        Path("/dev/shm", name).unlink(missing_ok=True)
    os._exit(0)


def segments(group: int) -> set[str]:
    """Return the segments of shared memory that the processes of a group have."""
    found: set[str] = set()
    for folder in members(group):
        with suppress(OSError):  # it may end meanwhile
            found.update(SEGMENT.findall((folder / "maps").read_text()))
    return found


def members(group: int) -> list[Path]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append(folder)
    return found


if __name__ == "__main__":
    main()
