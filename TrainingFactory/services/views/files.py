"""Files that grow while they are read, or that nobody of us wrote: only what is new of them, and never half a line."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAIL = 64  # bytes


@dataclass(slots=True)
class Place:
    """How far a file was read, and the bytes before it, by which one that was cut back and has grown again is noticed."""

    offset: int = 0
    tail: bytes = b""


@dataclass(slots=True, frozen=True)
class Part:
    """Whole lines of a file. `again`: it was cut back, and these are from its beginning."""

    start: int
    data: bytes
    place: Place
    again: bool
    size: int  # of the file

    @property
    def more(self) -> bool:
        return bool(self.data) and self.place.offset < self.size


def read_on(path: Path, place: Place, most: int) -> Part:
    """Return the lines after a place, about so many bytes, but one line at least. A file that is not there is empty."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Part(0, b"", Place(), place.offset > 0, 0)
    with file:
        size, start = os.fstat(file.fileno()).st_size, place.offset
        file.seek(max(0, start - len(place.tail)))
        again = size < start or file.read(len(place.tail)) != place.tail
        start = file.seek(0) if again else start
        data = file.read(most)
        if b"\n" not in data:
            data += file.readline()
        data = data[: data.rfind(b"\n") + 1]
        tail = data[-TAIL:] or (b"" if again else place.tail)
        return Part(start, data, Place(start + len(data), tail), again, size)


def read_json(line: bytes) -> Any:
    """Return what a line of JSON holds; what is no text in it, such as half a surrogate pair, becomes a mark. Raise
    ValueError for what is no JSON."""
    try:
        found = json.loads(line.decode("utf-8", "replace"))
        if b"\\ud" in line.lower():
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return found
