"""An SQLite index of a run's episodes, so that no request reads the whole file: the offset of each line and the columns
that lists filter and sort by. It grows with the file and lives in a temporary file of the process: nothing is written
into the run's folder, and no index can be stale."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass
from typing import Any

from TrainingFactory.apps.views.episodes import contains_text, make_episode_view, read_row
from TrainingFactory.apps.views.files import FileChunk, FilePosition, read_new_lines
from TrainingFactory.apps.views.shapes import EpisodePage, EpisodeRow, EpisodeView, GroupView, SortOrder
from TrainingFactory.data.disk import open_regular_file
from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder

BLOCK_BYTES = 4 << 20  # bytes per read
MAX_INDEXED_BYTES = 8 << 20  # maximum bytes that one request indexes
MAX_SEARCHED_BYTES = 32 << 20  # maximum bytes that one request searches for a text
MAX_ROWS = 1000  # maximum rows of a page
EPISODE_COLUMNS = tuple(EpisodeRow.model_fields)
INSERT_EPISODE = f"INSERT INTO episodes VALUES ({', '.join('?' * (len(EPISODE_COLUMNS) + 3))})"
SORT_KEYS: dict[SortOrder, str] = {
    "place": "number", "reward": "coalesce(reward, -1e308)", "length": "tokens", "seconds": "seconds",
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class Query:
    """Filter, order and position of a page of episodes."""

    step: int | None = None
    task: str | None = None
    status: str | None = None
    failed_tool: str | None = None  # a tool with a failed call; *: any tool
    least: float | None = None  # minimum reward
    most: float | None = None  # maximum reward
    text: str | None = None
    sort: SortOrder = "place"
    down: bool = False
    after: str | None = None  # `next` of the previous page
    limit: int = 50

    def make_condition(self) -> tuple[str, list[Any]]:
        """Return the SQL condition and its parameters, without `text` and `after`."""
        tool_name = self.failed_tool
        conditions = [
            ("step = ?", self.step), ("task = ?", self.task), ("status = ?", self.status), ("reward >= ?", self.least),
            ("reward <= ?", self.most), ("tool_failures > ?", 0 if tool_name == "*" else None),
            ("instr(failed, ?)", None if tool_name in (None, "*") else f"\n{tool_name}\n"),
        ]  # fmt: skip
        filters = [(clause, value) for clause, value in conditions if value is not None]
        return " AND ".join(["1", *(clause for clause, _ in filters)]), [value for _, value in filters]


class EpisodeIndex:
    """Thread-safe index of one run's episodes."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.path = run, run.path / TRAJECTORIES
        self._position, self._num_rows, self._lock = FilePosition(), 0, threading.Lock()
        # With an empty name SQLite uses a temporary database, which it moves to disk when it grows large.
        self._db = sqlite3.connect("", check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        columns = ", ".join(f'"{name}"' for name in (*EPISODE_COLUMNS[1:], "start", "length", "failed"))
        self._db.execute(f"CREATE TABLE episodes (number INTEGER PRIMARY KEY, {columns})")
        self._db.execute("CREATE INDEX by_step ON episodes (step, task)")

    def get_page(self, query: Query, read_all: bool = False) -> EpisodePage:
        """Return a page of matching episodes. A request reads a limited number of bytes unless `read_all` is set."""
        with self._lock:
            bytes_read, chunk = self._index_new_lines()
            while read_all and chunk.has_more:
                more_bytes, chunk = self._index_new_lines()
                bytes_read += more_bytes
            condition, parameters = query.make_condition()
            sql = f"SELECT count(*) FROM episodes WHERE {condition}"
            num_matched = self._db.execute(sql, parameters).fetchone()[0] if parameters else self._num_rows
            sort_key, direction = SORT_KEYS[query.sort], "DESC" if query.down else "ASC"
            max_rows = max(1, min(query.limit, MAX_ROWS))
            if query.after is not None:
                last_key, _, last_number = query.after.rpartition(":")
                condition += f" AND ({sort_key}, number) {'<' if query.down else '>'} (?, ?)"
                parameters += [float(last_key), int(last_number)]
            limit_clause = "" if query.text else f" LIMIT {max_rows + 1}"
            sql = f"SELECT *, {sort_key} AS at FROM episodes WHERE {condition} "
            sql += f"ORDER BY at {direction}, number {direction}{limit_clause}"
            rows, cursor, searched_bytes, is_cut = list[EpisodeRow](), None, 0, False
            for row in self._db.execute(sql, parameters):
                if is_cut := len(rows) == max_rows or searched_bytes > MAX_SEARCHED_BYTES:
                    break
                cursor = f"{row['at']!r}:{row['number']}"
                if query.text:
                    line = self._read_line(row)
                    searched_bytes += len(line)
                    if not contains_text(line, query.text):
                        continue
                rows.append(EpisodeRow(**{name: row[name] for name in EPISODE_COLUMNS}))
        if query.text:
            num_matched = None if is_cut or chunk.has_more or query.after is not None else len(rows)
        return EpisodePage(
            total=self._num_rows, matched=num_matched, rows=rows, bytes_read=bytes_read + searched_bytes,
            next=(cursor or query.after) if is_cut or chunk.has_more else None,
            partial=chunk.has_more or (is_cut and len(rows) < max_rows), indexed=chunk.position.offset, size=chunk.size
        )  # fmt: skip

    def get_episode(self, line_number: int) -> EpisodeView:
        """Return one episode by its line number; raise ValueError if there is none."""
        if not (lines := self.get_lines("number = ?", line_number)):
            raise ValueError(f"run {self.run.name} has no episode {line_number}")
        view = make_episode_view(*lines[0], self.run.name)
        view.tree = self._load_tree(view.row)
        return view

    def _load_tree(self, row: EpisodeRow) -> list[EpisodeRow]:
        """Return the rows of an episode's group if any of them was forked, else an empty list."""
        if row.step is None:
            return []
        sql = 'SELECT * FROM episodes WHERE step = ? AND task = ? AND "group" = ? ORDER BY member'
        with self._lock:
            records = self._db.execute(sql, (row.step, row.task, row.group)).fetchall()
        rows = [EpisodeRow(**{name: record[name] for name in EPISODE_COLUMNS}) for record in records]
        return rows if any(record.parent is not None for record in rows) else []

    def get_group(self, step: int, task: str, group: str | None = None) -> GroupView:
        """Return a task's episodes in a step, of `group` or (None) all groups; raise ValueError if there are none."""
        condition = 'step = ? AND task = ? AND "group" = coalesce(?, "group")'
        if not (lines := self.get_lines(condition, step, task, group)):
            raise ValueError(f"run {self.run.name} has no episodes of task {task!r} in step {step}")
        members = [make_episode_view(*line, self.run.name) for line in lines]
        return GroupView(step=step, task=task, members=members)

    def get_lines(self, condition: str, *parameters: Any) -> list[tuple[bytes, int]]:
        """Return (line, number) of the matching episodes, which must be consecutive, such as those of a step."""
        with self._lock:
            while True:
                has_more = self._index_new_lines()[1].has_more
                sql = f"SELECT * FROM episodes WHERE {condition} ORDER BY number"
                rows = self._db.execute(sql, parameters).fetchall()
                # a later line is indexed already, so all matching lines are known
                if not has_more or (rows and rows[-1]["number"] < self._num_rows):
                    return [(self._read_line(row), row["number"]) for row in rows]

    def _read_line(self, row: sqlite3.Row) -> bytes:
        with open_regular_file(self.path) as file:
            file.seek(row["start"])
            return file.read(row["length"])

    def _index_new_lines(self) -> tuple[int, FileChunk]:
        """Index new lines, up to `MAX_INDEXED_BYTES`; return the bytes read and the last chunk."""
        bytes_read = 0
        while True:
            chunk = read_new_lines(self.path, self._position, BLOCK_BYTES)
            num_lines = 0 if chunk.was_truncated else self._num_rows
            start, rows = chunk.start, list[tuple[Any, ...]]()
            for num_lines, line in enumerate(chunk.lines, num_lines + 1):  # noqa: B020
                row, failed_tools = read_row(line, num_lines)
                tool_names = "".join(f"\n{name}\n" for name in failed_tools)
                rows.append((*row.model_dump().values(), start, len(line), tool_names))
                start += len(line) + 1
            with self._db:  # a transaction
                if chunk.was_truncated:
                    self._db.execute("DELETE FROM episodes")
                self._db.executemany(INSERT_EPISODE, rows)
            self._position, self._num_rows = chunk.position, num_lines
            bytes_read += start - chunk.start
            if not chunk.has_more or bytes_read >= MAX_INDEXED_BYTES:
                return bytes_read, chunk
