"""Encoding of text so that only the chat template's own text can produce control tokens.

Control tokens are special tokens, and added tokens that look like markup though they are not flagged special, such as
Qwen3's <tool_call> and </tool_response>, which `encode_special_tokens` does not disable. Other added tokens are text
(Gemma adds newlines and tabs). This module finds the control tokens in the template's own text. It encodes everything
between two of them, trusted and untrusted text as one string, with a clone of the tokenizer that has no control tokens.
So the ids, including merges across the border, are those of the tokenizer itself. They are checked afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from tokenizers import Tokenizer, pre_tokenizers

from TrainingFactory.common.texts import replace_surrogates

MARKUP_PATTERN = re.compile(r"[<\[{|｜].*[>\]}|｜]", re.DOTALL)
# The character of each byte in byte-level tokenizers: its own if printable, else the next free one after 255.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_BYTE_MAP = dict(zip(_ALPHABET, sorted(range(256), key=lambda byte: chr(byte) not in _ALPHABET), strict=True))
T = TypeVar("T")
MAX_SHORT_CHARS = 2_000  # characters; longer outlines of a turn contain a text of that turn and do not recur
CANARY_TEXT = "Hello world,  f(x):\n\treturn '<b>wörld</b> 你好'\n\n"


class ControlToken(NamedTuple):
    """A control token in a template's own text."""

    token: int


def decodes_unchanged(tokenizer: Tokenizer) -> bool:
    """Return whether encoding and decoding returns the canary text unchanged. The canary contains the characters that
    tokenizers tend to lose, such as double spaces and accents."""
    ids = tokenizer.encode(CANARY_TEXT, add_special_tokens=False).ids
    return tokenizer.decode(ids, skip_special_tokens=False) == CANARY_TEXT


class TextEncoder:
    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)  # slow tokenizers have none
        if backend is None:
            raise ValueError(
                f"{type(tokenizer).__name__} is a slow tokenizer; use one with a tokenizer.json (fast tokenizer)"
            )
        tokenizer_state = json.loads(backend.to_str()) | {"post_processor": None}
        added_tokens = {token["content"]: token for token in tokenizer_state["added_tokens"]}
        self.control_texts: dict[str, int] = {
            text: token["id"]
            for text, token in added_tokens.items()
            if text and (token["special"] or MARKUP_PATTERN.fullmatch(text))
        }
        tokenizer_state["added_tokens"] = [
            token for text, token in added_tokens.items() if text not in self.control_texts
        ]
        for component in ("normalizer", "pre_tokenizer"):
            tokenizer_state[component] = _remove_prefix_space(tokenizer_state.get(component))
        self._plain_tokenizer = Tokenizer.from_str(json.dumps(tokenizer_state))
        self._whole_tokenizer = backend
        is_byte_level = (tokenizer_state["decoder"] or {}).get("type") == "ByteLevel"
        self._get_token_bytes = lru_cache(maxsize=None)(self._read_token_bytes) if is_byte_level else None
        # The clone renumbers the remaining added tokens, except those that are in the vocabulary itself.
        get_new_id, text_tokens = self._plain_tokenizer.token_to_id, tokenizer_state["added_tokens"]
        self._original_ids = {get_new_id(token["content"]): token["id"] for token in text_tokens}
        self.control_ids = frozenset(self.control_texts.values())
        sorted_texts = sorted(self.control_texts, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, sorted_texts)) or r"(?!)")
        self._encode_cached = lru_cache(maxsize=4096)(self._encode)
        # Mostly for names of tools and arguments.
        self.may_form_control_token = lru_cache(maxsize=512)(self._can_form_control)
        self._joined_controls = "\0".join(["", *self.control_texts, ""])
        self._control_words = {_extract_word(text) for text in self.control_texts} - {""}
        self._longest_control = max(map(len, self.control_texts), default=0)
        ids = self._encode(CANARY_TEXT)
        if self.decode(ids) != CANARY_TEXT and tokenizer.unk_token_id not in ids:
            raise ValueError(
                f"the tokenizer changes texts: {CANARY_TEXT!r} is decoded as {self.decode(ids)!r}. Check that its "
                "tokenizer.json fits the tokenizer_class in tokenizer_config.json and belongs to a language model"
            )

    def split_at_controls(self, text: str) -> list[str | ControlToken]:
        """Split a template's own text at its control tokens."""
        parts: list[str | ControlToken] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            parts += [text[end : match.start()], ControlToken(self.control_texts[match.group()])]
            end = match.end()
        return [part for part in [*parts, text[end:]] if part != ""]

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text without control tokens, whatever the text contains."""
        return list(self._encode_cached(text) if len(text) < 20_000 else self._encode(text))

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        # lone surrogates, which a model can write in JSON, cannot be encoded as UTF-8
        text = replace_surrogates(text)
        encoding = self._plain_tokenizer.encode(text, add_special_tokens=False)
        original_ids = self._original_ids
        ids = [original_ids.get(token, token) for token in encoding.ids] if original_ids else encoding.ids
        if self.control_ids.isdisjoint(ids):
            return ids
        # The vocabulary may also contain a control token as a normal entry, which half of its text cannot produce.
        control_index = next(index for index, token in enumerate(ids) if token in self.control_ids)
        start, end = encoding.offsets[control_index]
        if end - start < 2:
            return self._encode(text[:start]) + self._encode(text[end:])  # a single character is dropped
        middle_offset = (start + end) // 2
        return self._encode(text[:middle_offset]) + self._encode(text[middle_offset:])

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._get_token_bytes is not None:  # ten times as fast as the library
            return b"".join(map(self._get_token_bytes, token_ids)).decode("utf-8", errors="replace")
        return self._whole_tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _read_token_bytes(self, token_id: int) -> bytes:
        text = self._whole_tokenizer.id_to_token(token_id) or ""
        return bytes(map(_BYTE_MAP.__getitem__, text)) if _BYTE_MAP.keys() >= set(text) else text.encode()

    def decode_quoted(self, token_ids: Sequence[int], quote_text: Callable[[str], str]) -> str:
        """Decode a turn. `quote_text` replaces texts that look like control tokens but consist of normal tokens."""
        text = self.decode(token_ids)
        control_count = len(list(filter(self.control_ids.__contains__, token_ids)))
        if len(self._control_pattern.findall(text)) == control_count:
            return text
        runs = groupby(token_ids, self.control_ids.__contains__)
        parts = [(is_control, self.decode(list(run))) for is_control, run in runs]
        return "".join(
            part if is_control else self._control_pattern.sub(lambda match: quote_text(match.group()), part)
            for is_control, part in parts
        )

    def _can_form_control(self, text: str) -> bool:
        """Return whether the text contains a control token, begins with the word inside one, or could complete one
        together with the text around it."""
        text = text.strip()
        lengths, controls = range(1, min(len(text), self._longest_control) + 1), self._joined_controls
        return bool(text) and (
            _extract_word(text) in self._control_words
            or self._control_pattern.search(text) is not None
            or any("\0" + text[-end:] in controls or text[:end] + "\0" in controls for end in lengths)
        )

    def truncate(self, text: str, max_tokens: int) -> str:
        """Return the text if it fits into `max_tokens`, else its beginning and end with a marker between them."""
        text = replace_surrogates(text)
        # Tokens have a maximum length, so most of a huge text need not be encoded.
        max_chars = max_tokens * 40
        if len(text) > 2 * max_chars:
            head, tail = text[:max_chars], text[-max_chars:]
        else:
            if len(text.encode()) <= max_tokens or len(self.encode_plain(text)) <= max_tokens:
                return text
            head = tail = text
        marker = f"\n[... cut from {len(text)} characters ...]\n"
        max_excerpt_tokens = max_tokens - len(self.encode_plain(marker))
        if max_excerpt_tokens < 2:  # no room for a marker
            return self._cut_to_tokens(head, max_tokens, from_end=False)
        beginning = self._cut_to_tokens(head, max_excerpt_tokens - max_excerpt_tokens // 3, from_end=False)
        ending = self._cut_to_tokens(tail, max_excerpt_tokens // 3, from_end=True)
        return beginning + marker + ending

    def _cut_to_tokens(self, text: str, max_tokens: int, from_end: bool) -> str:
        """Return the longest beginning (or end) of the text that has at most `max_tokens` tokens."""
        offsets = self._plain_tokenizer.encode(text, add_special_tokens=False).offsets
        num_tokens = max(0, min(max_tokens, len(offsets)))
        while num_tokens > 0:
            excerpt = text[offsets[-num_tokens][0] :] if from_end else text[: offsets[num_tokens - 1][1]]
            excess_tokens = len(self.encode_plain(excerpt)) - max_tokens  # a token may end inside a character
            if excess_tokens <= 0:
                return excerpt
            num_tokens -= excess_tokens
        return ""


def _extract_word(text: str) -> str:
    return re.sub(r"^\W+|\W+$", "", text)


def _remove_prefix_space(component: Any) -> Any:
    """Remove the prefix space of a normalizer or pre-tokenizer, because pieces inside a text must not get one."""
    if isinstance(component, list):
        return [cleaned for child in component if (cleaned := _remove_prefix_space(child)) is not None]
    if not isinstance(component, dict):
        return component
    if component.get("type") == "Prepend":
        return None
    component = {key: _remove_prefix_space(value) for key, value in component.items()}
    if component.get("type") == "Metaspace":
        component["prepend_scheme"] = "never"
    if "add_prefix_space" in component:
        component["add_prefix_space"] = False
    return component


def cache_short_texts(function: Callable[[str], T]) -> Callable[[str], T]:
    """Cache the function's results for short texts."""
    cached_function = lru_cache(512)(function)
    return lambda text: (cached_function if len(text) <= MAX_SHORT_CHARS else function)(text)
