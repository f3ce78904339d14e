"""Registered models: versions of them, the aliases that name versions, and what was decided about them. In MLflow's
words, in a SQLite file beside the runs, with the models themselves in a folder beside it."""

from __future__ import annotations

import getpass
import json
import re
import socket
import sqlite3
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from TrainingFactory.models.names import SUPPORTED_MODELS
from TrainingFactory.options import did_you_mean, nearest
from TrainingFactory.services.registry.database import Database
from TrainingFactory.services.registry.lineage import Node
from TrainingFactory.services.registry.store import Store, digest_of, sums_of

FILE = "registry.sqlite"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
WRITTEN = re.compile(rf"(?P<model>{NAME.pattern})(:(?P<number>\d+)|@(?P<alias>{NAME.pattern}))?")
OF_RUNS = re.compile(r"step-\d+|best|last|latest|\d+")  # names of checkpoints and versions, no aliases
MOVES = ("alias", "promote", "rollback")  # decisions that give an alias a version
Row = Mapping[str, Any] | sqlite3.Row


@dataclass(slots=True, frozen=True)
class Version:
    """One version of a registered model; as text `agent:3`."""

    model: str
    number: int
    digest: str
    base: dict[str, Any] | None  # under an adapter: its name, revision, and where it is stored, its digest
    lineage: Node
    description: str
    who: str
    created: str
    aliases: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}:{self.number}"

    @property
    def digests(self) -> set[str]:
        """Return the stored models that it needs."""
        return {self.digest} | ({self.base["digest"]} if self.base and self.base["digest"] else set())


def registry_path(runs: str | Path = "runs", path: str | Path | None = None) -> Path:
    """Return the registry's file: the one that is named, or the one beside the runs."""
    return Path(path).expanduser() if path is not None else Path(runs).expanduser() / FILE


def check_name(name: str, what: str = "model") -> None:
    """Raise ValueError for what cannot name a registered model or an alias."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a{'n' * (what == 'alias')} {what}: letters, digits and . _ - only"
        )
    if what == "alias" and OF_RUNS.fullmatch(name):
        raise ValueError(f"{name!r} cannot be an alias: versions and checkpoints of runs have such names")
    if what == "model" and name.lower() in SUPPORTED_MODELS:
        raise ValueError(f"{name!r} is the short name of a model already; choose another")


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
            return _find(db, written)

    def get(self, name: str) -> Version:
        """Return the version of that name; raise ValueError where there is none."""
        if (found := self.find(name)) is None:
            near = nearest(name, self.names(), 0.5)
            raise ValueError(f"there is no registered model {name!r} in {self.path}{did_you_mean(near)}")
        return found

    def versions(self, model: str | None = None) -> list[Version]:
        """Return all versions, of one model or of all, the oldest first."""
        if not self.path.is_file():
            return []
        with self._database.reading() as db:
            return _versions(db, model)

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
    ) -> Version:
        """Register the model in a folder as the next version. Where it is an adapter, `base` names the model under it,
        which is stored as well where it is in `base_folder`."""
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
                        with self._database.writing():
                            part = held.enter_context(self.store.part())
                        self.store.copy(place, part, sums)
                        parts.append((part, digest_of(sums)))
                row = (base and json.dumps(base), json.dumps(lineage), description, _who(), _now())
                version = self._name(model, parts, [digest, *under], row, tags or {})
        return version

    def _name(
        self, model: str, parts: list[tuple[Path, str]], digests: list[str], row: tuple[Any, ...],
        tags: Mapping[str, str],
    ) -> Version | None:  # fmt: skip
        """Give the files their names and the model its next version, together; None where stored files are gone."""
        with self._database.writing() as db:
            for part, digest in parts:
                self.store.name(part, digest)
            if not all(self.store.folder(digest).is_dir() for digest in digests):
                return None
            db.execute("INSERT OR IGNORE INTO models VALUES (?, '', 0, ?)", (model, _now()))
            db.execute("UPDATE models SET newest = newest + 1 WHERE name = ?", (model,))
            [number] = db.execute("SELECT newest FROM models WHERE name = ?", (model,)).fetchone()
            db.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (model, number, digests[0], *row)
            )
            db.executemany(
                "INSERT INTO tags VALUES (?, ?, ?, ?)", [(model, number, *each) for each in tags.items()]
            )
            return _one(db, model, number)

    def set_alias(
        self, name: str, alias: str, kind: str = "alias", evidence: Any = None, expected: int | None = -1
    ) -> tuple[Version, int | None]:
        """Let an alias name a version; return that version and the number that the alias had. `expected` is what it
        must have had (None: nothing), where that matters."""
        check_name(alias, "alias")
        with self._database.writing() as db:
            version = _found(db, name, self.path)
            was = _alias(db, version.model, alias)
            if expected != -1 and was != expected:
                raise ValueError(
                    f"{version.model}@{alias} is version {was or 'none'} by now, and was {expected or 'none'} when "
                    "this began; look again"
                )
            return self._move(db, version, alias, was, kind, evidence), was

    def rollback(self, model: str, alias: str) -> tuple[Version, int | None]:
        """Give an alias the version back that it had before; return that version and the number it has now lost."""
        with self._database.writing() as db:
            was = _alias(db, model, alias)
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
            there = {version.number: version for version in _versions(db, model)}
            before = next((number for number in reversed(history) if number != was and number in there), None)
            if before is None:
                raise ValueError(f"{model}@{alias} has named no other version that is still there")
            return self._move(db, there[before], alias, was, "rollback", None), was

    def _move(
        self, db: sqlite3.Connection, version: Version, alias: str, was: int | None, kind: str, evidence: Any
    ) -> Version:
        db.execute("INSERT OR REPLACE INTO aliases VALUES (?, ?, ?)", (version.model, alias, version.number))
        _decide(db, version.model, alias, version.number, was, kind, evidence)
        return _one(db, version.model, version.number)

    def remove_alias(self, model: str, alias: str) -> int:
        """Take an alias away; return the version that it named."""
        with self._database.writing() as db:
            if (was := _alias(db, model, alias)) is None:
                raise ValueError(f"there is no {model}@{alias} in {self.path}")
            db.execute("DELETE FROM aliases WHERE model = ? AND alias = ?", (model, alias))
            _decide(db, model, alias, None, was, "unalias", None)
            return was

    def decide(self, name: str, alias: str, kind: str, evidence: Any) -> None:
        """Write down a decision that changes nothing, such as a promotion that was refused."""
        with self._database.writing() as db:
            version = _found(db, name, self.path)
            was = _alias(db, version.model, alias)
            _decide(db, version.model, alias, version.number, was, kind, evidence)

    def add_evaluation(self, name: str, record: Mapping[str, Any]) -> None:
        """Write down what was measured of a version."""
        with self._database.writing() as db:
            version = _found(db, name, self.path)
            db.execute(
                "INSERT INTO evaluations (model, number, record, who, created) VALUES (?, ?, ?, ?, ?)",
                (version.model, version.number, json.dumps(record), _who(), _now()),
            )

    def describe(
        self, name: str, description: str | None = None, tags: Mapping[str, str] | None = None
    ) -> Version:
        """Write the description or tags of a version; a tag with an empty text is taken away."""
        with self._database.writing() as db:
            version = _found(db, name, self.path)
            place = (version.model, version.number)
            if description is not None:
                db.execute(
                    "UPDATE versions SET description = ? WHERE model = ? AND number = ?",
                    (description, *place),
                )
            for key, value in (tags or {}).items():
                db.execute("DELETE FROM tags WHERE model = ? AND number = ? AND key = ?", (*place, key))
                if value:
                    db.execute("INSERT INTO tags VALUES (?, ?, ?, ?)", (*place, key, value))
            return _one(db, *place)

    def delete(self, name: str) -> tuple[Version, int]:
        """Delete a version that no alias names, and the files that no other version needs; return it and the bytes
        that are free again."""
        with self._database.writing() as db:
            version = _found(db, name, self.path)
            if version.aliases:
                named = " and ".join(f"{version.model}@{alias}" for alias in version.aliases)
                raise ValueError(
                    f"{version} is {named}: let that name another version first, or take it away"
                )
            db.execute("DELETE FROM versions WHERE model = ? AND number = ?", (version.model, version.number))
            _decide(db, version.model, None, version.number, None, "delete", {"digest": version.digest})
        # Only what is committed can be cleared away: whoever is killed here leaves files too many, never too few.
        return version, self.sweep()

    def sweep(self) -> int:
        """Remove files that no version needs; return the bytes that are free again."""
        with self._database.writing() as db:
            used = set().union(*(version.digests for version in _versions(db, None)))
            return self.store.sweep(used)

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


def _find(db: sqlite3.Connection, written: re.Match[str]) -> Version | None:
    model, number, alias = written["model"], written["number"], written["alias"]
    known = db.execute("SELECT newest FROM models WHERE name = ?", (model,)).fetchone()
    if known is None:
        return None
    versions = {version.number: version for version in _versions(db, model)}
    aliases = {each: version for version in versions.values() for each in version.aliases}
    there = ", ".join([*(f":{number}" for number in versions), *(f"@{alias}" for alias in aliases)]) or "none"
    if number is not None and int(number) not in versions:
        gone = "was deleted" if 0 < int(number) <= known["newest"] else "is not there"
        raise ValueError(f"version {number} of {model} {gone}; there are: {there}")
    if alias is not None and alias != "latest" and alias not in aliases:
        near = did_you_mean(nearest(alias, aliases))
        raise ValueError(f"{model} has no alias {alias!r}{near or f'; there are: {there}'}")
    if not versions:
        raise ValueError(f"all versions of {model} were deleted")
    return versions[int(number)] if number else aliases.get(alias or "") or versions[max(versions)]


def _found(db: sqlite3.Connection, name: str, path: Path) -> Version:
    written = WRITTEN.fullmatch(name)
    if written is None or (found := _find(db, written)) is None:
        raise ValueError(f"there is no registered model {name!r} in {path}")
    return found


def _one(db: sqlite3.Connection, model: str, number: int) -> Version:
    return next(version for version in _versions(db, model) if version.number == number)


def _versions(db: sqlite3.Connection, model: str | None) -> list[Version]:
    where, given = ("", ()) if model is None else ("WHERE model = ?", (model,))
    aliases: dict[tuple[str, int], list[str]] = {}
    tags: dict[tuple[str, int], dict[str, str]] = {}
    for row in db.execute(f"SELECT * FROM aliases {where} ORDER BY alias", given):
        aliases.setdefault((row["model"], row["number"]), []).append(row["alias"])
    for row in db.execute(f"SELECT * FROM tags {where} ORDER BY key", given):
        tags.setdefault((row["model"], row["number"]), {})[row["key"]] = row["value"]
    return [
        Version(
            **dict(row)
            | {"base": row["base"] and json.loads(row["base"]), "lineage": json.loads(row["lineage"])},
            aliases=tuple(aliases.get((row["model"], row["number"]), ())),
            tags=tags.get((row["model"], row["number"]), {}),
        )
        for row in db.execute(f"SELECT * FROM versions {where} ORDER BY model, number", given)
    ]


def _alias(db: sqlite3.Connection, model: str, alias: str) -> int | None:
    row = db.execute("SELECT number FROM aliases WHERE model = ? AND alias = ?", (model, alias)).fetchone()
    return None if row is None else row["number"]


def _decide(
    db: sqlite3.Connection, model: str, alias: str | None, number: int | None, was: int | None, kind: str,
    evidence: Any,
) -> None:  # fmt: skip
    db.execute(
        "INSERT INTO decisions (model, alias, number, was, kind, evidence, who, created) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (model, alias, number, was, kind, json.dumps(evidence), _who(), _now()),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user without a name, as containers have
        return socket.gethostname()
