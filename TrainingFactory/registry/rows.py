"""Reading and writing rows of the registry's tables."""

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
from TrainingFactory.common.texts import format_message
from TrainingFactory.models.names import SUPPORTED_MODELS
from TrainingFactory.registry.lineage import RUN_KEYS, LineageNode, list_ancestors

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = NAME_PATTERN.pattern
VERSION_NAME = re.compile(rf"(?P<model>{_NAME})(:(?P<number>\d+)|@(?P<alias>{_NAME}))?")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
# Names of checkpoints and versions, invalid as aliases.
RESERVED_ALIASES = re.compile(r"step-\d+|best|last|latest|\d+")


@dataclass(slots=True, frozen=True)
class Version:
    """One version of a registered model; `str(version)` is a name such as `agent:3`."""

    model: str
    number: int
    digest: str
    base: dict[str, Any] | None  # base model of an adapter: name, revision, and digest if it is stored too
    lineage: LineageNode
    description: str
    who: str
    created: str
    aliases: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}:{self.number}"

    @property
    def digests(self) -> set[str]:
        """Return the digests of the stored models that this version uses."""
        return {self.digest} | ({self.base["digest"]} if self.base and self.base["digest"] else set())


def check_name(name: str, kind: str = "model") -> None:
    """Raise ValueError if `name` is not valid for a registered model or an alias; `kind` is "model" or "alias"."""
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"invalid {kind} name {name!r}: it must match {NAME_PATTERN.pattern}")
    if kind == "alias" and RESERVED_ALIASES.fullmatch(name):
        raise ValueError(f"invalid alias {name!r}: reserved for versions and checkpoints. Choose another")
    if kind == "model" and name.lower() in SUPPORTED_MODELS:
        raise ValueError(f"invalid model name {name!r}: it is a supported model. Choose another")


def find_version(db: sqlite3.Connection, name_match: re.Match[str]) -> Version | None:
    """Return the version that a match of VERSION_NAME names; None if there is no such model. Raise ValueError if the
    model has no such version or alias."""
    model, number, alias = name_match["model"], name_match["number"], name_match["alias"]
    row = db.execute("SELECT newest FROM models WHERE name = ?", (model,)).fetchone()
    if row is None:
        return None
    versions = {version.number: version for version in read_versions(db, model)}
    aliases = {alias: version for version in versions.values() for alias in version.aliases}
    existing_names = (
        ", ".join([*(f":{number}" for number in versions), *(f"@{alias}" for alias in aliases)]) or "none"
    )
    if number is not None and int(number) not in versions:
        problem = "was deleted" if 0 < int(number) <= row["newest"] else "does not exist"
        raise ValueError(f"version {number} of {model} {problem}. Existing versions: {existing_names}")
    if alias is not None and alias != "latest" and alias not in aliases:
        hint = did_you_mean(nearest(alias, aliases))
        raise ValueError(f"{model} has no alias {alias!r}{hint or f'. Existing versions: {existing_names}'}")
    if not versions:
        raise ValueError(f"all versions of {model} were deleted")
    return versions[int(number)] if number else aliases.get(alias or "") or versions[max(versions)]


def get_version(db: sqlite3.Connection, version_name: str, path: Path) -> Version:
    """Return the version with this name; raise ValueError if there is none in the registry at `path`."""
    name_match = VERSION_NAME.fullmatch(version_name)
    if name_match is None or (version := find_version(db, name_match)) is None:
        raise ValueError(f"there is no registered model {version_name!r} in {path}")
    return version


def read_versions(db: sqlite3.Connection, model: str | None) -> list[Version]:
    """Return the versions of a model, or of all models, with their aliases and tags."""
    condition, parameters = ("", ()) if model is None else ("WHERE model = ?", (model,))
    aliases: dict[tuple[str, int], list[str]] = {}
    tags: dict[tuple[str, int], dict[str, str]] = {}
    for row in db.execute(f"SELECT * FROM aliases {condition} ORDER BY alias", parameters):
        aliases.setdefault((row["model"], row["number"]), []).append(row["alias"])
    for row in db.execute(f"SELECT * FROM tags {condition} ORDER BY key", parameters):
        tags.setdefault((row["model"], row["number"]), {})[row["key"]] = row["value"]
    return [
        Version(
            **dict(row) | _read_json(db, row),
            aliases=tuple(aliases.get((row["model"], row["number"]), ())),
            tags=tags.get((row["model"], row["number"]), {}),
        )
        for row in db.execute(f"SELECT * FROM versions {condition} ORDER BY model, number", parameters)
    ]


def _read_json(db: sqlite3.Connection, row: sqlite3.Row) -> dict[str, Any]:
    """Return `base` and `lineage` of a row of `versions`; raise ValueError if they or the digests are invalid."""
    try:
        base, lineage = row["base"] and json.loads(row["base"]), json.loads(row["lineage"])
        for digest in (row["digest"], base and base["digest"]):
            if digest is not None and not DIGEST_PATTERN.fullmatch(digest):
                raise ValueError(f"invalid digest {digest!r}")
        if not all("folder" in node or node.keys() >= RUN_KEYS for node in list_ancestors(lineage)):
            raise ValueError("incomplete lineage")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        [path] = [entry["file"] for entry in db.execute("PRAGMA database_list") if entry["name"] == "main"]
        raise ValueError(
            f"version {row['number']} of {row['model']!r} in {path} is damaged: {format_message(error)}. Restore the "
            "file from a backup, or delete this row from its table `versions`"
        ) from error
    return {"base": base, "lineage": lineage}


def get_alias_number(db: sqlite3.Connection, model: str, alias: str) -> int | None:
    row = db.execute("SELECT number FROM aliases WHERE model = ? AND alias = ?", (model, alias)).fetchone()
    return None if row is None else row["number"]


def write_evaluations(
    db: sqlite3.Connection, model: str, version_number: int, records: Sequence[Mapping[str, Any]]
) -> None:
    db.executemany(
        "INSERT INTO evaluations (model, number, record, who, created) VALUES (?, ?, ?, ?, ?)",
        [(model, version_number, json.dumps(record), get_user(), utc_now()) for record in records],
    )


def write_decision(
    db: sqlite3.Connection, model: str, alias: str | None, number: int | None, previous_number: int | None, kind: str,
    evidence: Any,
) -> None:  # fmt: skip
    db.execute(
        "INSERT INTO decisions (model, alias, number, was, kind, evidence, who, created) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (model, alias, number, previous_number, kind, json.dumps(evidence), get_user(), utc_now()),
    )


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def get_user() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # in containers, the user may have no name
        return socket.gethostname()
