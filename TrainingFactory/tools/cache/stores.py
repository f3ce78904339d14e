"""Stores of cached results: an SQLite file for one machine, Redis for several."""

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
APPLICATION_ID = 0x7F_70_01_C4  # in the file header; identifies our files
FORMAT_VERSION = 1
BUSY_SECONDS = 5.0  # a writer's wait for other processes; readers never wait for writers
EVICTION_TARGET = 0.9  # fraction of `max_bytes` that eviction leaves, so that not every write evicts
REDIS_URL_PATTERN = re.compile(r"rediss?://|unix://")
CACHE_SCHEMA = """
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
    """SQLite file in WAL mode: many processes read while one writes. Network drives lack the locks that it needs."""

    is_fast = True  # `get` is fast enough for the event loop

    def __init__(self, path: Path, ttl: float | None, max_bytes: int) -> None:
        self.path, self._ttl, self._max_bytes = path, ttl, max_bytes
        self._read_lock, self._write_lock = threading.Lock(), threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check_owner(path)
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # locked, full, no permission: not damaged
                    raise
                self._move_damaged_file(error)
                self._open()
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"cannot open the cache {path}: {describe(error)}; check the folder's permissions and free space, "
                "or set another path"
            ) from error

    def _open(self) -> None:
        self._writer = _open_connection(self.path)
        try:
            _create_schema(self._writer)
            self._reader = _open_connection(self.path)
            self._reader.execute("SELECT key, value, size, made, used FROM entries LIMIT 1").fetchall()
        except BaseException:
            self._writer.close()
            raise

    def _move_damaged_file(self, error: sqlite3.DatabaseError) -> None:
        backup_path = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        self.path.rename(backup_path)
        for suffix in ("-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        message = "the cache %s is damaged (%s); starting an empty one, the old file is renamed to %s"
        log.warning(message, self.path, describe(error), backup_path.name)

    def get(self, key: str) -> tuple[str, float] | None:
        """Return the value and its creation time; None if there is no entry."""
        with self._read_lock:
            query = "SELECT value, made FROM entries WHERE key = ?"
            return self._reader.execute(query, (key,)).fetchone()

    def write(
        self, entries: Sequence[tuple[str, str, float]], last_uses: Iterable[tuple[str, float]]
    ) -> None:
        """Insert entries (key, value, creation time) and update the last use of keys."""
        rows = [
            (key, value, len(key) + len(value.encode()), created_at, created_at)
            for key, value, created_at in entries
        ]
        with self._write_lock, self._writer:  # one transaction, rolled back on an error
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.executemany(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "value = excluded.value, size = excluded.size, made = excluded.made, used = excluded.used",
                rows,
            )
            use_rows = [(used_at, key, used_at) for key, used_at in last_uses]
            self._writer.executemany("UPDATE entries SET used = ? WHERE key = ? AND used < ?", use_rows)
            self._evict_entries()

    def _evict_entries(self) -> None:
        """Delete expired entries, then the least recently used ones."""
        if self._count_bytes() <= self._max_bytes:
            return
        if self._ttl is not None:
            self._writer.execute("DELETE FROM entries WHERE made < ?", (time.time() - self._ttl,))
        if self._count_bytes() > self._max_bytes * EVICTION_TARGET:
            self._writer.execute(
                "DELETE FROM entries WHERE key IN (SELECT key FROM (SELECT key, sum(size) OVER "
                "(ORDER BY used DESC, key) AS so_far FROM entries) WHERE so_far > ?)",
                (self._max_bytes * EVICTION_TARGET,),
            )

    def _count_bytes(self) -> int:
        return self._writer.execute("SELECT bytes FROM total").fetchone()[0]

    def close(self) -> None:
        with self._read_lock, self._write_lock:
            self._reader.close()
            self._writer.close()


def _open_connection(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {64 << 20}")
    return connection


def _create_schema(connection: sqlite3.Connection) -> None:
    """Create the tables and write our id to the header in one transaction, unless another process has. This transaction
    precedes WAL mode, which writes to the file, so that other processes see either an empty or a complete file."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, FORMAT_VERSION):
        raise sqlite3.DatabaseError(f"its format is {version}, not {FORMAT_VERSION}")
    if version == 0:
        header_pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT_VERSION};"
        connection.executescript(f"BEGIN IMMEDIATE; {header_pragmas} {CACHE_SCHEMA} COMMIT;")
    with contextlib.suppress(sqlite3.OperationalError):  # another process is switching to WAL
        connection.execute("PRAGMA journal_mode = WAL")


def _check_owner(path: Path) -> None:
    """Raise ValueError for a folder or another program's file, because the cache must not change it."""
    header = b""
    if path.is_file():
        with path.open("rb") as file:
            header = file.read(100)
    is_own_file = header[:16] == b"SQLite format 3\0" and header[68:72] == APPLICATION_ID.to_bytes(4, "big")
    if path.is_dir() or (header and not is_own_file):
        raise ValueError(f"the cache cannot use {path}: it is not a TrainingFactory cache; set another path")


class RedisStore:
    """A Redis server for several machines. Its own `maxmemory` and eviction policy bound its size. Blocking: an
    asynchronous client would belong to one event loop, so the cache reads on threads."""

    is_fast = False
    KEY_PREFIX = "tfactory:tool:"

    def __init__(self, url: str, ttl: float | None) -> None:
        try:
            import redis
        except ImportError as error:
            message = "a cache in Redis needs the package redis; run pip install 'training-factory[redis]'"
            raise ValueError(message) from error
        self._ttl_ms = None if ttl is None else max(1, int(ttl * 1000))
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=2.0, socket_connect_timeout=2.0, decode_responses=True
            )
            self._client.ping()
        except (ValueError, redis.RedisError, OSError) as error:
            address = re.sub(r"//[^@/]*@", "//***@", url)  # without the password
            reason = type(error).__name__
            raise ValueError(f"cannot reach Redis at {address} ({reason}); check that it runs") from error

    def get(self, key: str) -> tuple[str, float] | None:
        entry = self._client.get(self.KEY_PREFIX + key)
        if not entry:
            return None
        created_at, _, value = entry.partition(" ")
        return value, float(created_at)

    def write(
        self, entries: Sequence[tuple[str, str, float]], last_uses: Iterable[tuple[str, float]]
    ) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key, value, created_at in entries:
                pipeline.set(self.KEY_PREFIX + key, f"{created_at!r} {value}", px=self._ttl_ms)
            pipeline.execute()

    def close(self) -> None:
        self._client.close()


class NoStore:
    """Store without entries: the cache keeps the latest results in memory only."""

    is_fast = True

    def get(self, key: str) -> None:
        return None

    def write(
        self, entries: Sequence[tuple[str, str, float]], last_uses: Iterable[tuple[str, float]]
    ) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


Store = SQLiteStore | RedisStore | NoStore


def open_store(target: str | Path | None, ttl: float | None, max_bytes: int) -> Store:
    """Return the store for a file path or a Redis address; None: results stay in memory."""
    if target is None:
        return NoStore()
    is_redis = REDIS_URL_PATTERN.match(str(target))
    return RedisStore(str(target), ttl) if is_redis else SQLiteStore(Path(target), ttl, max_bytes)
