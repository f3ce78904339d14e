"""The registry's SQLite file: its schema, and transactions that are safe across processes. SQLite rolls back the
transaction of a killed process."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCHEMA_VERSION = 1
APPLICATION_ID = 0x54466163  # SQLite application_id of a registry: "TFac"
LOCK_TIMEOUT = 60.0  # seconds to wait for a lock
TABLE_STATEMENTS = """
CREATE TABLE models (name TEXT PRIMARY KEY, description TEXT NOT NULL, newest INTEGER NOT NULL, created TEXT NOT NULL);
CREATE TABLE versions (
    model TEXT NOT NULL REFERENCES models(name), number INTEGER NOT NULL, digest TEXT NOT NULL, base TEXT,
    lineage TEXT NOT NULL, description TEXT NOT NULL, who TEXT NOT NULL, created TEXT NOT NULL,
    PRIMARY KEY (model, number));
CREATE TABLE aliases (
    model TEXT NOT NULL, alias TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (model, alias),
    FOREIGN KEY (model, number) REFERENCES versions(model, number));
CREATE TABLE tags (
    model TEXT NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL,
    PRIMARY KEY (model, number, key),
    FOREIGN KEY (model, number) REFERENCES versions(model, number) ON DELETE CASCADE);
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, number INTEGER NOT NULL, record TEXT NOT NULL, who TEXT NOT NULL,
    created TEXT NOT NULL,
    FOREIGN KEY (model, number) REFERENCES versions(model, number) ON DELETE CASCADE);
CREATE TABLE decisions (
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, alias TEXT, number INTEGER, was INTEGER, kind TEXT NOT NULL,
    evidence TEXT NOT NULL, who TEXT NOT NULL, created TEXT NOT NULL);
"""


class RegistryDatabase:
    """SQLite file of a registry; every operation opens it, runs one transaction and closes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def open_read_transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection with a consistent snapshot of the registry; the file must exist."""
        with self._open() as connection:
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def open_write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for writing, while no other connection can write. Commit at the end, or roll back if an
        exception is raised."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file and create missing tables; raise ValueError for another program's file or a newer schema."""
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            self._create_schema(connection)
            yield connection
        except sqlite3.OperationalError as error:
            raise OSError(f"cannot read or write the registry {self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} is not a registry, or is damaged: {error}") from error
        finally:
            if connection is not None:
                connection.close()

    def _create_schema(self, connection: sqlite3.Connection) -> None:
        version = _read_pragma(connection, "user_version")
        if version == SCHEMA_VERSION and _read_pragma(connection, "application_id") == APPLICATION_ID:
            return
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"the registry {self.path} has schema {version}, but this version of TrainingFactory supports only "
                f"{SCHEMA_VERSION}. Nothing was changed. Update TrainingFactory"
            )
        if version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            if _read_pragma(connection, "application_id") == APPLICATION_ID:
                return  # another process has just created it
            raise ValueError(f"{self.path} is the database of another program. Choose another file")
        _enable_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        if _read_pragma(connection, "user_version") == 0:
            for statement in TABLE_STATEMENTS.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")


def _read_pragma(connection: sqlite3.Connection, pragma_name: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma_name}").fetchone()[0])


def _enable_wal(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging, so that readers do not block the writer. Retry while the file is locked, because
    SQLite's own timeout does not apply to this statement."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01 + os.getpid() % 7 / 1000)
