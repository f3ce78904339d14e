"""What a server writes where nobody should have to read it: kept, and shown when something fails."""

from __future__ import annotations

import asyncio
import contextlib
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
class Noise:
    """The last lines that a server wrote to stderr, and how many on its stdout were no messages."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    rest: bytes = b""  # a line that has no end yet
    not_messages: int = 0
    example: str = ""

    def feed(self, data: bytes) -> None:
        *whole, self.rest = (self.rest + data).split(b"\n")
        self.rest = self.rest[-4 * LINE_CHARS :]
        self.lines.extend(_line(line) for line in whole if line.strip())

    def count(self, error: ValidationError) -> None:
        """Count a line on stdout that is no message."""
        self.not_messages += 1
        if not self.example:
            self.example = str(error.errors(include_url=False, include_context=False)[0].get("input"))[:80]

    def story(self) -> str:
        """Return what helps to understand a failure."""
        told = ""
        if self.not_messages:
            told = f"; {self.not_messages} lines on its stdout were no MCP messages, such as {self.example!r}"
        shown = [line for line in (*self.lines, _line(self.rest)) if line.strip()][-LINES_SHOWN:]
        return told + ("; it wrote:\n  " + "\n  ".join(shown) if shown else "")


def _line(data: bytes) -> str:
    return data.decode(errors="replace").rstrip()[:LINE_CHARS]


@contextlib.contextmanager
def stderr_into(noise: Noise) -> Iterator[TextIO]:
    """Give a file for a process to write to, read by the running loop."""
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
            noise.feed(data)
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
