"""Images as parts of a message's content, in the forms of OpenAI, Anthropic, Gemini, MCP and Hugging Face."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any

from TrainingFactory.common.images import LIMITS, as_image, is_image, join_pieces, read_image, split_text
from TrainingFactory.types import Image, Message, PlacedImage

MEDIA_TYPE = "image/png"  # of the images that we send
DATA_URL_PATTERN = re.compile(r"data:[\w.+/-]*(;[\w=.+-]+)*;base64,", re.ASCII)


def read_parts(content: Any) -> tuple[str, list[PlacedImage]]:
    """Return the text and inline images of a message's content: a string, a part, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or "", []
    parts = content if isinstance(content, list) else [content]
    return join_pieces(_read_part(part) for part in parts)


def _read_part(part: Any) -> str | Image:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"a part of a content must be an object, not {str(part)[:60]}")
    if is_image_part(part):
        return decode_image_part(part)
    if isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError(f"only text and images are supported, not {str(part)[:60]}")


def is_image_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    if part.get("type") in ("image", "image_url", "input_image"):
        return True
    inline_data = part.get("inlineData", part.get("inline_data"))
    return isinstance(inline_data, Mapping)


def decode_image_part(part: Mapping[str, Any]) -> Image:
    """Return the image in an image part. Raise ValueError if its data is not inline or is no valid image."""
    inline_data = part.get("inlineData", part.get("inline_data"))
    url = part.get("image_url", part.get("url"))
    source = part.get("source")
    image = part.get("image")
    if isinstance(inline_data, Mapping):
        return decode_image(inline_data.get("data"))
    if isinstance(source, Mapping) and source.get("type", "base64") == "base64":
        return decode_image(source.get("data"))
    if isinstance(source, Mapping):
        raise ValueError(f"its image has the source {source.get('type')!r:.40}; send the data as base64")
    if url is not None:
        return decode_image_url(url.get("url") if isinstance(url, Mapping) else url)
    if isinstance(part.get("data"), str):
        return decode_image(part["data"])
    if isinstance(image, str):
        return decode_image_url(image)
    if is_image(image):
        return as_image(image)
    raise ValueError("an image part has no image; put its data into the part, or the image into a column")


def decode_image_url(url: Any) -> Image:
    """Decode the image in a data: URL."""
    if isinstance(url, str) and (match := DATA_URL_PATTERN.match(url[:200])):
        return decode_image(url[match.end() :])
    raise ValueError(f"only data: URLs with base64 are read, not {str(url)[:60]!r}")


def decode_image(encoded: Any) -> Image:
    if not isinstance(encoded, str):
        raise ValueError(f"the data of an image must be base64 text, not {str(encoded)[:40]!r}")
    if len(encoded) * 3 // 4 > LIMITS.max_bytes + 3:
        raise ValueError(f"the image has more than {LIMITS.max_bytes:,} bytes")
    try:
        image_bytes = base64.b64decode(encoded.translate(_URL_SAFE), validate=True)
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"the data of an image is not valid base64: {error}") from None
    return read_image(image_bytes)


_URL_SAFE = {ord("-"): "+", ord("_"): "/", ord("\n"): None, ord("\r"): None}  # Gemini sends URL-safe base64


def encode_image(image: Image) -> str:
    return base64.b64encode(image.data).decode()


def make_data_url(image: Image) -> str:
    return f"data:{MEDIA_TYPE};base64,{encode_image(image)}"


def split_message(message: Message) -> Iterable[str | Image]:
    return split_text(message.content, message.images)


def make_openai_content(message: Message) -> str | list[dict[str, Any]]:
    """Return the content for OpenAI's chat completions: a string, or a list of parts if it has images."""
    if not message.images:
        return message.content
    return [
        {"type": "text", "text": piece}
        if isinstance(piece, str)
        else {"type": "image_url", "image_url": {"url": make_data_url(piece)}}
        for piece in split_message(message)
    ]


def make_anthropic_blocks(message: Message) -> list[dict[str, Any]]:
    """Return a message's texts and images as Anthropic's blocks."""
    blocks: list[dict[str, Any]] = []
    for piece in split_message(message):
        if isinstance(piece, str):
            blocks.append({"type": "text", "text": piece})
        else:
            image_source = {"type": "base64", "media_type": MEDIA_TYPE, "data": encode_image(piece)}
            blocks.append({"type": "image", "source": image_source})
    return blocks


def make_gemini_parts(message: Message) -> list[dict[str, Any]]:
    """Return a message's texts and images as Gemini's parts."""
    return [
        {"text": piece} if isinstance(piece, str) else {"inlineData": make_gemini_blob(piece)}
        for piece in split_message(message)
    ]


def make_gemini_blob(image: Image) -> dict[str, str]:
    return {"mimeType": MEDIA_TYPE, "data": encode_image(image)}
