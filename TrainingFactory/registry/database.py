"""The registry's SQLite file: its tables, and transactions that many processes may make at the same time. What a
process had not committed when it was killed never was."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCHEMA = 1
OURS = 0x54466163  # marks the file as ours: "TFac"
WAIT = 60.0  # seconds for others that write
TABLES = """
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


class Database:
    """One file; every operation opens it, makes one transaction and closes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that sees one state of the registry; it must exist."""
        with self._open() as connection:
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that alone may write; all is kept at the end, or nothing where something is raised."""
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
        """Open the file, with tables; raise ValueError for one that is not ours or of a newer version."""
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            self._prepare(connection)
            yield connection
        except sqlite3.OperationalError as error:
            raise OSError(f"the registry {self.path} cannot be read or written: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} is no registry, or it is damaged: {error}") from error
        finally:
            if connection is not None:
                connection.close()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        found = _pragma(connection, "user_version")
        if found == SCHEMA and _pragma(connection, "application_id") == OURS:
            return
        if found > SCHEMA:
            raise ValueError(
                f"the registry {self.path} is of schema {found}, and this version of TrainingFactory knows {SCHEMA}: "
                "nothing was changed; use the version that wrote it, or a newer one"
            )
        if found or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            if _pragma(connection, "application_id") == OURS:
                return  # made by another process between two of these lines
            raise ValueError(f"{self.path} is a database of another program, no registry; name another file")
        _to_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        if _pragma(connection, "user_version") == 0:
            for statement in TABLES.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {OURS}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _to_wal(connection: sqlite3.Connection) -> None:
    """Let readers and a writer go on beside each other. SQLite does not wait for others here, so we do."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01 + os.getpid() % 7 / 1000)
