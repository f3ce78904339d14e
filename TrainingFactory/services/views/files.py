"""Files that grow while they are read, or that nobody of us wrote: only what is new of them, and never half a line."""

from __future__ import annotations

import io
import json
import os
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

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


def read_on(path: Path, place: Place, most: int) -> Part:
    """Return the lines after a place, about so many bytes, but one line at least. A file that is not there is empty."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Part(0, [], Place(), place.offset > 0, 0)
    with file:
        size, start = os.fstat(file.fileno()).st_size, place.offset
        file.seek(max(0, start - len(place.tail)))
        if again := size < start or file.read(len(place.tail)) != place.tail:
            start, place = file.seek(0), Place()
        data = file.read(most)
        data += b"" if b"\n" in data else file.readline()
    data = data[: data.rfind(b"\n") + 1]
    place = Place(start + len(data), (place.tail + data[-TAIL:])[-TAIL:])
    return Part(start, data.split(b"\n")[:-1], place, again, size)


def read_end(path: Path, most: int) -> tuple[list[bytes], int]:
    """Return the last whole lines of a file, up to so many bytes, but one at least, and how many come before them. A
    file that is not there is empty."""
    kept, size, left = deque[bytes](), 0, 0
    with path.open("rb") if path.is_file() else io.BytesIO() as file:
        for line in file:
            size += len(line)
            kept.append(line)
            while size > most and len(kept) > 1:
                size -= len(kept.popleft())
                left += 1
    return [line[:-1] for line in kept if line.endswith(b"\n")], left


def read_json(line: bytes) -> Any:
    """Return what a line of JSON holds; half a surrogate pair, which is no text, becomes a mark. Raise ValueError for
    what is no JSON."""
    try:
        found = json.loads(line.decode("utf-8", "replace"))
        if b"\\ud" in line.lower():
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return found
