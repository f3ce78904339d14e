"""`RetrievalTool`, dense retrieval over a user's texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, validate_call

from TrainingFactory.common.options import STRICT, Count, Text
from TrainingFactory.retrieval.encoder import DEFAULT_MAX_TOKENS, SentenceEncoder
from TrainingFactory.retrieval.index import VectorIndex, load_faiss
from TrainingFactory.tools.builtin.search import MAX_RESULTS, Passages, PassageTool, make_search_schema
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import ToolSpec


class RetrievalTool(PassageTool):
    """Finds the passages in `path` that are closest in meaning to a query: a JSONL file (one object per line, with
    `text_field` and optionally `title_field` and `id_field`) or a folder of .txt and .md files. `encoder` is a folder
    with a sentence encoder. The vectors are stored in `index_dir`; None: the user's cache folder. Some encoders need
    `query_prefix` and `passage_prefix`, such as "query: " and "passage: " for E5."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        path: str | Path,
        encoder: str | Path,
        *,
        name: Text = "retrieval",
        description: str | None = None,
        text_field: Text = "text",
        title_field: Text = "title",
        id_field: Text = "id",
        top_k: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 3,
        max_chars: Count = 600,
        index_dir: str | Path | None = None,
        max_tokens: Annotated[int, Field(ge=8)] = DEFAULT_MAX_TOKENS,
        batch_size: Count = 64,
        device: Literal["cpu", "cuda", "mps"] = "cpu",
        query_prefix: str = "",
        passage_prefix: str = "",
    ) -> None:
        load_faiss(name)  # report a missing package before anything is read
        self.top_k, self.max_chars, self.query_prefix = top_k, max_chars, query_prefix
        try:
            self.encoder = SentenceEncoder(encoder, max_tokens, batch_size, device)
        except ValueError as error:
            raise ValueError(f"tool {name}: encoder: {error}") from error
        self.passages = Passages(Path(path), (text_field, title_field, id_field), index_dir, name)
        self.vector_index = VectorIndex(self.passages, self.encoder, passage_prefix, name)
        self.spec = ToolSpec(name, description or "Search documents by meaning.", make_search_schema(top_k))
        version = digest(self.vector_index.version, f"{max_chars} {top_k}", query_prefix)
        self.options = ToolOptions(pure=True, version=version)

    def find(self, query: str, top_k: int) -> list[tuple[str, str, str, float]]:
        """Return (id, title, text, cosine similarity) of the best matches, best first."""
        matches = self.vector_index.find_nearest(self.encoder.encode([self.query_prefix + query])[0], top_k)
        return [(*self.passages.read_passage(index), score) for index, score in matches]
