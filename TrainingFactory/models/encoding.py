"""Turn text into ids so that only a template's own text can give a control token, which is every added token: Qwen3's
<tool_call> is not flagged special, and `encode_special_tokens` leaves it live. So control tokens are found in the
template's own text by us; everything between two of them, own and foreign text as one string (merges over the border
are the tokenizer's own), goes through a clone of the tokenizer without added tokens, and is checked after."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from TrainingFactory.texts import valid_text


class Control(NamedTuple):
    """Stands for a control token in a template's own text."""

    token: int


class TextEncoder:
    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)  # foreign object: slow tokenizers have none
        if backend is None:
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer (tokenizer.json), as is needed"
            )
        state = json.loads(backend.to_str()) | {"added_tokens": [], "post_processor": None}
        for part in ("normalizer", "pre_tokenizer"):
            state[part] = _without_prefix_space(state.get(part))
        self._plain = Tokenizer.from_str(json.dumps(state))
        self._whole = backend
        self.control_texts: dict[str, int] = {
            text: i for text, i in tokenizer.get_added_vocab().items() if text
        }
        self.control_ids = frozenset(self.control_texts.values())
        longest_first = sorted(self.control_texts, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._cached = lru_cache(maxsize=4096)(self._encode)

    def split(self, text: str) -> list[str | Control]:
        """Cut a template's own text at its control tokens."""
        parts: list[str | Control] = []
        end = 0
        for match in self._control.finditer(text):
            parts += [text[end : match.start()], Control(self.control_texts[match.group()])]
            end = match.end()
        return [part for part in [*parts, text[end:]] if part != ""]

    def plain(self, text: str) -> list[int]:
        """Return ids of a text, none of which is a control token, whatever the text contains."""
        return list(self._cached(text) if len(text) < 20_000 else self._encode(text))

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        # a lone surrogate (a model can write one in JSON) has no UTF-8 form
        text = valid_text(text)
        encoding = self._plain.encode(text, add_special_tokens=False)
        if self.control_ids.isdisjoint(encoding.ids):
            return encoding.ids
        # A vocabulary may hold a control token as an ordinary entry, too. Cut in two, its text cannot give it.
        position = next(i for i, token in enumerate(encoding.ids) if token in self.control_ids)
        start, end = encoding.offsets[position]
        if end - start < 2:
            return self._encode(text[:start]) + self._encode(text[end:])  # one character: left out
        middle = (start + end) // 2
        return self._encode(text[:middle]) + self._encode(text[middle:])

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._whole.decode(list(token_ids), skip_special_tokens=False)

    def holds_control(self, text: str) -> bool:
        return any(control in text for control in self.control_texts)

    def cut(self, text: str, max_tokens: int) -> str:
        """Return the text if it fits, else its beginning and its end with the cut marked between them."""
        text = valid_text(text)
        # No token is longer than the longest entry, so much of a huge text need not be encoded at all.
        keep_chars = max_tokens * 40
        if len(text) > 2 * keep_chars:
            head, tail = text[:keep_chars], text[-keep_chars:]
        else:
            if len(text.encode()) <= max_tokens or len(self.plain(text)) <= max_tokens:
                return text
            head = tail = text
        marker = f"\n[... cut from {len(text)} characters ...]\n"
        room = max_tokens - len(self.plain(marker))
        if room < 2:  # too narrow for a marker
            return self._slice(head, max_tokens, from_end=False)
        beginning = self._slice(head, room - room // 3, from_end=False)
        ending = self._slice(tail, room // 3, from_end=True)
        return beginning + marker + ending

    def _slice(self, text: str, tokens: int, from_end: bool) -> str:
        """Return the longest beginning (or end) of the text that encodes to at most so many tokens."""
        offsets = self._plain.encode(text, add_special_tokens=False).offsets
        size = max(0, min(tokens, len(offsets)))
        while size > 0:
            piece = text[offsets[-size][0] :] if from_end else text[: offsets[size - 1][1]]
            excess = len(self.plain(piece)) - tokens  # a token border may fall inside a character
            if excess <= 0:
                return piece
            size -= excess
        return ""


def _without_prefix_space(node: Any) -> Any:
    """Drop the space that some tokenizers put before a whole text: inner pieces must not get it."""
    if isinstance(node, list):
        return [cleaned for item in node if (cleaned := _without_prefix_space(item)) is not None]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "Prepend":
        return None
    node = {key: _without_prefix_space(value) for key, value in node.items()}
    if node.get("type") == "Metaspace":
        node["prepend_scheme"] = "never"
    if "add_prefix_space" in node:
        node["add_prefix_space"] = False
    return node
