"""Calls of the `adb` program: argument lists, a time limit per call, and a check whether the device is still there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from dataclasses import dataclass, field
from typing import NamedTuple

from TrainingFactory.common.texts import escape_control
from TrainingFactory.types import ToolFailure

MAX_OUTPUT_BYTES = 8 << 20  # bytes of one call; a call with more output is killed
CONNECTION_LOST_STATUS = 255  # adb's exit status if the connection breaks before the device command ends
INHERITED_ENV = ("PATH", "HOME", "LANG", "TMPDIR", "SYSTEMROOT", "USERPROFILE")  # variables that adb may see


class DeviceUnavailable(ToolFailure):
    """Raised if a device does not answer. The episode ends as `tool_failure` and is not trained on."""


class AdbResult(NamedTuple):
    status: int
    stdout: bytes
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout.decode("utf-8", errors="replace")


@dataclass(slots=True, frozen=True)
class Adb:
    """Location of the adb program and the port of its server, with a timeout per call in seconds."""

    program: str = "adb"
    server_port: int | None = None  # None: adb's own default, 5037
    timeout: float = 20.0

    async def call(self, *arguments: str, timeout: float | None = None) -> AdbResult:
        """Run adb with these arguments, without a shell. Raise DeviceUnavailable after `timeout` seconds."""
        port_args = () if self.server_port is None else ("-P", str(self.server_port))
        max_seconds = timeout or self.timeout
        try:
            process = await asyncio.create_subprocess_exec(
                self.program,
                *port_args,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_filter_environment(),
            )
        except OSError as error:
            raise DeviceUnavailable(
                f"cannot start {self.program!r}: {error.strerror}. Install Android's platform tools (Debian: apt "
                "install adb), or set environment.options.adb to the program"
            ) from error
        try:
            async with asyncio.timeout(max_seconds):
                stdout, stderr = await asyncio.gather(_read_all(process.stdout), _read_all(process.stderr))
                status = await process.wait()
        except TimeoutError:
            raise DeviceUnavailable(f"adb {_shorten(arguments)} took longer than {max_seconds:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return AdbResult(status, stdout, stderr.decode("utf-8", errors="replace"))


@dataclass(slots=True)
class Device:
    """One device. `failure` is the reason why the device was unavailable to a call of the current episode."""

    adb: Adb
    serial: str
    failure: str | None = field(default=None)

    async def call(self, *arguments: str, timeout: float | None = None) -> AdbResult:
        """Run an adb command on this device. Raise DeviceUnavailable if the device is missing, offline or silent."""
        try:
            result = await self.adb.call("-s", self.serial, *arguments, timeout=timeout)
            if result.status != 0 and arguments != ("get-state",):
                await self._check_connection(result)
        except DeviceUnavailable as error:
            self.failure = str(error)
            raise
        return result

    async def shell(self, *words: str, timeout: float | None = None) -> AdbResult:
        """Run a program on the device; quote each argument, because adb passes one line to the device's shell."""
        return await self.call("shell", "-T", *map(quote_word, words), timeout=timeout)

    async def read_state(self) -> str:
        """Return adb's state of the device: `device` if it is connected."""
        result = await self.call("get-state")
        return result.output.strip() if result.status == 0 else _get_last_line(result.stderr)

    async def _check_connection(self, result: AdbResult) -> None:
        """Raise DeviceUnavailable if a failed call is the device's fault and not the command's."""
        device_state = await self.read_state()
        if device_state != "device" or result.status == CONNECTION_LOST_STATUS:
            reason = _get_last_line(result.stderr) or device_state
            raise DeviceUnavailable(f"Android device {self.serial} is unavailable: {reason}")


def quote_word(word: str) -> str:
    """Quote a word for the device's shell. Raise ValueError for NUL, which no argument can contain."""
    if "\0" in word:
        raise ValueError("a text for a device cannot contain the character NUL")
    return shlex.quote(word)


async def _read_all(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    output = bytearray()
    while chunk := await stream.read(65536):
        output += chunk
        if len(output) > MAX_OUTPUT_BYTES:
            raise DeviceUnavailable(f"a call of adb returned more than {MAX_OUTPUT_BYTES >> 20} MiB")
    return bytes(output)


def _filter_environment() -> dict[str, str]:
    """Return the environment variables for adb, without secrets of the run."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper() in INHERITED_ENV or name.startswith(("ADB_", "ANDROID_", "LC_"))
    }


def _get_last_line(text: str) -> str:
    return escape_control((text.strip().splitlines() or [""])[-1][:200])


def _shorten(arguments: tuple[str, ...]) -> str:
    return escape_control(" ".join(arguments)[:80])
