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
from TrainingFactory.cluster.messages import ENGINE_METHODS, MAX_MESSAGE_BYTES, from_json, to_json
from TrainingFactory.common.workers.child import format_error, send_answer, take_pipes
from TrainingFactory.types import EngineSpec

TICK_SECONDS = 0.25  # seconds between two checks of the engine's process
MAX_CLEANUP_TICKS = 80  # ticks in which all processes of an engine must end
# Names used by Python, vLLM and torch. Matched by inode, because a semaphore is mapped under a deleted name.
SEGMENT_PATTERN = re.compile(r" (\d+) +/dev/shm/(?:psm_|sem\.|vllm|torch_)[^/\s]+")


def main() -> None:
    watcher_pipe = start_watcher(int(sys.argv[1]))
    asyncio.run(serve(*take_pipes(), watcher_pipe))


async def serve(calls_pipe: BinaryIO, answers_pipe: int, watcher_pipe: int) -> None:
    reader, loop = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls_pipe)
    engine = make_engine(EngineSpec(**json.loads(await reader.readline())))
    calls: dict[str, asyncio.Task[None]] = {}

    async def run_call(ticket: str, method: str, args: list[Any]) -> None:
        result = error_text = None
        try:
            assert method in ENGINE_METHODS, method
            result = to_json(await getattr(engine, method)(*map(from_json, args)))
        except Exception as error:  # models and vLLM raise many kinds
            error_text = f"ValueError: {error}" if isinstance(error, ValueError) else format_error(error)
        finally:
            calls.pop(ticket, None)
        if method == "start":
            inodes = " ".join(find_segment_inodes(os.getpid()))  # sent even if empty
            os.write(watcher_pipe, f"{inodes}\n".encode())
        send_answer(answers_pipe, ticket, result, error_text)

    while line := await reader.readline():
        ticket, method, args = json.loads(line)
        if method != "cancel":
            calls[ticket] = asyncio.create_task(run_call(ticket, method, args))
        elif ticket in calls:
            calls[ticket].cancel()
    await engine.close()


def start_watcher(lifeline_pipe: int) -> int:
    """Fork the watcher process, which cleans up when `lifeline_pipe` closes or this process ends. Return a pipe
    on which to send it the shared-memory segments that exist after `start`, because their owners may end before the
    cleanup. Until they are sent, the watcher polls for them."""
    engine_pid, (segment_reader, segment_writer) = os.getpid(), os.pipe()
    if os.fork():
        os.close(lifeline_pipe)
        return segment_writer
    os.setsid()
    os.close(0)  # only stdin: holding the pipe of answers open tells the parent that cleanup is not complete
    inodes, pipes, is_ending = set[str](), [lifeline_pipe, segment_reader], False
    while not is_ending:
        is_ending = os.getppid() != engine_pid
        readable_pipes = select.select(pipes, [], [], 0 if is_ending else TICK_SECONDS)[0]
        if segment_reader in readable_pipes:
            inodes.update(os.read(segment_reader, MAX_MESSAGE_BYTES).decode().split())
            pipes = [lifeline_pipe]
        elif segment_reader in pipes:
            inodes |= find_segment_inodes(engine_pid)
        is_ending = is_ending or lifeline_pipe in readable_pipes
    inodes |= find_segment_inodes(engine_pid)
    for _ in range(MAX_CLEANUP_TICKS):
        for process_folder in (live_process_folders := find_process_folders(engine_pid)):
            with suppress(OSError):  # Python's resource tracker cleans up and ends after all others
                if b"resource_tracker" not in (process_folder / "cmdline").read_bytes():
                    os.kill(int(process_folder.name), signal.SIGKILL)
        if not live_process_folders:
            break
        time.sleep(TICK_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(engine_pid, signal.SIGKILL)
    for path in Path("/dev/shm").iterdir() if inodes else ():
        with suppress(OSError):
            if str(path.stat().st_ino) in inodes:
                path.unlink()
    os._exit(0)


def find_segment_inodes(process_group: int) -> set[str]:
    """Return the inodes of the shared-memory segments that a process group has mapped."""
    inodes: set[str] = set()
    for process_folder in find_process_folders(process_group):
        with suppress(OSError):  # the process may end meanwhile
            inodes.update(SEGMENT_PATTERN.findall((process_folder / "maps").read_text()))
    return inodes


def find_process_folders(process_group: int) -> list[Path]:
    """Return the /proc folders of a process group's live processes."""
    process_folders = []
    for process_folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            process_state, _, group_id = (process_folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group_id) == process_group and process_state != "Z":
                process_folders.append(process_folder)
    return process_folders


if __name__ == "__main__":
    main()
