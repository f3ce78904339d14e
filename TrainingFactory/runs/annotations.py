"""Annotations of a run by its user: tags, a note, the archive mark. Training neither reads nor writes them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ValidationError

from TrainingFactory.data.disk import read_small_file, write_atomically
from TrainingFactory.runs.folder import RunFolder

ANNOTATIONS_FILE = "annotations.json"
TAG_NAME = re.compile(r"[^\W_][\w.+-]{0,63}")
MAX_TAG_CHARS, MAX_NOTE_CHARS = 200, 20_000  # characters of a tag's value and of a note
_write_lock = threading.Lock()


class Annotations(BaseModel):
    """Contents of annotations.json. A tag without a value is an empty string."""

    archived: bool = False
    tags: dict[str, str] = {}
    note: str = ""


def read_annotations(run: RunFolder) -> Annotations:
    """Return the annotations of a run; raise ValueError if the file is damaged."""
    path = run.path / ANNOTATIONS_FILE
    try:
        return Annotations.model_validate_json(read_small_file(path))
    except FileNotFoundError:
        return Annotations()
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ValueError(f"cannot read {path}: {problem}. Correct or remove the file") from error


def annotate_run(
    run: RunFolder,
    *,
    archived: bool | None = None,
    tags: Mapping[str, str] | None = None,
    removed_tags: Iterable[str] = (),
    note: str | None = None,
) -> Annotations:
    """Change the annotations of a run: archive it, set `tags`, remove the tags named in `removed_tags`, and replace the
    note."""
    for name, value in (tags or {}).items():
        check_tag(name, value)
    if note is not None and len(note) > MAX_NOTE_CHARS:
        raise ValueError(f"the note has {len(note)} characters; shorten it to {MAX_NOTE_CHARS}")
    with _write_lock:
        annotations = read_annotations(run)
        if unknown_tags := [name for name in removed_tags if name not in annotations.tags]:
            existing_tags = ", ".join(annotations.tags) or "none"
            raise ValueError(f"run {run.name} has no tag {unknown_tags[0]!r}. Existing tags: {existing_tags}")
        kept_tags = {name: value for name, value in annotations.tags.items() if name not in set(removed_tags)}
        annotations.tags = kept_tags | dict(tags or {})
        if archived is not None:
            annotations.archived = archived
        if note is not None:
            annotations.note = note.strip()
        write_atomically(run.path / ANNOTATIONS_FILE, annotations.model_dump_json(indent=1))
    return annotations


def parse_tags(arguments: Iterable[str]) -> dict[str, str]:
    """Parse tags: `name=value`, or `name` alone."""
    partitions = (argument.partition("=") for argument in arguments)
    return {name.strip(): value.strip() for name, _, value in partitions}


def check_tag(name: str, value: str) -> None:
    if not TAG_NAME.fullmatch(name):
        raise ValueError(
            f"invalid tag {name!r}: use at most 64 letters, digits and . _ + -, starting with a letter or digit"
        )
    if len(value) > MAX_TAG_CHARS or any(not char.isprintable() for char in value):
        raise ValueError(f"invalid value of tag {name}: use one line of at most {MAX_TAG_CHARS} characters")
