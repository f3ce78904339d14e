"""Text to ids, so that only a template's own text can give a control token.

Control means special tokens, and added tokens that look like markup though they are not flagged special: Qwen3's
<tool_call> and </tool_response> are such, and `encode_special_tokens` leaves them live. Other added tokens are text
(Gemma adds its newlines and tabs). So control tokens are found in the template's own text by us, and everything
between two of them, own and foreign text together, goes through a clone of the tokenizer that has no control tokens.
Own and foreign text are encoded as one string, so the ids are those that the tokenizer itself would give, merges over
the border included; they are checked after.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from tokenizers import Tokenizer, pre_tokenizers

from TrainingFactory.common.texts import valid_text

MARKUP = re.compile(r"[<\[{|｜].*[>\]}|｜]", re.DOTALL)
# How byte-level tokenizers write bytes: one whose own character is no such sign by one behind 255, in order.
_SIGNS = sorted(pre_tokenizers.ByteLevel.alphabet())
_BYTES = dict(zip(_SIGNS, sorted(range(256), key=lambda byte: chr(byte) not in _SIGNS), strict=True))
T = TypeVar("T")
SHORT = 2_000  # characters; longer outlines of a turn have a text of its own in them, and do not come back
CANARY = "Hello world,  f(x):\n\treturn '<b>wörld</b> 你好'\n\n"


class Control(NamedTuple):
    """Stands for a control token in a template's own text."""

    token: int


def gives_back(tokenizer: Tokenizer) -> bool:
    """Return whether a text with everything that tokenizers lose comes back as it was."""
    ids = tokenizer.encode(CANARY, add_special_tokens=False).ids
    return tokenizer.decode(ids, skip_special_tokens=False) == CANARY


class TextEncoder:
    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)  # foreign object: slow tokenizers have none
        if backend is None:
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer (tokenizer.json), as is needed"
            )
        state = json.loads(backend.to_str()) | {"post_processor": None}
        added = {token["content"]: token for token in state["added_tokens"]}
        self.control_texts: dict[str, int] = {
            text: token["id"]
            for text, token in added.items()
            if text and (token["special"] or MARKUP.fullmatch(text))
        }
        state["added_tokens"] = [token for text, token in added.items() if text not in self.control_texts]
        for part in ("normalizer", "pre_tokenizer"):
            state[part] = _without_prefix_space(state.get(part))
        self._plain = Tokenizer.from_str(json.dumps(state))
        self._whole = backend
        byte_level = (state["decoder"] or {}).get("type") == "ByteLevel"
        self._bytes_of = lru_cache(maxsize=None)(self._token_bytes) if byte_level else None
        # The clone numbers the added tokens that are left anew, except those in the vocabulary itself.
        self._numbers = {self._plain.token_to_id(one["content"]): one["id"] for one in state["added_tokens"]}
        self.control_ids = frozenset(self.control_texts.values())
        longest_first = sorted(self.control_texts, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._cached = lru_cache(maxsize=4096)(self._encode)
        self.can_join = lru_cache(maxsize=512)(self._can_join)  # mostly names of tools and arguments
        self._joined = "\0".join(["", *self.control_texts, ""])
        self._words = {_word(text) for text in self.control_texts} - {""}
        self._longest = max(map(len, self.control_texts), default=0)
        ids = self._encode(CANARY)
        if self.decode(ids) != CANARY and tokenizer.unk_token_id not in ids:
            raise ValueError(
                f"the tokenizer does not give texts back: {CANARY!r} becomes {self.decode(ids)!r}; its tokenizer.json "
                "does not fit the tokenizer_class in its tokenizer_config.json, or is not made for a language model"
            )

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
        ids = [self._numbers.get(token, token) for token in encoding.ids] if self._numbers else encoding.ids
        if self.control_ids.isdisjoint(ids):
            return ids
        # A vocabulary may hold a control token as an ordinary entry, too. Cut in two, its text cannot give it.
        position = next(i for i, token in enumerate(ids) if token in self.control_ids)
        start, end = encoding.offsets[position]
        if end - start < 2:
            return self._encode(text[:start]) + self._encode(text[end:])  # one character: left out
        middle = (start + end) // 2
        return self._encode(text[:middle]) + self._encode(text[middle:])

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._bytes_of is not None:  # what the library does, in a tenth of its time
            return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", errors="replace")
        return self._whole.decode(list(token_ids), skip_special_tokens=False)

    def _token_bytes(self, number: int) -> bytes:
        text = self._whole.id_to_token(number) or ""
        return bytes(map(_BYTES.__getitem__, text)) if _BYTES.keys() >= set(text) else text.encode()

    def quoted(self, token_ids: Sequence[int], quote: Callable[[str], str]) -> str:
        """Decode a turn; text in ordinary tokens that reads like a control token is given to `quote`."""
        text = self.decode(token_ids)
        if len(self._control.findall(text)) == len(list(filter(self.control_ids.__contains__, token_ids))):
            return text
        runs = groupby(token_ids, self.control_ids.__contains__)
        parts = [(control, self.decode(list(run))) for control, run in runs]
        return "".join(
            part if control else self._control.sub(lambda found: quote(found.group()), part)
            for control, part in parts
        )

    def _can_join(self, text: str) -> bool:
        """Return whether the text holds a control token, is the word in one, or could be its beginning or end."""
        text = text.strip()
        sizes = range(1, min(len(text), self._longest) + 1)
        return bool(text) and (
            _word(text) in self._words
            or self._control.search(text) is not None
            or any("\0" + text[-end:] in self._joined or text[:end] + "\0" in self._joined for end in sizes)
        )

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


def _word(text: str) -> str:
    return re.sub(r"^\W+|\W+$", "", text)


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


def remembered(function: Callable[[str], T]) -> Callable[[str], T]:
    """Return the function, with what it gave for short texts kept."""
    known = lru_cache(512)(function)
    return lambda text: (known if len(text) <= SHORT else function)(text)
