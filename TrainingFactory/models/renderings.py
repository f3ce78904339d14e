"""Encoding of what a chat template renders: split once into pieces, then filled with the texts and images of each
conversation that has the same pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from TrainingFactory.models.encoding import Control, TextEncoder, cache_short_texts
from TrainingFactory.models.message_images import IMAGE, ImagePlaces, check_all_shown
from TrainingFactory.models.outlines import Texts
from TrainingFactory.models.templates import Marks
from TrainingFactory.types import Image

# A rendering, split: tuples of finished token ids, and lists to be encoded of template texts (str) and marks (int).
# The place of an image is a tuple of its own, so that finished ids need no search for it.
Pieces = list[tuple[int, ...] | list[str | int]]
IMAGE_PLACE = (IMAGE,)
Key = str | tuple[Any, ...]
MAX_CACHED = 512  # renderings
MAX_KEY = 50_000  # characters; renderings with longer cache keys are not cached


class RenderingEncoder:
    def __init__(self, encoder: TextEncoder, marks: Marks, places: ImagePlaces) -> None:
        self._encoder, self._marks, self._places = encoder, marks, places
        self._cache: dict[Key, Pieces] = {}
        # turns of a dataset have different texts but few different outlines
        self.split_turn = cache_short_texts(self.split)

    def cached(self, key: Key) -> Pieces | None:
        return self._cache.get(key)

    def split_and_cache(self, key: Key, text: str) -> Pieces:
        pieces = self.split(text)
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        if len(key) <= MAX_KEY:
            self._cache[key] = pieces
        return pieces

    def split(self, text: str) -> Pieces:
        """Split a rendering at its control tokens; the text between two of them is encoded as one string."""
        parts, pieces = list[Any](), Pieces()
        for part in self._marks.split(text):
            parts += [part] if isinstance(part, int) else self._places.split(part)
        for kind, group in groupby(parts, _kind_of):
            run = list(group)
            if kind == "image":
                pieces += [IMAGE_PLACE] * len(run)
            elif kind == "control":
                pieces.append(tuple(part.token for part in run))
            else:
                if any(isinstance(part, str) and self._marks.is_damaged(part) for part in run):
                    raise ValueError(
                        "the chat template cuts or rewrites a name or text of a tool or call, so its tokens cannot be "
                        "attributed; set model.chat_template to a template that prints it unchanged"
                    )
                has_no_marks = all(isinstance(part, str) for part in run)
                pieces.append(tuple(self._encoder.plain("".join(run))) if has_no_marks else run)
        return pieces

    def fill(self, pieces: Pieces, texts: Texts, images: Sequence[Image] = ()) -> list[int]:
        """Return the token ids of a rendering with these texts in place of its marks, and these images."""
        ids: list[int] = []
        remaining_images = iter(images)
        for piece in pieces:
            if not isinstance(piece, tuple):
                run = [texts[part] if isinstance(part, int) else part for part in piece]
                ids += self._encoder.plain("".join(run))
            elif piece == IMAGE_PLACE:
                ids += self._places.encode_next(remaining_images)
            else:
                ids += piece
        check_all_shown(remaining_images)
        return ids


def _kind_of(part: str | int | Control) -> str:
    if not isinstance(part, Control):
        return "text"
    return "image" if part.token == IMAGE else "control"
