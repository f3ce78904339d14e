"""`SearchTool`: BM25 over a user's texts. The index is a SQLite file (FTS5) that is built once and kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sqlite3
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, validate_call

from TrainingFactory.common.options import STRICT, Count, Text
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec

FORMAT = "1"  # of the index; a new one makes all that were built old
SUFFIXES = (".txt", ".md")
MAX_TERMS = 64  # of a query
MAX_RESULTS = 20
# Chinese, Japanese and Korean have no spaces between words, or words of many endings: single characters and
# pairs of neighbours are looked up. Elsewhere a word is a run of letters and digits.
_RUNS = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]+)|([^\W_]+)")


class SearchTool:
    """Finds passages in `path`: a JSONL file (one object a line, with `text_field` and, where they exist,
    `title_field` and `id_field`) or a folder of .txt and .md files. The index is kept in `index_dir`."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        path: str | Path,
        *,
        name: Text = "search",
        description: str | None = None,
        text_field: Text = "text",
        title_field: Text = "title",
        id_field: Text = "id",
        top_k: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 3,
        max_chars: Count = 600,
        index_dir: str | Path | None = None,
    ) -> None:
        self.top_k, self.max_chars = top_k, max_chars
        fields = (text_field, title_field, id_field)
        self.index = ready_index(Path(path), fields, Path(index_dir) if index_dir else _cache_folder(), name)
        with contextlib.closing(_opened(self.index)) as connection:
            self.documents: int = connection.execute("SELECT count(*) FROM documents").fetchone()[0]
            state = connection.execute("SELECT state FROM about").fetchone()[0]
        self.spec = ToolSpec(name, description or "Search documents by keywords.", _parameters(top_k))
        self.options = ToolOptions(pure=True, version=digest(state, f"{max_chars} {top_k}"))

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        top_k = int(arguments.get("top_k", self.top_k))
        return await in_thread(self._run, arguments["query"], top_k)

    def _run(self, query: str, top_k: int) -> ToolResult:
        found = self.find(query, top_k)
        if not found:
            return ToolResult("Nothing found; try other words.")
        shown = []
        for rank, (document, title, text, _) in enumerate(found, 1):
            cut = text if len(text) <= self.max_chars else text[: self.max_chars] + " [...]"
            head = f"[{rank}] {title} ({document})" if title else f"[{rank}] {document}"
            shown.append(f"{head}\n{cut}")
        return ToolResult("\n\n".join(shown))

    def find(self, query: str, top_k: int) -> list[tuple[str, str, str, float]]:
        """Return (id, title, text, BM25 score), best first; equal scores in the order of the data."""
        terms = list(dict.fromkeys(words(query)))[:MAX_TERMS]
        if not terms:
            return []
        # Every term is quoted, so that nothing in it is FTS syntax; any of them may match.
        match = " OR ".join(f'"{term}"' for term in terms)
        with contextlib.closing(_opened(self.index)) as connection:
            rows = connection.execute(
                "SELECT name, title, text, -score FROM documents JOIN (SELECT rowid AS number, bm25(terms) AS score "
                "FROM terms WHERE terms MATCH ? ORDER BY score, number LIMIT ?) USING (number) "
                "ORDER BY score, number",
                (match, top_k),
            )
            return rows.fetchall()


def words(text: str) -> list[str]:
    """Split a text into what is looked up, in lower case and one form per character. Marks that stand alone, as vowels
    do in Indian scripts, are left out: they would tear words apart."""
    text = unicodedata.normalize("NFKC", text).lower()
    if not text.isascii():
        text = "".join(letter for letter in text if unicodedata.category(letter)[0] != "M")
    found = []
    for match in _RUNS.finditer(text):
        run, word = match.groups()
        found += [word] if word else [*run, *(run[at : at + 2] for at in range(len(run) - 1))]
    return found


def ready_index(path: Path, fields: tuple[str, str, str], folder: Path, name: str) -> Path:
    """Return the index of these data, built if there is none or the data has changed. It is written aside and
    renamed, so that it is whole whoever else builds it at the same time."""
    path = path.resolve()
    files = _files(path, name)
    listed = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    state = digest(FORMAT, *fields, json.dumps(listed))
    index = folder / f"{path.stem[:40]}-{digest(str(path), *fields)[:20]}.sqlite"
    if _state(index) == state:
        return index
    aside = folder / f"{index.stem}.{secrets.token_hex(8)}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _build(aside, state, _documents(path, files, fields, name))
        os.replace(aside, index)
    except (OSError, sqlite3.Error) as error:
        raise ValueError(
            f"tool {name}: no index can be built in {folder} ({error}); set index_dir"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return index


def _build(target: Path, state: str, documents: Iterator[tuple[str, str, str]]) -> None:
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.execute(
            "CREATE TABLE documents(number INTEGER PRIMARY KEY, name TEXT, title TEXT, text TEXT)"
        )
        connection.execute("CREATE VIRTUAL TABLE terms USING fts5(words, content='', tokenize='unicode61')")
        for count, (name, title, text) in enumerate(documents, 1):
            connection.execute("INSERT INTO documents VALUES (?, ?, ?, ?)", (count, name, title, text))
            spaced = " ".join(words(f"{title}\n{text}"))
            connection.execute("INSERT INTO terms(rowid, words) VALUES (?, ?)", (count, spaced))
        connection.execute("INSERT INTO terms(terms) VALUES ('optimize')")
        connection.execute("CREATE TABLE about(state TEXT)")
        connection.execute("INSERT INTO about VALUES (?)", (state,))
        connection.execute("COMMIT")


def _state(index: Path) -> str | None:
    """Read of which data it is the index; None if there is none that can be read."""
    try:
        with contextlib.closing(_opened(index)) as connection:
            return connection.execute("SELECT state FROM about").fetchone()[0]
    except (sqlite3.Error, TypeError):
        return None


def _opened(index: Path) -> sqlite3.Connection:
    """Open an index for reading; immutable, as files are only ever replaced: no locks, which network disks lack."""
    return sqlite3.connect(f"{index.resolve().as_uri()}?mode=ro&immutable=1", uri=True)


def _files(path: Path, name: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"tool {name}: there is no file or folder {path}; set path to a JSONL file or a folder"
        )
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise ValueError(f"tool {name}: the folder {path} has no {' or '.join(SUFFIXES)} files")
    return files


def _documents(
    path: Path, files: list[Path], fields: tuple[str, str, str], name: str
) -> Iterator[tuple[str, str, str]]:
    """Read (id, title, text) of each document."""
    if path.is_dir():
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            yield file.relative_to(path).as_posix(), "", text
        return
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _document(line, fields, number, f"tool {name}: {path}:{number}")


def _document(line: str, fields: tuple[str, str, str], number: int, where: str) -> tuple[str, str, str]:
    text_field, title_field, id_field = fields
    try:
        row = dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(row.get(text_field), str):
        has = ", ".join(row)
        raise ValueError(
            f"{where}: needs a text under {text_field!r}; it has {has}. Set text_field to the right one"
        )
    title, document = row.get(title_field), row.get(id_field)
    return str(number if document is None else document), "" if title is None else str(title), row[text_field]


def _parameters(top_k: int) -> dict[str, Any]:
    count = {"type": "integer", "description": "how many", "default": top_k, "minimum": 1}
    return {
        "type": "object",
        "properties": {"query": {"type": "string"}, "top_k": count | {"maximum": MAX_RESULTS}},
        "required": ["query"],
    }


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "training-factory" / "search"
