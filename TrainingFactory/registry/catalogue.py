"""Registered models: versions of them, the aliases that name versions, and what was decided about them. In MLflow's
words, in a SQLite file beside the runs, with the models themselves in a folder beside it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.registry.database import Database
from TrainingFactory.registry.lineage import Node
from TrainingFactory.registry.rows import (
    WRITTEN,
    Version,
    alias_of,
    all_versions,
    check_name,
    find_version,
    found_version,
    now,
    who,
    write_decision,
    write_evaluations,
)
from TrainingFactory.registry.store import Store, digest_of, sums_of

FILE = "registry.sqlite"
MOVES = ("alias", "promote", "rollback")  # decisions that give an alias a version


def registry_path(runs: str | Path = "runs", path: str | Path | None = None) -> Path:
    """Return the registry's file: the one that is named, or the one beside the runs."""
    return Path(path).expanduser() if path is not None else Path(runs).expanduser() / FILE


class Catalogue:
    """The registry in a file. Each method is one transaction, in one process or many; nothing is made by looking."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._database = Database(self.path)
        self.store = Store(self.path.with_suffix(".files"))

    # looking

    def names(self) -> list[str]:
        """Return the models, with their aliases: agent, agent@champion."""
        if not self.path.is_file():
            return []
        with self._database.reading() as db:
            aliases = [f"{row['model']}@{row['alias']}" for row in db.execute("SELECT * FROM aliases")]
            return sorted([*aliases, *(row["name"] for row in db.execute("SELECT name FROM models"))])

    def find(self, name: str) -> Version | None:
        """Return the version that `agent` (the newest), `agent:3` or `agent@champion` names; None where there is no
        such model, ValueError where the model has no such version or alias."""
        if (written := WRITTEN.fullmatch(name)) is None or not self.path.is_file():
            return None
        with self._database.reading() as db:
            return find_version(db, written)

    def get(self, name: str) -> Version:
        """Return the version of that name; raise ValueError where there is none."""
        if (found := self.find(name)) is None:
            near = nearest(name, self.names(), 0.5)
            raise ValueError(f"there is no registered model {name!r} in {self.path}{did_you_mean(near)}")
        return found

    def alias(self, model: str, alias: str) -> int | None:
        """Return the number of the version that an alias names, by one row; None where there is no such alias."""
        if not self.path.is_file():
            return None
        with self._database.reading() as db:
            return alias_of(db, model, alias)

    def versions(self, model: str | None = None) -> list[Version]:
        """Return all versions, of one model or of all, the oldest first."""
        if not self.path.is_file():
            return []
        with self._database.reading() as db:
            return all_versions(db, model)

    def evaluations(self, name: str) -> list[dict[str, Any]]:
        """Return what was measured of a version, the oldest first."""
        version = self.get(name)
        with self._database.reading() as db:
            found = db.execute(
                "SELECT record FROM evaluations WHERE model = ? AND number = ? ORDER BY id",
                (version.model, version.number),
            )
            return [json.loads(row["record"]) for row in found]

    def decisions(self, model: str) -> list[dict[str, Any]]:
        """Return what was decided about a model's versions and aliases, the oldest first."""
        if not self.path.is_file():
            return []
        with self._database.reading() as db:
            found = db.execute("SELECT * FROM decisions WHERE model = ? ORDER BY id", (model,))
            return [dict(row) | {"evidence": json.loads(row["evidence"])} for row in found]

    def folder(self, version: Version) -> Path:
        """Return the folder with a version's files: a model, or an adapter."""
        return self.store.folder(version.digest)

    def base_name(self, version: Version) -> str:
        """Return the model under a version's adapter, as `load_model` takes it."""
        base = version.base
        assert base is not None
        return str(self.store.folder(base["digest"])) if base["digest"] else base["name"]

    # changing

    def add(
        self,
        model: str,
        folder: Path,
        lineage: Node,
        base: dict[str, Any] | None = None,
        base_folder: Path | None = None,
        description: str = "",
        tags: Mapping[str, str] | None = None,
        evaluations: Sequence[Mapping[str, Any]] = (),
    ) -> Version:
        """Register the model in a folder as the next version, with what was measured of it. Where it is an adapter,
        `base` names the model under it, which is stored as well where it is in `base_folder`."""
        check_name(model)
        needed = [(place, sums_of(place)) for place in (folder, base_folder) if place is not None]
        digest, *under = [digest_of(sums) for _, sums in needed]
        if base is not None:
            base = base | {"digest": under[0] if under else None}
        version = None
        while version is None:  # what is stored already may be deleted before this version needs it
            with ExitStack() as held:
                parts = []
                for place, sums in needed:
                    if self.store.damage(digest_of(sums)):
                        with self._database.writing() as db:
                            self._sweep(db)  # what killed processes left may be the room that is missing
                            part = held.enter_context(self.store.part())
                        self.store.copy(place, part, sums)
                        parts.append((part, digest_of(sums)))
                row = (base and json.dumps(base), json.dumps(lineage), description, who(), now())
                version = self._name(model, parts, [digest, *under], row, tags or {}, evaluations)
        return version

    def _name(
        self, model: str, parts: list[tuple[Path, str]], digests: list[str], row: tuple[Any, ...],
        tags: Mapping[str, str], evaluations: Sequence[Mapping[str, Any]],
    ) -> Version | None:  # fmt: skip
        """Give the files their names and the model its next version, together; None where stored files are gone."""
        with self._database.writing() as db:
            for part, digest in parts:
                self.store.name(part, digest)
            if not all(self.store.folder(digest).is_dir() for digest in digests):
                return None
            db.execute("INSERT OR IGNORE INTO models VALUES (?, '', 0, ?)", (model, now()))
            db.execute("UPDATE models SET newest = newest + 1 WHERE name = ?", (model,))
            [number] = db.execute("SELECT newest FROM models WHERE name = ?", (model,)).fetchone()
            db.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (model, number, digests[0], *row)
            )
            db.executemany(
                "INSERT INTO tags VALUES (?, ?, ?, ?)", [(model, number, *each) for each in tags.items()]
            )
            write_evaluations(db, model, number, evaluations)
            return found_version(db, f"{model}:{number}", self.path)

    def set_alias(
        self, name: str, alias: str, kind: str = "alias", evidence: Any = None, expected: int | None = -1
    ) -> tuple[Version, int | None]:
        """Let an alias name a version; return that version and the number that the alias had. `expected` is what it
        must have had (None: nothing), where that matters."""
        check_name(alias, "alias")
        with self._database.writing() as db:
            version = found_version(db, name, self.path)
            was = alias_of(db, version.model, alias)
            if expected != -1 and was != expected:
                raise ValueError(
                    f"{version.model}@{alias} is version {was or 'none'} by now, and was {expected or 'none'} when "
                    "this began; look again"
                )
            return self._move(db, version, alias, was, kind, evidence), was

    def rollback(self, model: str, alias: str) -> tuple[Version, int | None]:
        """Give an alias the version back that it had before; return that version and the number it has now lost."""
        with self._database.writing() as db:
            was = alias_of(db, model, alias)
            history: list[int] = []
            marks = ", ".join("?" * len(MOVES))
            found = db.execute(
                f"SELECT kind, number FROM decisions WHERE model = ? AND alias = ? AND kind IN ({marks}) ORDER BY id",
                (model, alias, *MOVES),
            )
            for kind, number in found:
                if kind == "rollback":  # what stood above it has been taken back
                    while history and history[-1] != number:
                        history.pop()
                else:
                    history.append(number)
            there = {version.number: version for version in all_versions(db, model)}
            before = next((number for number in reversed(history) if number != was and number in there), None)
            if before is None:
                raise ValueError(f"{model}@{alias} has named no other version that is still there")
            return self._move(db, there[before], alias, was, "rollback", None), was

    def _move(
        self, db: sqlite3.Connection, version: Version, alias: str, was: int | None, kind: str, evidence: Any
    ) -> Version:
        db.execute("INSERT OR REPLACE INTO aliases VALUES (?, ?, ?)", (version.model, alias, version.number))
        write_decision(db, version.model, alias, version.number, was, kind, evidence)
        return found_version(db, str(version), self.path)

    def remove_alias(self, model: str, alias: str) -> int:
        """Take an alias away; return the version that it named."""
        with self._database.writing() as db:
            if (was := alias_of(db, model, alias)) is None:
                raise ValueError(f"there is no {model}@{alias} in {self.path}")
            db.execute("DELETE FROM aliases WHERE model = ? AND alias = ?", (model, alias))
            write_decision(db, model, alias, None, was, "unalias", None)
            return was

    def decide(self, name: str, alias: str, kind: str, evidence: Any) -> None:
        """Write down a decision that changes nothing, such as a promotion that was refused."""
        with self._database.writing() as db:
            version = found_version(db, name, self.path)
            was = alias_of(db, version.model, alias)
            write_decision(db, version.model, alias, version.number, was, kind, evidence)

    def add_evaluation(self, name: str, record: Mapping[str, Any]) -> None:
        """Write down what was measured of a version."""
        with self._database.writing() as db:
            version = found_version(db, name, self.path)
            write_evaluations(db, version.model, version.number, [record])

    def delete(self, name: str) -> tuple[Version, int]:
        """Delete a version that no alias names, and the files that no other version needs; return it and the bytes
        that are free again."""
        with self._database.writing() as db:
            version = found_version(db, name, self.path)
            if version.aliases:
                named = " and ".join(f"{version.model}@{alias}" for alias in version.aliases)
                raise ValueError(
                    f"{version} is {named}: let that name another version first, or take it away"
                )
            db.execute("DELETE FROM versions WHERE model = ? AND number = ?", (version.model, version.number))
            write_decision(
                db, version.model, None, version.number, None, "delete", {"digest": version.digest}
            )
        # Only what is committed can be cleared away: whoever is killed here leaves files too many, never too few.
        return version, self.sweep()

    def sweep(self) -> int:
        """Remove files that no version needs; return the bytes that are free again."""
        with self._database.writing() as db:
            return self._sweep(db)

    def _sweep(self, db: sqlite3.Connection) -> int:
        return self.store.sweep(set().union(*(version.digests for version in all_versions(db, None))))

    def verify(self, name: str | None = None) -> dict[str, list[str]]:
        """Read every byte of the stored models, of one version or of all; return what is wrong, by version."""
        versions = self.versions() if name is None else [self.get(name)]
        wrong = {
            digest: self.store.damage(digest) for digest in set().union(*(each.digests for each in versions))
        }
        found = {
            str(each): [text for digest in sorted(each.digests) for text in wrong[digest]]
            for each in versions
        }
        return {version: texts for version, texts in found.items() if texts}
