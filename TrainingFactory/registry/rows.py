"""What is in the registry's tables as objects: versions by name, and the rows that are written with them."""

from __future__ import annotations

import getpass
import json
import re
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.texts import message_of
from TrainingFactory.models.names import SUPPORTED_MODELS
from TrainingFactory.registry.lineage import OF_RUN, Node, chain

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
WRITTEN = re.compile(rf"(?P<model>{NAME.pattern})(:(?P<number>\d+)|@(?P<alias>{NAME.pattern}))?")
DIGEST = re.compile(r"[0-9a-f]{64}")
OF_RUNS = re.compile(r"step-\d+|best|last|latest|\d+")  # names of checkpoints and versions, no aliases


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


def find_version(db: sqlite3.Connection, written: re.Match[str]) -> Version | None:
    model, number, alias = written["model"], written["number"], written["alias"]
    known = db.execute("SELECT newest FROM models WHERE name = ?", (model,)).fetchone()
    if known is None:
        return None
    versions = {version.number: version for version in all_versions(db, model)}
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


def found_version(db: sqlite3.Connection, name: str, path: Path) -> Version:
    written = WRITTEN.fullmatch(name)
    if written is None or (found := find_version(db, written)) is None:
        raise ValueError(f"there is no registered model {name!r} in {path}")
    return found


def all_versions(db: sqlite3.Connection, model: str | None) -> list[Version]:
    where, given = ("", ()) if model is None else ("WHERE model = ?", (model,))
    aliases: dict[tuple[str, int], list[str]] = {}
    tags: dict[tuple[str, int], dict[str, str]] = {}
    for row in db.execute(f"SELECT * FROM aliases {where} ORDER BY alias", given):
        aliases.setdefault((row["model"], row["number"]), []).append(row["alias"])
    for row in db.execute(f"SELECT * FROM tags {where} ORDER BY key", given):
        tags.setdefault((row["model"], row["number"]), {})[row["key"]] = row["value"]
    return [
        Version(
            **dict(row) | _read_json(db, row),
            aliases=tuple(aliases.get((row["model"], row["number"]), ())),
            tags=tags.get((row["model"], row["number"]), {}),
        )
        for row in db.execute(f"SELECT * FROM versions {where} ORDER BY model, number", given)
    ]


def _read_json(db: sqlite3.Connection, row: sqlite3.Row) -> dict[str, Any]:
    """Return `base` and `lineage`; raise ValueError that names the version where they or its digests are invalid."""
    try:
        base, lineage = row["base"] and json.loads(row["base"]), json.loads(row["lineage"])
        for digest in (row["digest"], base and base["digest"]):
            if digest is not None and not DIGEST.fullmatch(digest):
                raise ValueError(f"invalid digest {digest!r}")
        if not all("folder" in node or node.keys() >= OF_RUN for node in chain(lineage)):
            raise ValueError("incomplete lineage")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        [path] = [each["file"] for each in db.execute("PRAGMA database_list") if each["name"] == "main"]
        raise ValueError(
            f"version {row['number']} of {row['model']!r} in {path} is damaged: {message_of(error)}. Restore the file "
            "from a backup, or delete this row from its table `versions`"
        ) from error
    return {"base": base, "lineage": lineage}


def alias_of(db: sqlite3.Connection, model: str, alias: str) -> int | None:
    row = db.execute("SELECT number FROM aliases WHERE model = ? AND alias = ?", (model, alias)).fetchone()
    return None if row is None else row["number"]


def write_evaluations(
    db: sqlite3.Connection, model: str, number: int, records: Sequence[Mapping[str, Any]]
) -> None:
    db.executemany(
        "INSERT INTO evaluations (model, number, record, who, created) VALUES (?, ?, ?, ?, ?)",
        [(model, number, json.dumps(record), who(), now()) for record in records],
    )


def write_decision(
    db: sqlite3.Connection, model: str, alias: str | None, number: int | None, was: int | None, kind: str,
    evidence: Any,
) -> None:  # fmt: skip
    db.execute(
        "INSERT INTO decisions (model, alias, number, was, kind, evidence, who, created) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (model, alias, number, was, kind, json.dumps(evidence), who(), now()),
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user without a name, as containers have
        return socket.gethostname()
