"""Child process of `local` that runs one engine; calls arrive as JSON lines and run concurrently.

A small watcher process cleans up, even after a kill: when the parent program closes its pipe or ends, or the engine's
process ends, it kills everything that the engine started and removes leftover shared-memory segments."""

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
from TrainingFactory.cluster.messages import MAX_MESSAGE_BYTES, METHODS, from_json, to_json
from TrainingFactory.common.workers.child import explain, send, take_pipes
from TrainingFactory.types import EngineSpec

TICK_SECONDS = 0.25  # seconds between two checks of the engine's process
MAX_CLEANUP_TICKS = 80  # ticks in which all processes of an engine must end
# Names used by Python, vLLM and torch. Matched by inode, because a semaphore is mapped under a deleted name.
SEGMENT_PATTERN = re.compile(r" (\d+) +/dev/shm/(?:psm_|sem\.|vllm|torch_)[^/\s]+")


def main() -> None:
    watcher = start_watcher(int(sys.argv[1]))
    asyncio.run(serve(*take_pipes(), watcher))


async def serve(calls_pipe: BinaryIO, answers_pipe: int, watcher: int) -> None:
    reader, loop = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls_pipe)
    engine = make_engine(EngineSpec(**json.loads(await reader.readline())))
    calls: dict[str, asyncio.Task[None]] = {}

    async def run_call(ticket: str, method: str, args: list[Any]) -> None:
        result = problem = None
        try:
            assert method in METHODS, method
            result = to_json(await getattr(engine, method)(*map(from_json, args)))
        except Exception as error:  # models and vLLM raise many kinds
            problem = f"ValueError: {error}" if isinstance(error, ValueError) else explain(error)
        finally:
            calls.pop(ticket, None)
        if method == "start":
            os.write(watcher, f"{' '.join(segment_inodes(os.getpid()))}\n".encode())  # sent even if empty
        send(answers_pipe, ticket, result, problem)

    while line := await reader.readline():
        ticket, method, args = json.loads(line)
        if method != "cancel":
            calls[ticket] = asyncio.create_task(run_call(ticket, method, args))
        elif ticket in calls:
            calls[ticket].cancel()
    await engine.close()


def start_watcher(lifeline: int) -> int:
    """Fork the watcher process, which cleans up when `lifeline` closes or this process ends. Return a pipe on which to
    send it the shared-memory segments that exist after `start`, because their owners may end before the cleanup. Until
    they are sent, the watcher polls for them."""
    engine_pid, (receiver, sender) = os.getpid(), os.pipe()
    if os.fork():
        os.close(lifeline)
        return sender
    os.setsid()
    os.close(0)  # only stdin: holding the pipe of answers open tells the parent that cleanup is not complete
    inodes, pipes, must_end = set[str](), [lifeline, receiver], False
    while not must_end:
        must_end = os.getppid() != engine_pid
        readable = select.select(pipes, [], [], 0 if must_end else TICK_SECONDS)[0]
        if receiver in readable:
            inodes.update(os.read(receiver, MAX_MESSAGE_BYTES).decode().split())
            pipes = [lifeline]
        elif receiver in pipes:
            inodes |= segment_inodes(engine_pid)
        must_end = must_end or lifeline in readable
    inodes |= segment_inodes(engine_pid)
    for _ in range(MAX_CLEANUP_TICKS):
        for folder in (live_folders := live_processes(engine_pid)):
            with suppress(OSError):  # Python's resource tracker cleans up and ends after all others
                if b"resource_tracker" not in (folder / "cmdline").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
        if not live_folders:
            break
        time.sleep(TICK_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(engine_pid, signal.SIGKILL)
    for path in Path("/dev/shm").iterdir() if inodes else ():
        with suppress(OSError):
            if str(path.stat().st_ino) in inodes:
                path.unlink()
    os._exit(0)


def segment_inodes(group: int) -> set[str]:
    """Return the inodes of the shared-memory segments that a process group has mapped."""
    inodes: set[str] = set()
    for folder in live_processes(group):
        with suppress(OSError):  # the process may end meanwhile
            inodes.update(SEGMENT_PATTERN.findall((folder / "maps").read_text()))
    return inodes


def live_processes(group: int) -> list[Path]:
    """Return the /proc folders of a process group's live processes."""
    folders = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, process_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                folders.append(folder)
    return folders


if __name__ == "__main__":
    main()
