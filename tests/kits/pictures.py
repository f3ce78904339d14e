"""Small images for tests, and files that are no valid images."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image as Pillow

from TrainingFactory.common.images import image_from_pillow
from TrainingFactory.types import Image

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def picture(color: tuple[int, int, int] = RED, size: tuple[int, int] = (8, 6)) -> Image:
    return image_from_pillow(Pillow.new("RGB", size, color))


def file_of(image: Any, form: str = "PNG", **options: Any) -> bytes:
    """Return the file of a PIL image."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def jpeg(color: tuple[int, int, int] = RED, size: tuple[int, int] = (8, 6), **options: Any) -> bytes:
    return file_of(Pillow.new("RGB", size, color), "JPEG", **options)


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """Return a PNG file of a few bytes whose header names a huge picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def animated(form: str) -> bytes:
    frames = [Pillow.new("RGB", (8, 8), color) for color in (RED, GREEN, BLUE)]
    return file_of(frames[0], form, save_all=True, append_images=frames[1:], duration=50)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"><rect width="8" height="8"/></svg>'
