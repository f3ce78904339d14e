"""Dense retrieval: search for passages by the meaning of a query, with a sentence encoder and faiss."""

from TrainingFactory.retrieval.encoder import SentenceEncoder
from TrainingFactory.retrieval.tool import RetrievalTool

__all__ = ["RetrievalTool", "SentenceEncoder"]
