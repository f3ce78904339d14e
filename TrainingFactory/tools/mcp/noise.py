"""What a server writes where nobody should have to read it: kept, and shown when something fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import TextIO

from pydantic import ValidationError

BYTES_KEPT = 8000
LINES_SHOWN = 5
LINE_CHARS = 500


class Noise:
    """The last that a server wrote to stderr, and how many lines on its stdout were no messages."""

    def __init__(self) -> None:
        self._written = b""
        self._not_messages, self._example = 0, ""

    def count(self, error: ValidationError) -> None:
        """Count a line on stdout that is no message."""
        self._not_messages += 1
        found = error.errors(include_url=False, include_context=False)[0].get("input")
        self._example = self._example or str(found)[:80]

    def story(self) -> str:
        """Return what helps to understand a failure."""
        told = ""
        if self._not_messages:
            told = (
                f"; {self._not_messages} lines on its stdout were no MCP messages, such as {self._example!r}"
            )
        lines = [line.rstrip()[:LINE_CHARS] for line in self._written.decode(errors="replace").splitlines()]
        shown = [line for line in lines if line][-LINES_SHOWN:]
        return told + ("; it wrote:\n  " + "\n  ".join(shown) if shown else "")

    @contextlib.contextmanager
    def stderr(self) -> Iterator[TextIO]:
        """Give a file for a process to write to, read by the running loop."""
        loop = asyncio.get_running_loop()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                data = os.read(reader, 65536)
                self._written = (self._written + data)[-BYTES_KEPT:]
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
