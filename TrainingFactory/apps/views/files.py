"""Incremental reads of files that grow or that other programs wrote: only new bytes, and only whole lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from TrainingFactory.data.disk import MAX_LINE_BYTES, open_regular_file

TAIL_BYTES = 64  # bytes


class FilePosition(NamedTuple):
    """The position up to which a file was read. `tail` holds the bytes before it, which show whether the file was
    truncated and has grown again."""

    offset: int = 0
    tail: bytes = b""


class FileChunk(NamedTuple):
    """Whole lines of a file from byte `start`. `was_truncated`: the file was truncated and is read from its beginning
    again."""

    start: int
    lines: list[bytes]
    position: FilePosition
    was_truncated: bool
    size: int  # of the file

    @property
    def has_more(self) -> bool:
        return bool(self.lines) and self.position.offset < self.size


class ReadProblems:
    """Collector of read errors, so that one unreadable file does not hide the others."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextmanager
    def record_errors(self, subject: str) -> Iterator[None]:
        """Record an error raised in the block; `subject` names the file or the part of it that is read."""
        try:
            yield
        except Exception as error:  # users may have edited the files in any way
            reason = format_reason(error)
            self.texts.append(reason if subject in reason else f"{subject}: {reason}")


def format_reason(error: Exception) -> str:
    """Return an error message in one line."""
    return f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())


def read_new_lines(path: Path, position: FilePosition, max_bytes: int) -> FileChunk:
    """Read about `max_bytes` after `position`, but at least one line. A missing file counts as empty. Raise
    ValueError if the file is not a regular one (see `open_regular_file`) or a line exceeds `MAX_LINE_BYTES` bytes."""
    try:
        file = open_regular_file(path)
    except FileNotFoundError:
        return FileChunk(0, [], FilePosition(), position.offset > 0, 0)
    with file:
        file_size, start = os.fstat(file.fileno()).st_size, position.offset
        file.seek(max(0, start - len(position.tail)))
        if was_truncated := file_size < start or file.read(len(position.tail)) != position.tail:
            start, position = file.seek(0), FilePosition()
        new_bytes = file.read(max_bytes)
        new_bytes += b"" if b"\n" in new_bytes else file.readline(MAX_LINE_BYTES)
    if len(new_bytes) > MAX_LINE_BYTES and b"\n" not in new_bytes:
        raise ValueError(f"{path} has a line of more than {MAX_LINE_BYTES} bytes at byte {start}.")
    new_bytes = new_bytes[: new_bytes.rfind(b"\n") + 1]
    position = FilePosition(start + len(new_bytes), (position.tail + new_bytes[-TAIL_BYTES:])[-TAIL_BYTES:])
    return FileChunk(start, new_bytes.split(b"\n")[:-1], position, was_truncated, file_size)


def read_last_lines(path: Path, max_bytes: int) -> tuple[list[bytes], int]:
    """Return the whole lines in the last `max_bytes` of a file (none if it is missing), and the number of bytes before
    them."""
    start_offset = max(0, read_new_lines(path, FilePosition(), 1).size - max_bytes)
    if start_offset:
        start_offset = read_new_lines(
            path, FilePosition(start_offset - 1), 1
        ).position.offset  # start of the next whole line
    return read_new_lines(path, FilePosition(start_offset), max_bytes).lines, start_offset


def read_json(line: bytes) -> Any:
    """Parse a line of JSON; raise ValueError if it is invalid. Replace invalid bytes and lone surrogates, which only
    the slower parser of the standard library accepts."""
    try:
        return from_json(line)
    except ValueError:
        text = line.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
        return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
