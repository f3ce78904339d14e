"""Sentence encoders: a transformer with mean pooling, loaded from a local folder."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

HASHED_PATTERNS = ("config.json", "tokenizer.json", "vocab.txt", "*.safetensors")
DEFAULT_MAX_TOKENS = 256
_TOKENIZER_LOCK = threading.Lock()  # fast tokenizers are not thread-safe


class SentenceEncoder:
    """Encoder of texts as vectors of length 1: the mean of the last hidden states over all tokens. It cuts longer texts
    at `max_tokens`, and loads the model at the first text."""

    def __init__(
        self,
        folder: str | Path,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        batch_size: int = 64,
        device: str = "cpu",
    ) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self.max_tokens, self.batch_size, self.device = max_tokens, batch_size, device
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"{folder} is no folder with a sentence encoder: it has no config.json. Download one: "
                "hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir minilm"
            )
        if not list(self.folder.glob("*.safetensors")):
            raise ValueError(
                f"{folder} has no weights in the safetensors format. Other formats can contain code and are not read."
            )
        self.num_truncated = 0  # texts longer than max_tokens, since the encoder was made

    @cached_property
    def digest(self) -> str:
        """Digest of weights, tokenizer and options that change the vectors."""
        hasher = hashlib.sha256(f"mean {self.max_tokens}".encode())
        for pattern in HASHED_PATTERNS:
            for path in sorted(self.folder.glob(pattern)):
                with path.open("rb") as file:
                    hasher.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
        return hasher.hexdigest()

    @cached_property
    def dimension(self) -> int:
        return int(self._tokenizer_and_model[1].config.hidden_size)

    @cached_property
    def _tokenizer_and_model(self) -> tuple[Any, Any]:
        return _load_encoder(self.folder, self.device, self.digest)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return a float32 matrix with one row per text. Texts of similar length share a batch."""
        sorted_indices = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors: np.ndarray | None = None
        with _TOKENIZER_LOCK:
            for start in range(0, len(sorted_indices), self.batch_size):
                indices = sorted_indices[start : start + self.batch_size]
                batch = self._encode_batch([texts[index] for index in indices])
                if vectors is None:
                    vectors = np.empty((len(texts), batch.shape[1]), np.float32)
                vectors[indices] = batch
            return np.empty((0, self.dimension), np.float32) if vectors is None else vectors

    def _encode_batch(self, texts: list[str]) -> np.ndarray:
        import torch

        tokenizer, model = self._tokenizer_and_model
        lengths = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]
        self.num_truncated += sum(length > self.max_tokens for length in lengths)
        inputs = tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self.device)
        with torch.inference_mode():
            hidden_states = model(**inputs).last_hidden_state  # [texts, tokens, dimension]
        mask = inputs["attention_mask"].unsqueeze(-1)
        vectors = (hidden_states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(vectors, dim=-1).cpu().numpy()


@cache
def _load_encoder(folder: Path, device: str, digest: str) -> tuple[Any, Any]:
    """Return tokenizer and model. Tools with the same encoder share them, because the result is cached."""
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading the weights
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"the sentence encoder in {folder} cannot be loaded: {error}") from error
    return tokenizer, model.eval().float().to(device)
