"""Engines in child processes of this machine: each gets its calls over a pipe, many at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from TrainingFactory.cluster.launcher import LAUNCHER
from TrainingFactory.cluster.messages import LARGEST, from_json, to_json
from TrainingFactory.cluster.places import PlaceLost
from TrainingFactory.types import EngineSpec

CLOSE_SECONDS = 20.0  # for an engine to end by itself
TAIL = 15  # lines of its log that an error quotes
CAUSE = re.compile(r"\b\w*(?:Error|Exception): .+")
FRAME = re.compile("Engine core initialization failed|WorkerProc initialization failed")  # "see above"


class LocalPlaces:
    """Makes `LocalPlace`s. `environment` is added to theirs; `folder` keeps their logs, which are deleted at the end
    without one; `say` hears what a user may want to know, under the name `what`."""

    def __init__(
        self, spec: EngineSpec, environment: Mapping[str, str] | None = None, start_timeout: float = 600.0,
        say: Callable[[str], object] = lambda text: None, folder: Path | None = None, what: str = "sampler",
    ) -> None:  # fmt: skip
        self._spec, self._seconds, self._say, self._folder, self._what = (
            spec,
            start_timeout,
            say,
            folder,
            what,
        )
        threads = str(max(1, (os.cpu_count() or 1) // 2))  # the learner has the other half
        # All of our path: what vLLM starts must find its packages too.
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        given, ours = environment or {}, {key: os.environ[key] for key in os.environ if key not in LAUNCHER}
        self._environment = {"OMP_NUM_THREADS": threads, **ours, "PYTHONPATH": path, **given}
        self._places: list[LocalPlace] = []

    async def make(self, number: int) -> LocalPlace:
        place, began = LocalPlace(number, self._folder, self._what), time.monotonic()
        self._places.append(place)
        try:
            await place.open(self._spec, self._environment)
            async with asyncio.timeout(self._seconds):
                place.about = await place.call("start")
        except (TimeoutError, PlaceLost, ValueError) as error:
            cause, tail = place.last_words()
            if isinstance(error, TimeoutError):
                cause = f"it took longer than {self._seconds:g} s, which compute.start_timeout raises"
            elif isinstance(error, ValueError) or not cause:
                cause = str(error)
            await place.close()
            raise ValueError(f"{place.name} could not be started: {cause}{place.log_note}{tail}") from error
        except BaseException:
            await place.close()
            raise
        self._say(f"{place.name} is ready after {time.monotonic() - began:.0f} s")
        return place

    async def close(self) -> None:
        await asyncio.gather(*(place.close() for place in self._places))


class LocalPlace:
    """An engine in a process of its own, which ends with `close`, and with this program however it ends."""

    def __init__(self, number: int, folder: Path | None, what: str) -> None:
        self.name, self._folder = f"{what} {number}", Path(tempfile.mkdtemp()) if folder is None else None
        self.log = (folder or self._folder or Path()) / f"{what}-{number}.log"
        self.log_note = "" if folder is None else f" (log: {self.log})"
        self._log_start = 0  # bytes of earlier engines in the log
        self.about: dict[str, Any] = {}  # what the engine said of itself
        self._life = -1  # while this pipe is open, it may live
        self._process: asyncio.subprocess.Process | None = None
        self._tickets, self._lost = itertools.count(), "is not open"
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    async def open(self, spec: EngineSpec, environment: Mapping[str, str]) -> None:
        theirs, self._life = os.pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "TrainingFactory.cluster.local_child", str(theirs),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=LARGEST,
                env=environment, pass_fds=[theirs], start_new_session=True,
            )  # fmt: skip
        os.close(theirs)
        self._lost = ""
        self.name = f"{self.name}, process {self._process.pid}"
        self._reader = asyncio.create_task(self._read(self._process.stdout))
        self._send(dataclasses.asdict(spec))

    async def call(self, method: str, *args: Any) -> Any:
        if self._lost:
            raise PlaceLost(f"{self.name} {self._lost}")
        ticket = str(next(self._tickets))
        self._waiting[ticket] = answer = asyncio.get_running_loop().create_future()
        self._send([ticket, method, [to_json(each) for each in args]])
        try:
            return from_json(await answer)
        except asyncio.CancelledError:
            self._send([ticket, "cancel", []])
            raise
        finally:
            del self._waiting[ticket]

    async def close(self) -> None:
        if self._life < 0:
            return
        if not self._lost and self.about:  # one that is starting hears nothing
            with suppress(PlaceLost, ValueError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.call("close")
        life, self._life, self._lost = self._life, -1, self._lost or "is closed"
        os.close(life)  # now the process that watches over it ends what is left
        if self._process is not None:
            await self._process.wait()
            await self._reader
        if self._folder is not None:
            shutil.rmtree(self._folder)

    def _send(self, message: Any) -> None:
        if not self._lost and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, lines: Any) -> None:
        """Hand out answers until the process and all that it has started are gone."""
        while (line := await lines.readline()).endswith(
            b"\n"
        ):  # half a line is the last word of one that was killed
            ticket, found, problem = json.loads(line)
            answer = self._waiting.get(ticket)
            if answer is None or answer.done():  # it was cancelled
                continue
            kind, _, text = (problem or "").partition(": ")
            if problem is None:
                answer.set_result(found)
            elif kind == "ValueError":
                answer.set_exception(ValueError(text))
            else:
                self._lost = self._lost or f"is of no use any more: {problem}{self.log_note}"
                answer.set_exception(PlaceLost(f"{self.name} {self._lost}"))
        cause, _ = self.last_words()
        self._lost = self._lost or "is gone" + (f": {cause}" if cause else "") + self.log_note
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(PlaceLost(f"{self.name} {self._lost}"))

    def last_words(self) -> tuple[str, str]:
        """Return the last error in the log of this engine, without the frame that vLLM puts around it, and the log's
        last lines."""
        lines = self.log.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        found = [match[0] for line in lines if (match := CAUSE.search(line)) and not FRAME.search(line)]
        tail = "".join(f"\n    {line}" for line in lines[-TAIL:])
        return found[-1] if found else "", f"\nThe end of its log:{tail}" if tail else ""
