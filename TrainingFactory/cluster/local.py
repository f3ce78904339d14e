"""Engines in child processes on this machine, called over pipes; calls of one engine run concurrently."""

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

from TrainingFactory.cluster.launcher import LAUNCHER_VARIABLES
from TrainingFactory.cluster.messages import MAX_MESSAGE_BYTES, from_json, to_json
from TrainingFactory.cluster.places import EngineLost
from TrainingFactory.types import EngineSpec

CLOSE_SECONDS = 20.0  # grace period for an engine to close before it is killed
LOG_TAIL_LINES = 15  # lines of an engine's log that an error quotes
CAUSE_LINE = re.compile(r"\b\w*(?:Error|Exception): .+")
# vLLM's wrappers of a cause.
VLLM_WRAPPER = re.compile("Engine core initialization failed|WorkerProc initialization failed")


class LocalEngineLauncher:
    """Launcher of `LocalEngine`s. `extra_env` holds further environment variables for the child processes. `folder`
    keeps their logs; None: logs are deleted on close. `notify` reports progress to the user; `role` names engines."""

    def __init__(
        self, spec: EngineSpec, extra_env: Mapping[str, str] | None = None, start_timeout: float = 600.0,
        notify: Callable[[str], object] = lambda text: None, folder: Path | None = None, role: str = "sampler"
    ) -> None:  # fmt: skip
        self._spec, self._start_timeout, self._notify, self._folder = spec, start_timeout, notify, folder
        self._role = role
        num_threads = str(max(1, (os.cpu_count() or 1) // 2))  # the learner has the other half
        # The whole sys.path, because processes started by vLLM must find the same packages.
        python_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        inherited_env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
        self._env = {"OMP_NUM_THREADS": num_threads} | inherited_env | {"PYTHONPATH": python_path}
        self._env |= extra_env or {}
        self._engines: list[LocalEngine] = []

    async def launch_engine(self, number: int) -> LocalEngine:
        start_time = time.monotonic()
        engine = LocalEngine(number, self._folder, self._role)
        self._engines.append(engine)
        try:
            await engine.open(self._spec, self._env)
            async with asyncio.timeout(self._start_timeout):
                engine.engine_info = await engine.call("start")
        except (TimeoutError, EngineLost, ValueError) as error:
            cause, log_tail = engine.find_last_error()
            if isinstance(error, TimeoutError):
                cause = f"it took longer than {self._start_timeout:g} s (increase compute.start_timeout)"
            elif isinstance(error, ValueError) or not cause:
                cause = str(error)
            await engine.close()
            raise ValueError(f"Could not start {engine.name}: {cause}{engine.log_note}{log_tail}") from error
        except BaseException:
            await engine.close()
            raise
        self._notify(f"{engine.name} is ready after {time.monotonic() - start_time:.0f} s")
        return engine

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))


class LocalEngine:
    """Engine in a child process, which `close` ends. It also ends when this program ends, even if that is killed."""

    def __init__(self, engine_number: int, folder: Path | None, role: str) -> None:
        self.name = f"{role} {engine_number}"
        self._temporary_folder = Path(tempfile.mkdtemp()) if folder is None else None
        self.log_path = (folder or self._temporary_folder or Path()) / f"{role}-{engine_number}.log"
        self.log_note = "" if folder is None else f" (log: {self.log_path})"
        self._log_offset = 0  # size in bytes of the log of earlier engines
        self.engine_info: dict[str, Any] = {}  # the result of the engine's `start`
        self._lifeline_pipe = -1  # closing this pipe ends the engine
        self._process: asyncio.subprocess.Process | None = None
        self._ticket_numbers, self._failure_text = itertools.count(), "is not open"
        self._futures: dict[str, asyncio.Future[Any]] = {}

    async def open(self, spec: EngineSpec, env: Mapping[str, str]) -> None:
        pipe_reader, self._lifeline_pipe = os.pipe()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log_file:
            self._log_offset = log_file.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "TrainingFactory.cluster.local_child", str(pipe_reader),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log_file, limit=MAX_MESSAGE_BYTES,
                env=env, pass_fds=[pipe_reader], start_new_session=True
            )  # fmt: skip
        os.close(pipe_reader)
        self._failure_text = ""
        self.name = f"{self.name}, process {self._process.pid}"
        self._reader = asyncio.create_task(self._read_answers(self._process.stdout))
        self._send(dataclasses.asdict(spec))

    async def call(self, method: str, *args: Any) -> Any:
        if self._failure_text:
            raise EngineLost(f"{self.name} {self._failure_text}")
        ticket = str(next(self._ticket_numbers))
        self._futures[ticket] = future = asyncio.get_running_loop().create_future()
        self._send([ticket, method, [to_json(arg) for arg in args]])
        try:
            return from_json(await future)
        except asyncio.CancelledError:
            self._send([ticket, "cancel", []])
            raise
        finally:
            del self._futures[ticket]

    async def close(self) -> None:
        if self._lifeline_pipe < 0:
            return
        if not self._failure_text and self.engine_info:  # an engine that is still starting handles no calls
            with suppress(EngineLost, ValueError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.call("close")
        self._failure_text = self._failure_text or "is closed"
        lifeline_pipe, self._lifeline_pipe = self._lifeline_pipe, -1
        os.close(lifeline_pipe)  # the watcher process now kills whatever is still running
        if self._process is not None:
            await self._process.wait()
            await self._reader
        if self._temporary_folder is not None:
            shutil.rmtree(self._temporary_folder)

    def _send(self, message: Any) -> None:
        if not self._failure_text and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read_answers(self, stdout: Any) -> None:
        """Resolve the calls' futures until the process and all its children have ended."""
        while (line := await stdout.readline()).endswith(b"\n"):  # a killed process leaves a partial line
            ticket, result, error_text = json.loads(line)
            future = self._futures.get(ticket)
            if future is None or future.done():  # cancelled
                continue
            error_type, _, message = (error_text or "").partition(": ")
            if error_text is None:
                future.set_result(result)
            elif error_type == "ValueError":
                future.set_exception(ValueError(message))
            else:
                self._failure_text = self._failure_text or f"failed: {error_text}{self.log_note}"
                future.set_exception(EngineLost(f"{self.name} {self._failure_text}"))
        cause, _ = self.find_last_error()
        exit_text = "has exited" + (f": {cause}" if cause else "") + self.log_note
        self._failure_text = self._failure_text or exit_text
        for future in self._futures.values():
            if not future.done():
                future.set_exception(EngineLost(f"{self.name} {self._failure_text}"))

    def find_last_error(self) -> tuple[str, str]:
        """Return the last error in this engine's log and the end of the log. Errors in which vLLM wraps another error
        are skipped."""
        lines = self.log_path.read_bytes()[self._log_offset :].decode(errors="replace").splitlines()
        causes = [
            match[0] for line in lines if (match := CAUSE_LINE.search(line)) and not VLLM_WRAPPER.search(line)
        ]
        log_tail = "".join(f"\n    {line}" for line in lines[-LOG_TAIL_LINES:])
        return causes[-1] if causes else "", f"\nThe end of its log:{log_tail}" if log_tail else ""
