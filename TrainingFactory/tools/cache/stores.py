"""Where cached results are kept: an SQLite file for one machine, Redis for several."""

from __future__ import annotations

import contextlib
import logging
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.common.texts import describe

log = logging.getLogger(__name__)
APPLICATION_ID = 0x7F_70_01_C4  # in the header of the file: says that it is ours
FORMAT = 1
BUSY_SECONDS = 5.0  # a writer waits so long for other processes; readers never wait for writers
REST = 0.9  # eviction goes down to this part of the limit, so that it does not come at every write
IN_REDIS = re.compile(r"rediss?://|unix://")
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, value TEXT NOT NULL, size INTEGER NOT NULL, made REAL NOT NULL, used REAL NOT NULL);
CREATE INDEX IF NOT EXISTS by_use ON entries (used, size);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entries BEGIN UPDATE total SET bytes = bytes + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS gone AFTER DELETE ON entries BEGIN UPDATE total SET bytes = bytes - OLD.size; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF size ON entries BEGIN
    UPDATE total SET bytes = bytes + NEW.size - OLD.size; END;
"""


class SQLiteStore:
    """A file in WAL mode: any number of processes read while one writes. Not for network drives, where SQLite's
    locks do not work."""

    quick = True  # `get` is fast enough for the event loop

    def __init__(self, path: Path, ttl: float | None, max_bytes: int) -> None:
        self.path, self._ttl, self._max_bytes = path, ttl, max_bytes
        self._reading, self._writing = threading.Lock(), threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check_owner(path)
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # locked, no space, no rights: not damage
                    raise
                self._set_aside(error)
                self._open()
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"the cache {path} cannot be opened: {describe(error)}; check the folder and its free space, or "
                "give another path"
            ) from error

    def _open(self) -> None:
        self._writer = _connect(self.path)
        try:
            _set_up(self._writer)
            self._reader = _connect(self.path)
            self._reader.execute("SELECT key, value, size, made, used FROM entries LIMIT 1").fetchall()
        except BaseException:
            self._writer.close()
            raise

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        kept = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        self.path.rename(kept)
        for suffix in ("-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        log.warning("the cache %s was damaged: %s; it is kept as %s", self.path, describe(error), kept.name)

    def get(self, key: str) -> tuple[str, float] | None:
        """Return the value and the time at which it was made."""
        with self._reading:
            query = "SELECT value, made FROM entries WHERE key = ?"
            return self._reader.execute(query, (key,)).fetchone()

    def write(self, entries: Sequence[tuple[str, str, float]], used: Iterable[tuple[str, float]]) -> None:
        """Add (key, value, time) and note when keys were last used."""
        rows = [(key, value, len(key) + len(value.encode()), made, made) for key, value, made in entries]
        with self._writing, self._writer:  # one transaction, undone where anything fails
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.executemany(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "value = excluded.value, size = excluded.size, made = excluded.made, used = excluded.used",
                rows,
            )
            changes = [(when, key, when) for key, when in used]
            self._writer.executemany("UPDATE entries SET used = ? WHERE key = ? AND used < ?", changes)
            self._evict()

    def _evict(self) -> None:
        """Delete what is too old, then the least recently used."""
        if self._size() <= self._max_bytes:
            return
        if self._ttl is not None:
            self._writer.execute("DELETE FROM entries WHERE made < ?", (time.time() - self._ttl,))
        if self._size() > self._max_bytes * REST:
            self._writer.execute(
                "DELETE FROM entries WHERE key IN (SELECT key FROM (SELECT key, sum(size) OVER "
                "(ORDER BY used DESC, key) AS so_far FROM entries) WHERE so_far > ?)",
                (self._max_bytes * REST,),
            )

    def _size(self) -> int:
        return self._writer.execute("SELECT bytes FROM total").fetchone()[0]

    def close(self) -> None:
        with self._reading, self._writing:
            self._reader.close()
            self._writer.close()


def _connect(path: Path) -> sqlite3.Connection:
    made = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    made.execute("PRAGMA synchronous = NORMAL")
    made.execute(f"PRAGMA journal_size_limit = {64 << 20}")
    return made


def _set_up(database: sqlite3.Connection) -> None:
    """Make the tables, unless another process has, in one transaction with what says that the file is ours and before
    WAL mode, which writes to the file: who looks meanwhile finds it empty, or whole."""
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, FORMAT):
        raise sqlite3.DatabaseError(f"its format is {version}, not {FORMAT}")
    if version == 0:
        ours = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
        database.executescript(f"BEGIN IMMEDIATE; {ours} {SCHEMA} COMMIT;")
    with contextlib.suppress(sqlite3.OperationalError):  # another process is at it; the next one switches
        database.execute("PRAGMA journal_mode = WAL")


def _check_owner(path: Path) -> None:
    """Refuse a file of somebody else's: it is neither changed nor moved."""
    header = b""
    if path.is_file():
        with path.open("rb") as file:
            header = file.read(100)
    ours = header[:16] == b"SQLite format 3\0" and header[68:72] == APPLICATION_ID.to_bytes(4, "big")
    if path.is_dir() or (header and not ours):
        raise ValueError(f"the cache cannot use {path}: it is no file of ours; give another path")


class RedisStore:
    """One Redis for several machines. How much it holds is bounded by its own `maxmemory` and eviction policy.
    Calls go through threads, because an asynchronous client belongs to one event loop."""

    quick = False
    PREFIX = "tfactory:tool:"

    def __init__(self, url: str, ttl: float | None) -> None:
        try:
            import redis
        except ImportError as error:
            raise ValueError(
                "a cache in Redis needs the package redis: pip install 'training-factory[redis]'"
            ) from error
        self._ttl = None if ttl is None else max(1, int(ttl * 1000))
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=2.0, socket_connect_timeout=2.0, decode_responses=True
            )
            self._client.ping()
        except (ValueError, redis.RedisError, OSError) as error:
            shown = re.sub(r"//[^@/]*@", "//***@", url)  # without a password
            kind = type(error).__name__
            raise ValueError(f"the cache cannot reach Redis at {shown} ({kind}); is it running?") from error

    def get(self, key: str) -> tuple[str, float] | None:
        found = self._client.get(self.PREFIX + key)
        made, _, value = (found or "").partition(" ")
        return (value, float(made)) if found else None

    def write(self, entries: Sequence[tuple[str, str, float]], used: Iterable[tuple[str, float]]) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for key, value, made in entries:
                pipe.set(self.PREFIX + key, f"{made!r} {value}", px=self._ttl)
            pipe.execute()

    def close(self) -> None:
        self._client.close()


class NoStore:
    """Keeps nothing beyond the process, whose latest results the cache holds in memory anyway."""

    quick = True

    def get(self, key: str) -> None:
        return None

    def write(self, entries: Sequence[tuple[str, str, float]], used: Iterable[tuple[str, float]]) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""


Store = SQLiteStore | RedisStore | NoStore


def store_at(target: str | Path | None, ttl: float | None, max_bytes: int) -> Store:
    """Return the store for a file or an address; None stands for none."""
    if target is None:
        return NoStore()
    redis = IN_REDIS.match(str(target))
    return RedisStore(str(target), ttl) if redis else SQLiteStore(Path(target), ttl, max_bytes)
