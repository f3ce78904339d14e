"""The model registry: versions, aliases, evaluations and promotion decisions in a SQLite file, with the model files in
a folder beside it. The terms are those of MLflow."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.registry.database import RegistryDatabase
from TrainingFactory.registry.lineage import LineageNode
from TrainingFactory.registry.rows import (
    VERSION_NAME,
    Version,
    check_name,
    find_version,
    get_alias_number,
    get_user,
    get_version,
    read_versions,
    utc_now,
    write_decision,
    write_evaluations,
)
from TrainingFactory.registry.store import ModelStore, combine_digests, read_model_checksums

REGISTRY_FILE = "registry.sqlite"
ALIAS_MOVES = ("alias", "promote", "rollback")  # kinds of decisions that point an alias to a version


def get_registry_path(runs: str | Path = "runs", path: str | Path | None = None) -> Path:
    """Return the registry's file: `path`, or by default registry.sqlite in the folder of runs."""
    return Path(path).expanduser() if path is not None else Path(runs).expanduser() / REGISTRY_FILE


class Catalogue:
    """Registry in one SQLite file. Each method is one transaction; reading never creates the file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._database = RegistryDatabase(self.path)
        self.store = ModelStore(self.path.with_suffix(".files"))

    # reading

    def names(self) -> list[str]:
        """Return the names of models and aliases, such as agent and agent@champion."""
        if not self.path.is_file():
            return []
        with self._database.open_read_transaction() as db:
            aliases = [f"{row['model']}@{row['alias']}" for row in db.execute("SELECT * FROM aliases")]
            return sorted([*aliases, *(row["name"] for row in db.execute("SELECT name FROM models"))])

    def find(self, version_name: str) -> Version | None:
        """Return the version named `agent` (the newest), `agent:3` or `agent@champion`; None if there is no such model.
        Raise ValueError if the model has no such version or alias."""
        if (name_match := VERSION_NAME.fullmatch(version_name)) is None or not self.path.is_file():
            return None
        with self._database.open_read_transaction() as db:
            return find_version(db, name_match)

    def get(self, version_name: str) -> Version:
        """Return the version with this name; raise ValueError if there is none."""
        if (version := self.find(version_name)) is None:
            hint = did_you_mean(nearest(version_name, self.names(), 0.5))
            raise ValueError(f"there is no registered model {version_name!r} in {self.path}{hint}")
        return version

    def alias(self, model: str, alias: str) -> int | None:
        """Return the version number of an alias, or None if there is no such alias. Reads a single row."""
        if not self.path.is_file():
            return None
        with self._database.open_read_transaction() as db:
            return get_alias_number(db, model, alias)

    def versions(self, model: str | None = None) -> list[Version]:
        """Return the versions of one model, or of all models, oldest first."""
        if not self.path.is_file():
            return []
        with self._database.open_read_transaction() as db:
            return read_versions(db, model)

    def evaluations(self, version_name: str) -> list[dict[str, Any]]:
        """Return the evaluation records of a version, oldest first."""
        version = self.get(version_name)
        with self._database.open_read_transaction() as db:
            rows = db.execute(
                "SELECT record FROM evaluations WHERE model = ? AND number = ? ORDER BY id",
                (version.model, version.number),
            )
            return [json.loads(row["record"]) for row in rows]

    def decisions(self, model: str) -> list[dict[str, Any]]:
        """Return the history of a model's versions and aliases, oldest first."""
        if not self.path.is_file():
            return []
        with self._database.open_read_transaction() as db:
            rows = db.execute("SELECT * FROM decisions WHERE model = ? ORDER BY id", (model,))
            return [dict(row) | {"evidence": json.loads(row["evidence"])} for row in rows]

    def get_model_folder(self, version: Version) -> Path:
        """Return the folder with a version's files: a whole model or an adapter."""
        return self.store.get_model_folder(version.digest)

    def get_base_name(self, version: Version) -> str:
        """Return the base model of a version that is an adapter, as an argument for `load_model`."""
        base = version.base
        assert base is not None
        return str(self.store.get_model_folder(base["digest"])) if base["digest"] else base["name"]

    # writing

    def add(
        self,
        model: str,
        folder: Path,
        lineage: LineageNode,
        base: dict[str, Any] | None = None,
        base_folder: Path | None = None,
        description: str = "",
        tags: Mapping[str, str] | None = None,
        evaluations: Sequence[Mapping[str, Any]] = (),
    ) -> Version:
        """Register the model in a folder as the next version, with its evaluation records. For an adapter, `base`
        describes the base model; the files in `base_folder`, if any, are stored too."""
        check_name(model)
        folders = [(path, read_model_checksums(path)) for path in (folder, base_folder) if path is not None]
        digest, *base_digests = [combine_digests(checksums) for _, checksums in folders]
        if base is not None:
            base = base | {"digest": base_digests[0] if base_digests else None}
        version = None
        while version is None:  # another process may delete a stored model before this version refers to it
            with ExitStack() as stack:
                copies = []
                for path, checksums in folders:
                    if self.store.find_damage(combine_digests(checksums)):
                        with self._database.open_write_transaction() as db:
                            self._remove_unused(db)  # free the disk space of files that killed processes left
                            temp_folder = stack.enter_context(self.store.open_temporary_folder())
                        self.store.copy(path, temp_folder, checksums)
                        copies.append((temp_folder, combine_digests(checksums)))
                row = (base and json.dumps(base), json.dumps(lineage), description, get_user(), utc_now())
                version = self._insert(model, copies, [digest, *base_digests], row, tags or {}, evaluations)
        return version

    def _insert(
        self, model: str, copies: list[tuple[Path, str]], digests: list[str], fields: tuple[Any, ...],
        tags: Mapping[str, str], evaluations: Sequence[Mapping[str, Any]],
    ) -> Version | None:  # fmt: skip
        """Rename the copied files to their digests and insert the next version in one transaction. Return None if a
        model in `digests` is no longer stored."""
        with self._database.open_write_transaction() as db:
            for temp_folder, digest in copies:
                self.store.publish(temp_folder, digest)
            if not all(self.store.get_model_folder(digest).is_dir() for digest in digests):
                return None
            db.execute("INSERT OR IGNORE INTO models VALUES (?, '', 0, ?)", (model, utc_now()))
            db.execute("UPDATE models SET newest = newest + 1 WHERE name = ?", (model,))
            [number] = db.execute("SELECT newest FROM models WHERE name = ?", (model,)).fetchone()
            db.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (model, number, digests[0], *fields)
            )
            db.executemany(
                "INSERT INTO tags VALUES (?, ?, ?, ?)", [(model, number, *tag) for tag in tags.items()]
            )
            write_evaluations(db, model, number, evaluations)
            return get_version(db, f"{model}:{number}", self.path)

    def set_alias(
        self, name: str, alias: str, kind: str = "alias", evidence: Any = None, expected: int | None = -1
    ) -> tuple[Version, int | None]:
        """Point an alias to a version; return the version and the previous number of the alias. Raise ValueError if the
        previous number is not `expected` (None: the alias must be new; -1: any)."""
        check_name(alias, "alias")
        with self._database.open_write_transaction() as db:
            version = get_version(db, name, self.path)
            old_number = get_alias_number(db, version.model, alias)
            if expected != -1 and old_number != expected:
                raise ValueError(
                    f"{version.model}@{alias} was moved from version {expected or 'none'} to {old_number or 'none'} by "
                    "another process in the meantime. Check the registry, then try again"
                )
            return self._move_alias(db, version, alias, old_number, kind, evidence), old_number

    def rollback(self, model: str, alias: str) -> tuple[Version, int | None]:
        """Roll an alias back to its previous version; return that version and the number that it replaces."""
        with self._database.open_write_transaction() as db:
            old_number = get_alias_number(db, model, alias)
            alias_history: list[int] = []
            placeholders = ", ".join("?" * len(ALIAS_MOVES))
            alias_moves = db.execute(
                "SELECT kind, number FROM decisions WHERE model = ? AND alias = ? "
                f"AND kind IN ({placeholders}) ORDER BY id",
                (model, alias, *ALIAS_MOVES),
            )
            for kind, number in alias_moves:
                if kind == "rollback":  # forget the later versions that it rolled back
                    while alias_history and alias_history[-1] != number:
                        alias_history.pop()
                else:
                    alias_history.append(number)
            versions = {version.number: version for version in read_versions(db, model)}
            candidates = [number for number in alias_history if number != old_number and number in versions]
            if not candidates:
                raise ValueError(f"cannot roll back {model}@{alias}: no earlier version of it exists")
            version = versions[candidates[-1]]
            return self._move_alias(db, version, alias, old_number, "rollback", None), old_number

    def _move_alias(
        self, db: sqlite3.Connection, version: Version, alias: str, old_number: int | None, kind: str,
        evidence: Any,
    ) -> Version:  # fmt: skip
        db.execute("INSERT OR REPLACE INTO aliases VALUES (?, ?, ?)", (version.model, alias, version.number))
        write_decision(db, version.model, alias, version.number, old_number, kind, evidence)
        return get_version(db, str(version), self.path)

    def remove_alias(self, model: str, alias: str) -> int:
        """Remove an alias; return the number of its version."""
        with self._database.open_write_transaction() as db:
            if (version_number := get_alias_number(db, model, alias)) is None:
                raise ValueError(f"there is no {model}@{alias} in {self.path}")
            db.execute("DELETE FROM aliases WHERE model = ? AND alias = ?", (model, alias))
            write_decision(db, model, alias, None, version_number, "unalias", None)
            return version_number

    def record_decision(self, name: str, alias: str, decision_kind: str, evidence: Any) -> None:
        """Record a decision that changes no alias, such as a refused promotion."""
        with self._database.open_write_transaction() as db:
            version = get_version(db, name, self.path)
            previous_number = get_alias_number(db, version.model, alias)
            write_decision(db, version.model, alias, version.number, previous_number, decision_kind, evidence)

    def add_evaluation(self, version_name: str, record: Mapping[str, Any]) -> None:
        """Add an evaluation record to a version."""
        with self._database.open_write_transaction() as db:
            version = get_version(db, version_name, self.path)
            write_evaluations(db, version.model, version.number, [record])

    def delete(self, version_name: str) -> tuple[Version, int]:
        """Delete a version without aliases, and the files that no other version uses; return the version and the
        number of bytes freed."""
        with self._database.open_write_transaction() as db:
            version = get_version(db, version_name, self.path)
            if version.aliases:
                aliases = " and ".join(f"{version.model}@{alias}" for alias in version.aliases)
                raise ValueError(f"cannot delete {version}: it is {aliases}. Move or remove the alias first")
            db.execute("DELETE FROM versions WHERE model = ? AND number = ?", (version.model, version.number))
            write_decision(
                db, version.model, None, version.number, None, "delete", {"digest": version.digest}
            )
        # Sweep after the commit: a process killed in between leaves unused files, never a version without files.
        return version, self.remove_unused_files()

    def remove_unused_files(self) -> int:
        """Remove files that no version uses; return the number of bytes freed."""
        with self._database.open_write_transaction() as db:
            return self._remove_unused(db)

    def _remove_unused(self, db: sqlite3.Connection) -> int:
        used_digests = set().union(*(version.digests for version in read_versions(db, None)))
        return self.store.remove_unused_models(used_digests)

    def verify(self, version_name: str | None = None) -> dict[str, list[str]]:
        """Check every byte of the stored files of one version, or of all; return the problems by version."""
        versions = self.versions() if version_name is None else [self.get(version_name)]
        digests = set().union(*(version.digests for version in versions))
        damages = {digest: self.store.find_damage(digest) for digest in digests}
        problems_by_version = {
            str(version): [problem for digest in sorted(version.digests) for problem in damages[digest]]
            for version in versions
        }
        return {version: messages for version, messages in problems_by_version.items() if messages}
