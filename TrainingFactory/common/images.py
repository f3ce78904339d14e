"""Images from files of users and tools: bounded in bytes and pixels, decoded once, and stored by digest."""

from __future__ import annotations

import hashlib
import io
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from TrainingFactory.types import Image

FORMATS = ("PNG", "JPEG", "WEBP")


@dataclass(slots=True, frozen=True)
class ImageLimits:
    max_bytes: int = 10_000_000
    max_pixels: int = 20_000_000
    max_per_turn: int = 8


LIMITS = ImageLimits()


def read_image(data: bytes, limits: ImageLimits = LIMITS) -> Image:
    """Decode a PNG, JPEG or WebP file. Raises ValueError if it is another format, damaged, animated or too large."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    if len(data) > limits.max_bytes:
        raise ValueError(f"the image has {len(data):,} bytes; at most {limits.max_bytes:,} are allowed")
    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > limits.max_pixels:  # known from the header, before pixels are decoded
                raise ValueError(
                    f"the image has {width} x {height} pixels; at most {limits.max_pixels:,} are allowed"
                )
            if getattr(opened, "n_frames", 1) != 1:
                raise ValueError("the image is animated; only still images are supported")
            return image_from_pillow(ImageOps.exif_transpose(opened))
    except Pillow.UnidentifiedImageError:
        raise ValueError("the data is not an image in PNG, JPEG or WebP format") from None
    except (
        OSError,
        SyntaxError,
        Pillow.DecompressionBombError,
    ) as error:  # Pillow's errors for damaged files
        raise ValueError(f"the image is damaged: {error}") from None


def image_from_pillow(picture: Any) -> Image:
    """Return a PIL image as an `Image`. Transparent pixels become white."""
    from PIL import Image as Pillow

    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Pillow.new("RGBA", picture.size, "white")
        picture = Pillow.alpha_composite(white, picture)
    picture = picture.convert("RGB")
    width, height = picture.size
    digest = hashlib.sha256(f"{width}x{height}:".encode() + picture.tobytes()).hexdigest()
    file = io.BytesIO()
    # A new image has none of the file's metadata.
    Pillow.frombytes("RGB", picture.size, picture.tobytes()).save(file, "PNG")
    return Image(digest, width, height, file.getvalue())


class ImageStore:
    """A folder of images: `ab/<digest>.png`, each written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ValueError(f"{digest[:80]!r} is not the digest of an image")
        return self.folder / digest[:2] / f"{digest}.png"

    def add(self, image: Image) -> None:
        path = self.path(image.digest)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may write the same image: each writes a file of its own and moves it into place.
        partial = path.with_name(f".{uuid.uuid4().hex}.part")
        partial.write_bytes(image.data)
        os.replace(partial, path)

    def read(self, digest: str) -> Image:
        """Return a stored image. Raises ValueError if it is missing or its pixels have another digest."""
        path = self.path(digest)
        try:
            image = read_image(path.read_bytes(), ImageLimits(max_bytes=2**31))
        except OSError as error:
            raise ValueError(f"image {digest} cannot be read from {path}: {error.strerror}") from None
        if image.digest != digest:
            raise ValueError(f"{path} is damaged: its pixels have another digest")
        return image
