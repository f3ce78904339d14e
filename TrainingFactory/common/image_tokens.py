"""Image tokens as virtual ids: every token of an image has an id of its own, at `VIRTUAL` or above.

A process numbers the images it sees. An image of `count` tokens has `count` consecutive ids, so that an id identifies
both the image and the row of the vision tower's output. Two positions hold equal ids exactly if they show the same part
of the same picture: code that compares tokens (shared prefixes, prefix trees, episode checks) needs no special case for
images. Numbers differ between processes. The ids of the model's own placeholder appear only in `models/vision`, which
feeds the model; on disk an image token is negative (`to_disk_ids`, `from_disk_ids`).
"""

from __future__ import annotations

import tempfile
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

from TrainingFactory.common.images import ImageStore, LazyImage
from TrainingFactory.types import Image

VIRTUAL = 1 << 30  # above every vocabulary; ids fit into 32 bits
MAX_IMAGE_TOKENS = VIRTUAL - 1
MAX_MEMORY_BYTES = 1 << 30  # of pictures in memory; older ones are in a temporary folder


@dataclass(slots=True, frozen=True)
class ImageTokens:
    """An image and its token ids, first_id ... first_id + num_tokens - 1."""

    image: Image
    first_id: int
    num_tokens: int

    @property
    def ids(self) -> list[int]:
        return list(range(self.first_id, self.first_id + self.num_tokens))


class StoredImage(NamedTuple):
    """An image to which token ids on disk refer: its digest and its number of tokens."""

    digest: str
    num_tokens: int


class _ImageIds:
    """Assigns virtual token ids to the images that this process has seen, and finds images by id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens_by_digest: dict[tuple[str, int], ImageTokens] = {}
        self._first_ids: list[int] = []
        self._images: list[ImageTokens] = []
        self._next_id = VIRTUAL
        self._memory_keys: deque[tuple[str, int]] = deque()  # keys of the images whose pictures are in memory
        self._memory_bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, image: Image, num_tokens: int) -> ImageTokens:
        with self._lock:
            tokens = self._tokens_by_digest.get((image.digest, num_tokens))
            if tokens is None:
                if self._next_id + num_tokens > VIRTUAL + MAX_IMAGE_TOKENS:
                    raise ValueError(
                        "this process has seen a billion image tokens, and has no ids left for further images. "
                        "Resume the run: a new process numbers them anew"
                    )
                tokens = ImageTokens(image, self._next_id, num_tokens)
                self._next_id += num_tokens
                self._tokens_by_digest[image.digest, num_tokens] = tokens
                self._images.append(tokens)
                self._first_ids.append(tokens.first_id)
                if not isinstance(image, LazyImage):
                    self._keep_in_memory(image, num_tokens)
            return tokens

    def _keep_in_memory(self, image: Image, num_tokens: int) -> None:
        self._memory_keys.append((image.digest, num_tokens))
        self._memory_bytes += len(image.data)
        while self._memory_bytes > MAX_MEMORY_BYTES and len(self._memory_keys) > 1:
            key = self._memory_keys.popleft()
            tokens = self._tokens_by_digest[key]
            self._memory_bytes -= len(tokens.image.data)
            self._open_store().add(tokens.image)
            tokens = replace(tokens, image=replace(tokens.image, data=b""))
            index = bisect_right(self._first_ids, tokens.first_id) - 1
            self._tokens_by_digest[key] = self._images[index] = tokens

    def _open_store(self) -> ImageStore:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tfactory-images-")
        return ImageStore(Path(self._folder.name))

    def load_picture(self, tokens: ImageTokens) -> Image:
        with self._lock:
            is_available = isinstance(tokens.image, LazyImage) or tokens.image.data
            return tokens.image if is_available else self._open_store().read(tokens.image.digest)

    def __bool__(self) -> bool:
        """Return whether this process has seen an image."""
        return bool(self._images)

    def find(self, token: int) -> ImageTokens:
        index = bisect_right(self._first_ids, token) - 1
        if index < 0 or token >= self._images[index].first_id + self._images[index].num_tokens:
            raise ValueError(f"token id {token} belongs to no image of this process")
        return self._images[index]


_image_ids = _ImageIds()


def number_image(image: Image, num_tokens: int) -> ImageTokens:
    """Return the token ids of an image; equal images with equal token counts get the same ids."""
    return _image_ids.add(image, num_tokens)


def find_image(token: int) -> ImageTokens:
    """Return the image that a token id belongs to. Raise ValueError if there is none."""
    return _image_ids.find(token)


def load_picture(tokens: ImageTokens) -> Image:
    """Return the image with its pixels, read from disk if this process dropped them from memory."""
    return _image_ids.load_picture(tokens)


def find_images(ids: Iterable[int]) -> list[ImageTokens]:
    """Return the distinct images in a row of ids, in the order of their first tokens."""
    images = (find_image(token) for token in ids if token >= VIRTUAL)
    return list({tokens.first_id: tokens for tokens in images}.values())


def has_images(ids: Sequence[int]) -> bool:
    return bool(ids) and max(ids) >= VIRTUAL


def to_disk_ids(ids: Sequence[int]) -> tuple[list[int], list[StoredImage]]:
    """Return ids that another process can read, and their images. Every token of image i has the id -1 - i."""
    if not _image_ids or not has_images(ids):  # a process that has seen no image searches for none
        return list(ids), []
    images = find_images(ids)
    indices = {tokens.first_id: index for index, tokens in enumerate(images)}
    disk_ids = [token if token < VIRTUAL else -1 - indices[find_image(token).first_id] for token in ids]
    return disk_ids, [StoredImage(tokens.image.digest, tokens.num_tokens) for tokens in images]


def from_disk_ids(ids: Sequence[int], images: Sequence[tuple[Image, int]]) -> list[int]:
    """Convert ids from `to_disk_ids` to ids of this process. `images` are the images that `to_disk_ids` returned, in
    the same order, with their pictures and token counts. Raise ValueError if the tokens of an image are incomplete."""
    if not images:
        return list(ids)
    id_ranges = [number_image(image, count) for image, count in images]
    process_ids: list[int] = []
    num_shown_tokens = [0] * len(id_ranges)  # tokens of each image so far
    for token in ids:
        if token >= 0:
            process_ids.append(token)
            continue
        index = -1 - token
        if index >= len(id_ranges):
            raise ValueError(f"token id {token} names image {index}, but the row has {len(id_ranges)} images")
        tokens = id_ranges[index]
        process_ids.append(tokens.first_id + num_shown_tokens[index] % tokens.num_tokens)
        num_shown_tokens[index] += 1
    for tokens, count in zip(id_ranges, num_shown_tokens, strict=True):
        if count % tokens.num_tokens:
            raise ValueError(
                f"image {tokens.image.digest[:12]} has {tokens.num_tokens} tokens, but the row shows {count} of them"
            )
    return process_ids


def find_image_end(ids: Any, start: int, end: int) -> int:
    """Return the end of a slice of ids from `start` that cuts no image: `end`, or the start of the image there. If that
    image starts at `start`, return its end."""
    last_id = int(ids[end - 1])
    if last_id < VIRTUAL or end == len(ids):
        return end
    tokens = find_image(last_id)
    offset = last_id - tokens.first_id
    if offset == tokens.num_tokens - 1:
        return end
    image_start = end - 1 - offset
    return image_start if image_start > start else image_start + tokens.num_tokens


def renumber_images(rows: Sequence[list[int]]) -> list[list[int]]:
    """Return the rows with images renumbered by digest, so that they sort equally in every process."""
    if not any(has_images(row) for row in rows):
        return list(rows)
    images = sorted(
        find_images(chain.from_iterable(rows)), key=lambda tokens: (tokens.image.digest, tokens.num_tokens)
    )
    starts = accumulate((tokens.num_tokens for tokens in images), initial=VIRTUAL)
    shifts = {tokens.first_id: start - tokens.first_id for tokens, start in zip(images, starts, strict=False)}
    return [
        [token if token < VIRTUAL else token + shifts[find_image(token).first_id] for token in row]
        for row in rows
    ]
