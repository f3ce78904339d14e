"""Images from files of users and tools: bounded in bytes and pixels, decoded once, and stored by digest."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from TrainingFactory.common.texts import describe
from TrainingFactory.types import Image, PlacedImage

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
# The first bytes of image files, those of rejected formats included: their error names the reason.
MAGIC_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"<svg", b"<?xml")
IMAGES_FOLDER = "images"  # beside the file that names the digests


@dataclass(slots=True, frozen=True)
class ImageLimits:
    max_bytes: int = 10_000_000
    max_pixels: int = 20_000_000
    max_per_turn: int = 8


LIMITS = ImageLimits()


def read_image(encoded: bytes, limits: ImageLimits = LIMITS) -> Image:
    """Decode a PNG, JPEG or WebP file. Raises ValueError if it is another format, damaged, animated or too large."""
    from PIL import Image as Pillow

    if len(encoded) > limits.max_bytes:
        raise ValueError(f"the image has {len(encoded):,} bytes; at most {limits.max_bytes:,} are allowed")
    try:
        with Pillow.open(io.BytesIO(encoded), formats=IMAGE_FORMATS) as picture:
            return image_from_pillow(picture, limits)
    except Pillow.UnidentifiedImageError:
        raise ValueError("the data is not a valid image in PNG, JPEG or WebP format") from None
    except Pillow.DecompressionBombError:
        raise ValueError(
            f"the image has too many pixels; at most {limits.max_pixels:,} are allowed"
        ) from None
    except ValueError:
        raise
    except Exception as error:  # the decoders raise errors of many types for damaged files
        raise ValueError(f"the image is damaged: {describe(error)}") from None


def read_image_file(path: Path) -> Image:
    try:
        with path.open("rb") as file:
            return read_image(file.read(LIMITS.max_bytes + 1))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None


def image_from_pillow(picture: Any, limits: ImageLimits = LIMITS) -> Image:
    """Return a PIL image as an `Image`, turned upright. Transparent pixels become white."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    width, height = picture.size
    if width * height > limits.max_pixels:  # known from the header, before pixels are decoded
        raise ValueError(
            f"the image has {width} x {height} pixels; at most {limits.max_pixels:,} are allowed"
        )
    if not width or not height:
        raise ValueError(f"the image is empty: {width} x {height} pixels")
    if getattr(picture, "n_frames", 1) != 1:
        raise ValueError("the image is animated; only still images are supported")
    picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        background = Pillow.new("RGBA", picture.size, "white")
        picture = Pillow.alpha_composite(background, picture)
    picture = picture.convert("RGB")
    width, height = picture.size
    pixels = picture.tobytes()
    digest = hashlib.sha256(f"{width}x{height}:".encode() + pixels).hexdigest()
    buffer = io.BytesIO()
    Pillow.frombytes("RGB", picture.size, pixels).save(buffer, "PNG")  # a new image has no metadata
    return Image(digest, width, height, buffer.getvalue())


def is_image(value: Any) -> bool:
    """Return whether a value is an `Image`, a PIL image, or the bytes of an image file."""
    if isinstance(value, bytes | bytearray):
        return bytes(value[:8]).lstrip().startswith(MAGIC_BYTES)
    return isinstance(value, Image) or _is_pillow(value)


def _is_pillow(value: Any) -> bool:
    return any(cls.__module__ == "PIL.Image" and cls.__name__ == "Image" for cls in type(value).__mro__)


def as_image(value: Any) -> Image:
    """Convert a value that `is_image` accepts. Raises ValueError as `read_image` does."""
    if isinstance(value, Image):
        return value
    return image_from_pillow(value) if _is_pillow(value) else read_image(bytes(value))


def make_thumbnail(image: Image, max_edge: int = 320) -> bytes:
    """Return a JPEG file of the image, with at most `max_edge` pixels along an edge."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(image.data), formats=("PNG",)) as picture:
        picture.thumbnail((max_edge, max_edge))
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


# Texts with images


def placeholder(image: Image) -> str:
    """Return the placeholder text for an image where only text can be shown."""
    return f"[image {image.width}x{image.height}]"


def label(image: Image) -> str:
    """Return an image's label for people: its size and the first characters of its digest."""
    return f"[image {image.width}x{image.height} {image.digest[:8]}]"


def make_rejection_text(reason: object) -> str:
    """Return the text that replaces a rejected image in the model's prompt."""
    return f"[image not shown: {reason}]"


def split_text(content: str, images: Sequence[PlacedImage]) -> list[str | Image]:
    """Split a message's content at its images. Return the texts that are not empty and the images, in order."""
    if not images:
        return [content] if content else []
    pieces: list[str | Image] = []
    text_start = 0
    for place, image in images:
        pieces += [content[text_start:place], image]
        text_start = place
    return [piece for piece in [*pieces, content[text_start:]] if piece != ""]


def join_pieces(pieces: Iterable[str | Image], separator: str = "") -> tuple[str, list[PlacedImage]]:
    """Join texts and images into a message's content and its placed images. `separator` is put between two adjacent
    texts."""
    content, images = "", list[PlacedImage]()
    for piece in pieces:
        if isinstance(piece, Image):
            images.append(PlacedImage(len(content), piece))
        elif piece:
            content += f"{separator}{piece}" if content else piece
    return content, images


def as_text(
    content: str, images: Sequence[PlacedImage], make_note: Callable[[Image], str] = placeholder
) -> str:
    """Return a message's content as text alone, with a placeholder for each image."""
    if not images:
        return content
    return "".join(
        piece if isinstance(piece, str) else make_note(piece) for piece in split_text(content, images)
    )


def shift_images(images: Sequence[PlacedImage], old_text: str, new_text: str) -> list[PlacedImage]:
    """Return the images at their positions in `new_text`, to which truncation or the replacement of one part changed
    `old_text`."""
    if not images or old_text == new_text:
        return list(images)
    prefix = _count_equal(zip(old_text, new_text, strict=False))
    suffix = _count_equal(zip(reversed(old_text[prefix:]), reversed(new_text[prefix:]), strict=False))
    return [
        PlacedImage(
            place if place <= prefix else max(prefix, len(new_text) - min(suffix, len(old_text) - place)),
            image,
        )
        for place, image in images
    ]


def _count_equal(character_pairs: Iterable[tuple[str, str]]) -> int:
    """Return the number of leading pairs whose characters are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], character_pairs))


def map_text(
    content: str, images: Sequence[PlacedImage], transform: Callable[[str], str]
) -> tuple[str, list[PlacedImage]]:
    """Apply `transform` to each text between the images; return the content and its images."""
    if not images:
        return transform(content), []
    return join_pieces(
        piece if isinstance(piece, Image) else transform(piece) for piece in split_text(content, images)
    )


def limit_images(images: Sequence[PlacedImage], content: str, limit: int) -> tuple[str, list[PlacedImage]]:
    """Return a message's content and its first `limit` images. A text replaces each further image."""
    if len(images) <= limit:
        return content, list(images)
    note = make_rejection_text(f"at most {LIMITS.max_per_turn} images a turn")
    first_hidden_place = images[limit].place
    shown_pieces = split_text(content[:first_hidden_place], images[:limit])
    hidden_images = [PlacedImage(place - first_hidden_place, image) for place, image in images[limit:]]
    return join_pieces([*shown_pieces, as_text(content[first_hidden_place:], hidden_images, lambda _: note)])


# Storage


class LazyImage(Image):
    """Image whose `data` is read from disk at every access, to save memory."""

    __slots__ = ("_source",)

    def __init__(self, digest: str, width: int, height: int, source: ImageStore | Path) -> None:
        for name, value in (("digest", digest), ("width", width), ("height", height), ("_source", source)):
            object.__setattr__(self, name, value)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        if isinstance(self._source, ImageStore):
            return self._source.read(self.digest).data
        image = read_image_file(self._source)
        if image.digest != self.digest:
            raise ValueError(f"{self._source} has changed since it was read; restore it, or start again")
        return image.data

    def __repr__(self) -> str:
        """Return the same repr() as an equal `Image` in memory, because fingerprints hash it."""
        return f"Image(digest={self.digest!r}, width={self.width}, height={self.height})"

    def __reduce__(self) -> Any:
        return Image, (self.digest, self.width, self.height, self.data)


class ImageStore:
    """A folder of images: `ab/<digest>.png`, each written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def for_file(cls, file: Path) -> ImageStore:
        """Return the store in the folder of `file`, for the images that the file names by digest."""
        return cls(file.parent / IMAGES_FOLDER)

    def find_path(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ValueError(f"{digest[:80]!r} is not the digest of an image")
        return self.folder / digest[:2] / f"{digest}.png"

    def add(self, image: Image) -> None:
        path = self.find_path(image.digest)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may write the same image: each writes a file of its own and moves it into place.
        temporary_path = path.with_name(f".{uuid.uuid4().hex}.part")
        temporary_path.write_bytes(image.data)
        os.replace(temporary_path, path)

    def read(self, digest: str) -> Image:
        """Return a stored image. Raises ValueError if it is missing or its pixels have another digest."""
        path = self.find_path(digest)
        try:
            image = read_image(path.read_bytes(), ImageLimits(max_bytes=2**31))
        except OSError as error:
            raise ValueError(f"image {digest} cannot be read from {path}: {error.strerror}") from None
        if image.digest != digest:
            raise ValueError(f"{path} is damaged: its pixels have another digest")
        return image

    def remove_unused(self, used: set[str]) -> int:
        """Remove the images whose digests are not in `used`, and incomplete files. Return the number of removed
        files."""
        paths = [path for path in self.folder.glob("??/*") if path.stem not in used or path.suffix != ".png"]
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)


def images_to_rows(images: Sequence[PlacedImage], store: ImageStore | None) -> list[dict[str, Any]]:
    """Convert images to JSON. With a store, write their pixels to the store and keep only their digests; without one,
    include their data."""
    rows: list[dict[str, Any]] = []
    for place, image in images:
        row = {"place": place, "digest": image.digest, "width": image.width, "height": image.height}
        if store is None:
            row["data"] = base64.b64encode(image.data).decode()
        else:
            store.add(image)
        rows.append(row)
    return rows


def images_from_rows(rows: Iterable[Mapping[str, Any]], store: ImageStore | None) -> list[PlacedImage]:
    """Restore images from the JSON of `images_to_rows`. Images in a store are read only when their data is needed."""
    images: list[PlacedImage] = []
    for row in rows:
        digest, width, height = str(row["digest"]), int(row["width"]), int(row["height"])
        if "data" in row:
            image = Image(digest, width, height, base64.b64decode(row["data"]))
        elif store is None:
            raise ValueError(f"image {digest} is in no folder of images")
        else:
            store.find_path(digest)  # checks the digest
            image = LazyImage(digest, width, height, store)
        images.append(PlacedImage(int(row["place"]), image))
    return images
