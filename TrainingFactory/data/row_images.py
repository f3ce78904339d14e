"""Images of dataset rows, in the columns "image" and "images" or inside messages, as parts of the messages.

A row says in three ways where the images of its columns are shown: parts {"type": "image"} in its messages (TRL), the
text <image> (ms-swift, verl), or not at all; then they precede the text of the first user message."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.common.image_parts import decode_image_part, decode_image_url, is_image_part
from TrainingFactory.common.images import LIMITS, LazyImage, as_image, is_image, read_image, read_image_file
from TrainingFactory.data.datasets import DatasetRow
from TrainingFactory.types import Image

IMAGE_COLUMNS = ("images", "image")
TAG = "<image>"
IMAGE_PLACEHOLDER = {"type": "image"}
DOWNLOAD_TIMEOUT_SECONDS = 20.0
MESSAGE_COLUMNS = (
    "prompt", "messages", "conversations", "completion", "chosen", "rejected", "rejected_messages",
)  # fmt: skip


def with_images(columns: Mapping[str, Any], row: DatasetRow, image_urls: bool = False) -> Mapping[str, Any]:
    """Return a row's columns with its images decoded inside its messages. `image_urls`: download images."""
    column = next((name for name in IMAGE_COLUMNS if columns.get(name) not in (None, "", [])), None)
    conversations = {name: columns[name] for name in MESSAGE_COLUMNS if name in columns}
    if column is None and not any(map(_has_image_parts, conversations.values())):
        return {name: value for name, value in columns.items() if name not in IMAGE_COLUMNS}
    reader = _ImageReader(row.folder, image_urls)
    images = [] if column is None else reader.read_column(columns[column], column)
    if images and isinstance(columns.get("prompt"), str):
        conversations["prompt"] = [{"role": "user", "content": columns["prompt"]}]
    if images and not any(map(_has_image_parts, conversations.values())):
        conversations = {name: _replace_tags(value) for name, value in conversations.items()}
    if images and not any(map(_count_placeholders, conversations.values())):
        names = ["prompt"] if "prompt" in conversations else list(conversations)
        conversations |= {name: _add_placeholders(conversations[name], len(images)) for name in names}
    # Other columns continue the prompt, unless they repeat it.
    num_prompt, num_shown = _count_placeholders(conversations.get("prompt")), 0
    for name, value in conversations.items():
        start = 0 if name == "prompt" or num_prompt + _count_placeholders(value) > len(images) else num_prompt
        num_shown = max(num_shown, start + _count_placeholders(value))
        if num_shown <= len(images):
            conversations[name] = reader.fill_placeholders(value, iter(images[start:]), name)
    if num_shown != len(images):
        raise ValueError(
            f'has {len(images)} images in "{column or "images"}", but its messages show {num_shown}: use one {TAG}, or '
            'one part {"type": "image"}, for each'
        )
    return {name: value for name, value in columns.items() if name not in IMAGE_COLUMNS} | conversations


class _ImageReader:
    """Reader of a row's images. Relative paths begin at `folder`; None: the row is from no local file."""

    def __init__(self, folder: Path | None, allows_urls: bool) -> None:
        self._folder, self._allows_urls = folder, allows_urls

    def read_column(self, values: Any, column: str) -> list[Image]:
        images = []
        for index, value in enumerate(values if isinstance(values, list | tuple) else [values]):
            try:
                images.append(self._read_image(value))
            except ValueError as error:
                raise ValueError(
                    f'has an invalid image {index} in "{column}": {error}. Repair or remove it, or rename the column '
                    "if it holds no images"
                ) from error
        return images

    def _read_image(self, image: Any) -> Image:
        if isinstance(image, Mapping):  # Hugging Face's {"bytes", "path"}, of which one may be missing
            image = image.get("bytes") or image.get("path") or image.get("url")
        if is_image(image):
            return as_image(image)
        if isinstance(image, bytes):
            return read_image(image)
        if not isinstance(image, str):
            raise ValueError(f"it must be bytes, a path, a data: URL or a PIL image, not {str(image)[:40]!r}")
        if image.startswith("data:"):
            return decode_image_url(image)
        if image.startswith(("http://", "https://")):
            return self._download_image(image)
        return self._read_file(image.removeprefix("file://"))

    def _read_file(self, file_name: str) -> Image:
        path = Path(file_name).expanduser()
        if self._folder is None and not path.is_absolute():
            raise ValueError(f"{file_name[:80]!r} is a relative path, but the dataset is no local file")
        path = path if self._folder is None else self._folder / path
        image = read_image_file(path)  # its pixels are checked now, and read again when they are needed
        return LazyImage(image.digest, image.width, image.height, path.absolute())

    def _download_image(self, url: str) -> Image:
        if not self._allows_urls:
            raise ValueError(f"{url[:80]} is an address; set data.image_urls=true to download such images")
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as response:
                return read_image(response.read(LIMITS.max_bytes + 1))
        except (OSError, urllib.error.URLError) as error:
            raise ValueError(f"cannot download {url[:80]}: {error}") from None

    def fill_placeholders(self, conversation: Any, images: Iterator[Image], column: str) -> Any:
        """Decode the image parts of a conversation, and replace each placeholder with the next image of `images`."""
        if not isinstance(conversation, list):
            return conversation
        return [
            self._fill_message(message, images, f'message {index} of "{column}"')
            for index, message in enumerate(conversation)
        ]

    def _fill_message(self, message: Any, images: Iterator[Image], location: str) -> Any:
        key = _find_content_key(message)
        if key is None or not isinstance(message[key], list):
            return message
        parts = [self._fill_part(part, images, location) for part in message[key]]
        if sum(map(is_image_part, parts)) > LIMITS.max_per_turn:
            raise ValueError(f"has more than {LIMITS.max_per_turn} images in {location}")
        return message | {key: parts}

    def _fill_part(self, part: Any, images: Iterator[Image], location: str) -> Any:
        if _is_placeholder(part):
            return {"type": "image", "image": next(images)}
        if not is_image_part(part):
            return part
        try:
            url = part.get("image_url", part.get("url"))
            image = part.get("image", url.get("url") if isinstance(url, Mapping) else url)
            return {
                "type": "image",
                "image": decode_image_part(part) if image is None else self._read_image(image),
            }
        except ValueError as error:
            raise ValueError(f"has an invalid image in {location}: {error}") from error


def _find_content_key(message: Any) -> str | None:
    """Return the key of a message's content: OpenAI's or ShareGPT's."""
    return next(
        (key for key in ("content", "value") if isinstance(message, Mapping) and key in message), None
    )


def _iterate_parts(conversation: Any) -> Iterator[Any]:
    """Yield the content parts of all messages in a conversation."""
    for message in conversation if isinstance(conversation, list) else ():
        if (key := _find_content_key(message)) is not None and isinstance(message[key], list):
            yield from message[key]


def _has_image_parts(conversation: Any) -> bool:
    return any(map(is_image_part, _iterate_parts(conversation)))


def _is_placeholder(part: Any) -> bool:
    return is_image_part(part) and not any(part.get(key) is not None for key in part if key != "type")


def _count_placeholders(conversation: Any) -> int:
    return sum(map(_is_placeholder, _iterate_parts(conversation)))


def _replace_tags(conversation: Any) -> Any:
    """Replace the tags <image> in a conversation's texts with placeholders."""
    if not isinstance(conversation, list):
        return conversation
    return [_split_content(message) for message in conversation]


def _split_content(message: Any) -> Any:
    key = _find_content_key(message)
    if key is None or not isinstance(message[key], str) or TAG not in message[key]:
        return message
    segments = message[key].split(TAG)
    parts: list[dict[str, Any]] = [{"type": "text", "text": segments[0]}]
    for segment in segments[1:]:
        parts += [IMAGE_PLACEHOLDER, {"type": "text", "text": segment}]
    return message | {key: parts}


def _add_placeholders(conversation: Any, num_placeholders: int) -> Any:
    """Insert `num_placeholders` placeholders at the beginning of a conversation's first user message."""
    for index, message in enumerate(conversation if isinstance(conversation, list) else ()):
        if (key := _find_content_key(message)) and message.get("role", message.get("from")) in (
            "user",
            "human",
        ):
            content = message[key]
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            new_message = message | {key: [*[IMAGE_PLACEHOLDER] * num_placeholders, *parts]}
            return [*conversation[:index], new_message, *conversation[index + 1 :]]
    return conversation
