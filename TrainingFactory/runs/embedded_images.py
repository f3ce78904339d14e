"""Images of episodes, embedded in a single-file HTML page as small copies. Their number and size are limited."""

from __future__ import annotations

import base64

from markupsafe import Markup

from TrainingFactory.common.images import label, make_thumbnail, split_text
from TrainingFactory.common.texts import escape_control, pluralize
from TrainingFactory.types import Image, Message

MAX_IMAGES = 100
MAX_BYTES = 4 << 20
IMAGE_STYLE = "display: block; max-width: min(320px, 100%); height: auto"


class EmbeddedImages:
    """Embedder of the images of one HTML page, which replaces images beyond its limits by their labels."""

    def __init__(self, max_images: int = MAX_IMAGES, max_bytes: int = MAX_BYTES) -> None:
        self._images_left, self._bytes_left = max_images, max_bytes
        self.num_omitted = 0

    def render(self, content: str | Message) -> Markup:
        """Return a text, or the texts and images of a message, as HTML."""
        if isinstance(content, Message):
            segments = split_text(content.content, content.images)
        else:
            segments = [content] if content else []
        return Markup().join(
            self._embed_image(segment) if isinstance(segment, Image) else escape_control(segment)
            for segment in segments or ["(no text)"]
        )

    @property
    def note(self) -> str:
        """Return a note with the number of omitted images; empty if there are none."""
        if not self.num_omitted:
            return ""
        return (
            f"{pluralize(self.num_omitted, 'image')} left out: a page has at most {MAX_IMAGES} images and "
            f"{MAX_BYTES >> 20} MiB of them. `tfactory ui` shows all"
        )

    def _embed_image(self, image: Image) -> Markup | str:
        try:
            jpeg = make_thumbnail(image)
        except ValueError as error:  # the file of the run is missing or damaged
            return f"{label(image)} ({error})"
        if not self._images_left or len(jpeg) > self._bytes_left:
            self.num_omitted += 1
            return f"{label(image)} (left out)"
        self._images_left -= 1
        self._bytes_left -= len(jpeg)
        return Markup('<img src="data:image/jpeg;base64,{}" alt="{}" title="{}" style="{}"/>').format(
            base64.b64encode(jpeg).decode(), label(image), label(image), IMAGE_STYLE
        )
