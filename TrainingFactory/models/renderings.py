"""Encoding of what a chat template renders: split once into segments, then filled with the texts and images of each
conversation that has the same segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from TrainingFactory.models.encoding import ControlToken, TextEncoder, cache_short_texts
from TrainingFactory.models.message_images import IMAGE_PLACE, ImageLocator, check_all_images_shown
from TrainingFactory.models.outlines import Texts
from TrainingFactory.models.templates import Marks
from TrainingFactory.types import Image

# A rendering, split: tuples of finished token ids, and lists to be encoded of template texts (str) and marks (int).
# The place of an image is a tuple of its own, so that finished ids need no search for it.
Segments = list[tuple[int, ...] | list[str | int]]
IMAGE_SEGMENT = (IMAGE_PLACE,)
CacheKey = str | tuple[Any, ...]
MAX_CACHED_RENDERINGS = 512  # renderings
MAX_KEY_CHARS = 50_000  # characters; renderings with longer cache keys are not cached


class RenderingEncoder:
    def __init__(self, encoder: TextEncoder, marks: Marks, image_locator: ImageLocator) -> None:
        self._encoder, self._marks, self._locator = encoder, marks, image_locator
        self._cache: dict[CacheKey, Segments] = {}
        # turns of a dataset have different texts but few different outlines
        self.split_turn = cache_short_texts(self.split_rendering)

    def get_cached(self, key: CacheKey) -> Segments | None:
        return self._cache.get(key)

    def split_and_cache(self, key: CacheKey, text: str) -> Segments:
        segments = self.split_rendering(text)
        if len(self._cache) >= MAX_CACHED_RENDERINGS:
            self._cache.clear()
        if len(key) <= MAX_KEY_CHARS:
            self._cache[key] = segments
        return segments

    def split_rendering(self, text: str) -> Segments:
        """Split a rendering at its control tokens; the text between two of them is encoded as one string."""
        parts, segments = list[Any](), Segments()
        for part in self._marks.split_at_marks(text):
            parts += [part] if isinstance(part, int) else self._locator.split_at_images(part)
        for part_kind, group in groupby(parts, _get_part_kind):
            run = list(group)
            if part_kind == "image":
                segments += [IMAGE_SEGMENT] * len(run)
            elif part_kind == "control":
                segments.append(tuple(part.token for part in run))
            else:
                if any(isinstance(part, str) and self._marks.is_damaged(part) for part in run):
                    raise ValueError(
                        "the chat template cuts or rewrites a name or text of a tool or call, so its tokens cannot be "
                        "attributed; set model.chat_template to a template that prints it unchanged"
                    )
                has_no_marks = all(isinstance(part, str) for part in run)
                segments.append(tuple(self._encoder.encode_plain("".join(run))) if has_no_marks else run)
        return segments

    def fill_segments(self, segments: Segments, texts: Texts, images: Sequence[Image] = ()) -> list[int]:
        """Return the token ids of a rendering with these texts in place of its marks, and these images."""
        ids: list[int] = []
        remaining_images = iter(images)
        for segment in segments:
            if not isinstance(segment, tuple):
                run_texts = [texts[part] if isinstance(part, int) else part for part in segment]
                ids += self._encoder.encode_plain("".join(run_texts))
            elif segment == IMAGE_SEGMENT:
                ids += self._locator.encode_next(remaining_images)
            else:
                ids += segment
        check_all_images_shown(remaining_images)
        return ids


def _get_part_kind(part: str | int | ControlToken) -> str:
    if not isinstance(part, ControlToken):
        return "text"
    return "image" if part.token == IMAGE_PLACE else "control"
