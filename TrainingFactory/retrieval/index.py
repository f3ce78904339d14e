"""Vectors of a corpus: encoded once, stored in a file, searched with faiss."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from TrainingFactory.retrieval.encoder import SentenceEncoder
from TrainingFactory.tools.builtin.search import Passages
from TrainingFactory.tools.fingerprint import digest

log = logging.getLogger(__name__)
FORMAT_VERSION = "1"  # of the stored vectors; changing it makes them be computed again
PASSAGES_PER_CHUNK = 1024  # passages encoded between two updates of the progress bar


class VectorIndex:
    """An exact index over the passages, by cosine similarity. The vectors are stored as a plain NumPy array, which is
    read without pickle, in a file named by the digest of corpus and encoder."""

    def __init__(self, passages: Passages, encoder: SentenceEncoder, prefix: str, tool_name: str) -> None:
        self._faiss = load_faiss(tool_name)
        self.version = digest(FORMAT_VERSION, passages.content_digest, encoder.digest, prefix)
        if not passages.num_passages:
            raise ValueError(f"tool {tool_name}: {passages.path} has no passages to search; add some")
        self.file = passages.index_path.with_name(f"{passages.index_path.stem}-{self.version[:20]}.npy")
        vectors = _load_vectors(self.file, passages.num_passages)
        if vectors is None:
            vectors = _encode_passages(passages, encoder, prefix, tool_name)
            _store_vectors(self.file, vectors, tool_name)
        self.dimension = vectors.shape[1]
        self._index: Any = self._faiss.IndexFlatIP(self.dimension)
        self._index.add(vectors)

    def find_nearest(self, vector: np.ndarray, top_k: int) -> list[tuple[int, float]]:
        """Return (number of the passage from 0, cosine similarity) of the best matches, best first."""
        scores, indices = self._index.search(vector.reshape(1, -1), min(top_k, self._index.ntotal))
        return [(int(index), float(score)) for index, score in zip(indices[0], scores[0], strict=True)]


def load_faiss(tool_name: str) -> Any:
    try:
        import faiss  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"tool {tool_name} needs the package faiss-cpu; run pip install 'training-factory[retrieval]' ({error})"
        ) from error
    return faiss


def _load_vectors(file: Path, num_passages: int) -> np.ndarray | None:
    """Return the vectors that an earlier process stored; None if there are none, or if the file is damaged."""
    try:
        vectors = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_valid = vectors.ndim == 2 and vectors.shape[0] == num_passages and vectors.dtype == np.float32
    return vectors if is_valid else None


def _encode_passages(passages: Passages, encoder: SentenceEncoder, prefix: str, tool_name: str) -> np.ndarray:
    from tqdm import tqdm

    num_truncated_before = encoder.num_truncated
    vector_batches: list[np.ndarray] = []
    texts = (f"{prefix}{title}\n{text}" if title else f"{prefix}{text}" for _, title, text in passages)
    with tqdm(
        total=passages.num_passages, desc=f"tool {tool_name}: encoding", unit=" passages", disable=None
    ) as progress:
        for chunk in _split_into_chunks(texts):
            vector_batches.append(encoder.encode(chunk))
            progress.update(len(chunk))
    if num_truncated := encoder.num_truncated - num_truncated_before:
        log.warning(
            "tool %s: %d of %d passages are longer than %d tokens; only their beginning is searched. Split them, or "
            "raise max_tokens",
            tool_name, num_truncated, passages.num_passages, encoder.max_tokens,
        )  # fmt: skip
    return np.concatenate(vector_batches)


def _split_into_chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    while chunk := list(islice(texts, PASSAGES_PER_CHUNK)):
        yield chunk


def _store_vectors(file: Path, vectors: np.ndarray, tool_name: str) -> None:
    """Write the vectors to a temporary file and rename it, so that concurrent processes never read an incomplete
    file."""
    temporary_file = file.with_name(f"{file.stem}.{secrets.token_hex(8)}.part")
    try:
        with temporary_file.open("wb") as stream:
            np.save(stream, vectors, allow_pickle=False)
        os.replace(temporary_file, file)
    except OSError as error:
        text = f"tool {tool_name}: cannot store the vectors in {file.parent} ({error}); set another index_dir"
        raise ValueError(text) from error
    finally:
        temporary_file.unlink(missing_ok=True)
