"""What MCP servers and the SDK write where nobody should have to read it: kept, and shown when something fails."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TextIO

from pydantic import ValidationError

LINES_KEPT = 40
LINES_SHOWN = 5
LINE_CHARS = 500


@dataclass(slots=True)
class Ring:
    """The last lines that a server wrote to stderr, and how many on its stdout were no messages."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    rest: bytes = b""  # a line that has no end yet
    noise: int = 0
    example: str = ""

    def feed(self, data: bytes) -> None:
        *whole, self.rest = (self.rest + data).split(b"\n")
        self.rest = self.rest[-4 * LINE_CHARS :]
        self.lines.extend(_line(line) for line in whole if line.strip())

    def heard(self, error: Exception) -> None:
        if not isinstance(error, ValidationError):
            return  # the transport's own trouble, which is told elsewhere
        self.noise += 1
        if not self.example:
            self.example = str(error.errors(include_url=False, include_context=False)[0].get("input"))[:80]

    def story(self) -> str:
        """What helps to understand a failure."""
        noise = f"; {self.noise} lines on its stdout were no MCP messages, such as {self.example!r}"
        shown = [line for line in (*self.lines, _line(self.rest)) if line.strip()][-LINES_SHOWN:]
        wrote = "; it wrote:\n  " + "\n  ".join(shown) if shown else ""
        return (noise if self.noise else "") + wrote


def _line(data: bytes) -> str:
    return data.decode(errors="replace").rstrip()[:LINE_CHARS]


@contextlib.contextmanager
def stderr_into(ring: Ring) -> Iterator[TextIO]:
    """A file for a process to write to, read by the running loop."""
    if sys.platform == "win32":  # its event loop cannot watch pipes
        with open(os.devnull, "w") as nowhere:
            yield nowhere
        return
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(reader, 65536)
            ring.feed(data)
            if not data:
                loop.remove_reader(reader)

    loop.add_reader(reader, read)
    try:
        with os.fdopen(writer, "w") as file:
            yield file
    finally:
        read()  # what came in last tells most
        loop.remove_reader(reader)
        os.close(reader)


_ours: contextvars.ContextVar[bool] = contextvars.ContextVar("ours", default=False)


class _NotOurs(logging.Filter):
    """What the SDK logs about our connections is told in our own errors, and what the HTTP client logs has URLs with
    secrets; what both log for others goes on."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not _ours.get()


_not_ours = _NotOurs()


def keep_quiet() -> None:
    """From here on, in this context and the tasks that come from it. A request of the SDK runs in the context of its
    call, so calls have to say so too."""
    _ours.set(True)


def filter_logs() -> None:
    """Once the SDK is imported, and its loggers are there."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in ("mcp", "httpx2", "httpcore2"):
            logging.getLogger(name).addFilter(_not_ours)
