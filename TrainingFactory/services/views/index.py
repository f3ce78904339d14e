"""An index over the episodes of a run, so that no request reads the whole file: where each line begins, and what lists
are filtered and sorted by. It is a cache in RUNS/.index/, built as the file grows; whatever is wrong with it, it is made
anew. The run's own folder is only read."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from TrainingFactory.services.runs.folder import TRAJECTORIES, RunFolder
from TrainingFactory.services.views.episodes import episode_view, read_row, texts
from TrainingFactory.services.views.files import Part, Place, read_on
from TrainingFactory.services.views.shapes import EpisodePage, EpisodeRow, EpisodeView, GroupView, Sort

VERSION, FOLDER = 1, ".index"
BLOCK = 4 << 20  # bytes that are read at once
BUILT = 48 << 20  # bytes that a request adds to the index
SEARCHED = 32 << 20  # bytes that a request looks through for a text
COLUMNS = tuple(EpisodeRow.model_fields)
SORTS: dict[Sort, str] = {
    "place": "number", "reward": "coalesce(reward, -1e308)", "length": "tokens", "seconds": "seconds",
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class Query:
    """Which episodes are asked for, in which order, and after which one (`next` of the page before)."""

    step: int | None = None
    task: str | None = None
    status: str | None = None
    failed_tool: str | None = None  # a tool of which a call failed; * is any
    least: float | None = None  # of the reward
    most: float | None = None
    text: str | None = None
    sort: Sort = "place"
    down: bool = False
    after: str | None = None
    limit: int = 50

    def where(self) -> tuple[str, list[Any]]:
        """Return the condition, but for the text and the place."""
        given = [
            ("step = ?", self.step), ("task = ?", self.task), ("status = ?", self.status), ("reward >= ?", self.least),
            ("reward <= ?", self.most),
            ("tool_failures > ?", 0 if self.failed_tool == "*" else None),
            ("instr(failed, ?)", f"\n{self.failed_tool}\n" if self.failed_tool not in (None, "*") else None),
        ]  # fmt: skip
        found = [(text, value) for text, value in given if value is not None]
        return " AND ".join(["1", *(text for text, _ in found)]), [value for _, value in found]


class EpisodeIndex:
    """The index of one run. Each call opens it anew, so that it may come from any thread or process."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.path = run, run.path / TRAJECTORIES
        self.file = run.path.parent / FOLDER / f"{run.name}.v{VERSION}.sqlite"

    def page(self, query: Query) -> EpisodePage:
        """Return the episodes that are asked for, as many as a request may look at."""
        with self._open() as db:
            read, part = self._grow(db)
            where, values = query.where()
            total = db.execute("SELECT count(*) FROM episodes").fetchone()[0]
            matched = db.execute(f"SELECT count(*) FROM episodes WHERE {where}", values).fetchone()[0]
            limit, key = max(1, min(query.limit, 1000)), SORTS[query.sort]
            if query.after is not None:
                value, _, number = query.after.rpartition(":")
                where += f" AND ({key}, number) {'<' if query.down else '>'} (?, ?)"
                values += [float(value), int(number)]
            way = "DESC" if query.down else "ASC"
            sql = f"SELECT *, {key} AS at FROM episodes WHERE {where} ORDER BY {key} {way}, number {way}"
            rows, last, searched, cut = list[EpisodeRow](), None, 0, False
            for found in db.execute(sql + ("" if query.text else f" LIMIT {limit + 1}"), values):
                if cut := len(rows) == limit or searched > SEARCHED:
                    break
                last = f"{found['at']!r}:{found['number']}"
                if query.text:
                    line = self._line(found)
                    searched += len(line)
                    if not _has(line, query.text):
                        continue
                rows.append(_row(found))
        unknown = query.text and (cut or query.after is not None)
        return EpisodePage(
            total=total, matched=None if unknown else len(rows) if query.text else matched, rows=rows,
            next=last if cut else None, bytes_read=read + searched, indexed=part.place.offset, size=part.size,
            partial=part.more or (cut and len(rows) < limit),
        )  # fmt: skip

    def episode(self, number: int) -> EpisodeView:
        """Return one episode by its line; raise ValueError where there is none."""
        for line, found in self.lines("number = ?", number):
            return episode_view(found, line)
        raise ValueError(f"run {self.run.name} has no episode {number}")

    def group(self, step: int, task: str) -> GroupView:
        """Return the episodes of a task in a step; raise ValueError where there are none."""
        members = [
            episode_view(number, line) for line, number in self.lines("step = ? AND task = ?", step, task)
        ]
        if not members:
            raise ValueError(f"run {self.run.name} has no episodes of task {task!r} in step {step}")
        return GroupView(step=step, task=task, members=members)

    def lines(self, where: str, *values: Any) -> list[tuple[bytes, int]]:
        """Return the lines of episodes, with their numbers."""
        with self._open() as db:
            while True:
                more = self._grow(db)[1].more
                found = db.execute(f"SELECT * FROM episodes WHERE {where} ORDER BY number", values).fetchall()
                last = db.execute("SELECT max(number) FROM episodes").fetchone()[0]
                # those of a group stand together: where another line follows, all of them are known
                if not more or (found and found[-1]["number"] < last):
                    return [(self._line(row), row["number"]) for row in found]

    def _line(self, row: sqlite3.Row) -> bytes:
        with self.path.open("rb") as file:
            file.seek(row["start"])
            return file.read(row["length"])

    def _grow(self, db: sqlite3.Connection) -> tuple[int, Part]:
        """Add what is new in the file, as much as a request may; return the bytes that were read, and the last part."""
        db.execute("BEGIN IMMEDIATE")  # one process at a time
        with db:
            offset, tail, number = db.execute("SELECT offset, tail, lines FROM place").fetchone()
            place, read = Place(offset, tail), 0
            while True:
                part = read_on(self.path, place, BLOCK)
                if part.again:
                    db.execute("DELETE FROM episodes")
                    number = 0
                place, start = part.place, part.start
                for number, line in enumerate(part.data.split(b"\n")[:-1], number + 1):  # noqa: B020
                    row, failed = read_row(number, line)
                    values = (
                        *row.model_dump().values(),
                        start,
                        len(line),
                        "".join(f"\n{n}\n" for n in failed),
                    )
                    db.execute(f"INSERT INTO episodes VALUES ({', '.join('?' * len(values))})", values)
                    start += len(line) + 1
                read += len(part.data)
                if not part.more or read >= BUILT:
                    break
            db.execute("UPDATE place SET offset = ?, tail = ?, lines = ?", (place.offset, place.tail, number))
        return read, part

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.file.parent.mkdir(exist_ok=True)
            db = _prepared(self.file)
        except (OSError, sqlite3.OperationalError):  # a folder that may only be read
            name = hashlib.sha256(str(self.file.absolute()).encode()).hexdigest()
            self.file = Path(_elsewhere().name) / f"{name}.sqlite"
            db = _prepared(self.file)
        except sqlite3.DatabaseError:  # damaged
            self.file.unlink()
            db = _prepared(self.file)
        try:
            yield db
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            self.file.unlink(missing_ok=True)
            raise ValueError(f"{self.file} was damaged and has been removed; ask again") from error
        finally:
            db.close()


@functools.cache
def _elsewhere() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tfactory-index-")


def _prepared(path: Path) -> sqlite3.Connection:
    if not path.exists():
        for old in path.parent.glob("*.sqlite"):  # of runs that are gone
            if path.parent.name == FOLDER and not (path.parent.parent / Path(old.stem).stem).is_dir():
                old.unlink(missing_ok=True)
    db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    try:
        db.execute("PRAGMA synchronous = OFF")  # it is a cache
        columns = ", ".join(f'"{name}"' for name in (*COLUMNS[1:], "start", "length", "failed"))
        db.executescript(
            f"CREATE TABLE IF NOT EXISTS episodes (number INTEGER PRIMARY KEY, {columns});"
            "CREATE INDEX IF NOT EXISTS by_step ON episodes (step, task);"
            "CREATE TABLE IF NOT EXISTS place (id INTEGER PRIMARY KEY CHECK (id = 1), offset, tail, lines);"
            "INSERT OR IGNORE INTO place VALUES (1, 0, x'', 0)"
        )
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db


def _row(found: sqlite3.Row) -> EpisodeRow:
    return EpisodeRow(**{name: found[name] for name in COLUMNS})


def _has(line: bytes, text: str) -> bool:
    """Tell whether an episode says something, in whatever case. Most lines are told by their bytes."""
    if text.isalnum() and text.isascii() and text.lower().encode() not in line.lower():
        return False
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        return any(text.lower() in each.lower() for each in texts(line))
    return text.lower() in line.decode("utf-8", "replace").lower()
