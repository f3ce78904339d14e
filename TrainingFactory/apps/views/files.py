"""Files that grow while they are read, or that nobody of us wrote: only what is new of them, and never half a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from TrainingFactory.data.disk import MAX_LINE, open_regular

TAIL = 64  # bytes


class Place(NamedTuple):
    """Tells how far a file was read, and the bytes before: they show one that was cut back and grew again."""

    offset: int = 0
    tail: bytes = b""


class Part(NamedTuple):
    """Whole lines of a file. `again`: it was cut back, and these are from its beginning."""

    start: int
    lines: list[bytes]
    place: Place
    again: bool
    size: int  # of the file

    @property
    def more(self) -> bool:
        return bool(self.lines) and self.place.offset < self.size


class Problems:
    """Collects what could not be read, so that it hides nothing else."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Note why a file, or a part of one, could not be read; `what` names it."""
        try:
            yield
        except Exception as error:  # anybody may have changed the files
            reason = reason_of(error)
            self.texts.append(reason if what in reason else f"{what}: {reason}")


def reason_of(error: Exception) -> str:
    """Return in one line why something could not be read."""
    return f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())


def read_on(path: Path, place: Place, most: int) -> Part:
    """Return the lines after a place: about `most` bytes, but at least one line. A missing file is empty; raise
    ValueError for one that must not be read (see `open_regular`), and for a line over `MAX_LINE` bytes."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return Part(0, [], Place(), place.offset > 0, 0)
    with file:
        size, start = os.fstat(file.fileno()).st_size, place.offset
        file.seek(max(0, start - len(place.tail)))
        if again := size < start or file.read(len(place.tail)) != place.tail:
            start, place = file.seek(0), Place()
        data = file.read(most)
        data += b"" if b"\n" in data else file.readline(MAX_LINE)
    if len(data) > MAX_LINE and b"\n" not in data:
        raise ValueError(f"{path} has a line of more than {MAX_LINE} bytes at byte {start}.")
    data = data[: data.rfind(b"\n") + 1]
    place = Place(start + len(data), (place.tail + data[-TAIL:])[-TAIL:])
    return Part(start, data.split(b"\n")[:-1], place, again, size)


def read_end(path: Path, most: int) -> tuple[list[bytes], int]:
    """Return the whole lines within the last `most` bytes of a file, and the number of bytes before them. A missing
    file is empty."""
    start = max(0, read_on(path, Place(), 1).size - most)
    if start:
        start = read_on(path, Place(start - 1), 1).place.offset  # not half a line
    return read_on(path, Place(start), most).lines, start


def read_json(line: bytes) -> Any:
    """Return the value of a line of JSON. Replace invalid bytes and lone surrogates, which only the slower parser of
    the standard library accepts; raise ValueError for what is not JSON."""
    try:
        return from_json(line)
    except ValueError:
        text = line.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        return json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
