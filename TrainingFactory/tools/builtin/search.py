"""`SearchTool`, BM25 search over a user's texts. The index is a SQLite file (FTS5), built once and reused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import sqlite3
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, validate_call

from TrainingFactory.common.options import STRICT, Count, Text
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec

INDEX_FORMAT = "2"  # of the index; changing it makes every index be rebuilt
SUFFIXES = (".txt", ".md")
MAX_QUERY_TERMS = 64  # of a query
MAX_RESULTS = 20
# Chinese, Japanese and Korean have no spaces between words, or words with many endings: single characters and pairs
# of neighbours are the terms. In other scripts a term is a run of letters and digits.
_TERM_REGEX = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]+)|([^\W_]+)")


class PassageTool(ABC):
    """Base class of search tools: formats the passages that `find` returns for the model."""

    top_k: int  # of a call that does not say how many
    max_chars: int  # of each passage

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        top_k = int(arguments.get("top_k", self.top_k))
        return await in_thread(self._search, arguments["query"], top_k)

    def _search(self, query: str, top_k: int) -> ToolResult:
        matches = self.find(query, top_k)
        if not matches:
            return ToolResult("Nothing found; try other words.")
        return ToolResult(format_passages(matches, self.max_chars))

    @abstractmethod
    def find(self, query: str, top_k: int) -> list[tuple[str, str, str, float]]:
        """Return (id, title, text, score) of the best matches, best first."""


class SearchTool(PassageTool):
    """Finds passages in `path`: a JSONL file (one object per line, with `text_field` and optionally `title_field` and
    `id_field`) or a folder of .txt and .md files. The index is stored in `index_dir`; None: the user's cache folder."""

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
        passages = Passages(Path(path), (text_field, title_field, id_field), index_dir, name)
        self.index_path, self.num_documents = passages.index_path, passages.num_passages
        self.spec = ToolSpec(name, description or "Search documents by keywords.", make_search_schema(top_k))
        self.options = ToolOptions(pure=True, version=digest(passages.files_digest, f"{max_chars} {top_k}"))

    def find(self, query: str, top_k: int) -> list[tuple[str, str, str, float]]:
        """Return (id, title, text, BM25 score) of the best matches, best first; ties in the order of the data."""
        terms = list(dict.fromkeys(split_terms(query)))[:MAX_QUERY_TERMS]
        if not terms:
            return []
        # Quoted, so that no term is read as FTS syntax.
        fts_query = " OR ".join(f'"{term}"' for term in terms)
        with contextlib.closing(_open_index(self.index_path)) as connection:
            cursor = connection.execute(
                "SELECT name, title, text, -score FROM documents JOIN (SELECT rowid AS number, bm25(terms) AS score "
                "FROM terms WHERE terms MATCH ? ORDER BY score, number LIMIT ?) USING (number) "
                "ORDER BY score, number",
                (fts_query, top_k),
            )
            return cursor.fetchall()


class Passages:
    """The passages of a corpus in the order of its files, read from the database that `ensure_index` builds."""

    def __init__(
        self, path: Path, field_names: tuple[str, str, str], index_dir: str | Path | None, name: str
    ) -> None:
        self.path = path
        self.index_path = ensure_index(path, field_names, _find_index_folder(index_dir), name)
        with contextlib.closing(_open_index(self.index_path)) as connection:
            self.num_passages: int = connection.execute("SELECT count(*) FROM documents").fetchone()[0]
            digests = connection.execute("SELECT state, content FROM about").fetchone()
            self.files_digest: str = digests[0]  # of the files' names, sizes and times
            self.content_digest: str = digests[1]  # of the passages

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        """Yield (id, title, text) of every passage."""
        with contextlib.closing(_open_index(self.index_path)) as connection:
            yield from connection.execute("SELECT name, title, text FROM documents ORDER BY number")

    def read_passage(self, index: int) -> tuple[str, str, str]:
        """Return (id, title, text) of the passage at this index, counted from 0."""
        with contextlib.closing(_open_index(self.index_path)) as connection:
            query = "SELECT name, title, text FROM documents WHERE number = ?"
            return connection.execute(query, (index + 1,)).fetchone()


def format_passages(matches: Sequence[tuple[str, str, str, float]], max_chars: int) -> str:
    """Return the text that the model reads for matches (id, title, text, score), which are listed best first."""
    passages = []
    for rank, (document_id, title, text, _) in enumerate(matches, 1):
        excerpt = text if len(text) <= max_chars else text[:max_chars] + " [...]"
        heading = f"[{rank}] {title} ({document_id})" if title else f"[{rank}] {document_id}"
        passages.append(f"{heading}\n{excerpt}")
    return "\n\n".join(passages)


def split_terms(text: str) -> list[str]:
    """Split a text into search terms, in lower case and NFKC form. Combining marks, such as the vowel signs of Indian
    scripts, are removed because they would split words."""
    text = unicodedata.normalize("NFKC", text).lower()
    if not text.isascii():
        text = "".join(character for character in text if unicodedata.category(character)[0] != "M")
    terms = []
    for match in _TERM_REGEX.finditer(text):
        cjk, term = match.groups()
        terms += [term] if term else [*cjk, *(cjk[index : index + 2] for index in range(len(cjk) - 1))]
    return terms


def ensure_index(path: Path, field_names: tuple[str, str, str], folder: Path, tool_name: str) -> Path:
    """Return the path of the data's index; build it if it is missing or outdated. Concurrent builds are safe."""
    path = path.resolve()
    files = _list_files(path, tool_name)
    file_stats = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    data_digest = digest(INDEX_FORMAT, *field_names, json.dumps(file_stats))
    index_path = folder / f"{path.stem[:40]}-{digest(str(path), *field_names)[:20]}.sqlite"
    if _read_data_digest(index_path) == data_digest:
        return index_path
    temporary_path = folder / f"{index_path.stem}.{secrets.token_hex(8)}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _build_index(temporary_path, data_digest, _read_documents(path, files, field_names, tool_name))
        os.replace(temporary_path, index_path)
    except (OSError, sqlite3.Error) as error:
        message = f"tool {tool_name}: cannot build the index in {folder} ({error}); set another index_dir"
        raise ValueError(message) from error
    finally:
        temporary_path.unlink(missing_ok=True)
    return index_path


def _build_index(path: Path, data_digest: str, documents: Iterator[tuple[str, str, str]]) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.execute(
            "CREATE TABLE documents(number INTEGER PRIMARY KEY, name TEXT, title TEXT, text TEXT)"
        )
        connection.execute("CREATE VIRTUAL TABLE terms USING fts5(words, content='', tokenize='unicode61')")
        content_hash = hashlib.sha256()
        for number, (name, title, text) in enumerate(documents, 1):
            content_hash.update(json.dumps([name, title, text]).encode())
            connection.execute("INSERT INTO documents VALUES (?, ?, ?, ?)", (number, name, title, text))
            spaced_text = " ".join(split_terms(f"{title}\n{text}"))
            connection.execute("INSERT INTO terms(rowid, words) VALUES (?, ?)", (number, spaced_text))
        connection.execute("INSERT INTO terms(terms) VALUES ('optimize')")
        connection.execute("CREATE TABLE about(state TEXT, content TEXT)")
        connection.execute("INSERT INTO about VALUES (?, ?)", (data_digest, content_hash.hexdigest()))
        connection.execute("COMMIT")


def _read_data_digest(index_path: Path) -> str | None:
    """Return the digest of the data that the index was built from; None if the index is missing or unreadable."""
    try:
        with contextlib.closing(_open_index(index_path)) as connection:
            return connection.execute("SELECT state FROM about").fetchone()[0]
    except (sqlite3.Error, TypeError):
        return None


def _open_index(index_path: Path) -> sqlite3.Connection:
    """Open an index read-only, without locks, because network disks lack them and nothing changes index files."""
    return sqlite3.connect(f"{index_path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)


def _list_files(path: Path, name: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"tool {name}: no file or folder {path}; set path to a JSONL file or a folder")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise ValueError(f"tool {name}: the folder {path} has no {' or '.join(SUFFIXES)} files; add some")
    return files


def _read_documents(
    path: Path, files: list[Path], field_names: tuple[str, str, str], tool_name: str
) -> Iterator[tuple[str, str, str]]:
    """Yield (id, title, text) of every document."""
    if path.is_dir():
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            yield file.relative_to(path).as_posix(), "", text
        return
    with path.open(encoding="utf-8-sig") as lines:
        for line_number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse_row(line, field_names, line_number, f"tool {tool_name}: {path}:{line_number}")


def _parse_row(
    line: str, field_names: tuple[str, str, str], line_number: int, location: str
) -> tuple[str, str, str]:
    text_field, title_field, id_field = field_names
    try:
        row = dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{location}: not a JSON object: {error}") from error
    if not isinstance(row.get(text_field), str):
        raise ValueError(f"{location}: no text in {text_field!r}; set text_field to one of {', '.join(row)}")
    title, document_id = row.get(title_field), row.get(id_field)
    document_id = line_number if document_id is None else document_id
    return str(document_id), "" if title is None else str(title), row[text_field]


def make_search_schema(top_k: int) -> dict[str, Any]:
    count_schema = {"type": "integer", "description": "how many", "default": top_k, "minimum": 1}
    return {
        "type": "object",
        "properties": {"query": {"type": "string"}, "top_k": count_schema | {"maximum": MAX_RESULTS}},
        "required": ["query"],
    }


def _find_index_folder(index_dir: str | Path | None) -> Path:
    if index_dir:
        return Path(index_dir)
    cache_root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_root) / "training-factory" / "search"
