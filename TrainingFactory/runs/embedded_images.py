"""Images of episodes, embedded in a single-file HTML page as small copies. Their number and size are limited."""

from __future__ import annotations

import base64

from markupsafe import Markup

from TrainingFactory.common.images import label, split_text, thumbnail
from TrainingFactory.common.texts import escape_control, pluralize
from TrainingFactory.types import Image, Message

MAX_IMAGES = 100
MAX_BYTES = 4 << 20
STYLE = "display: block; max-width: min(320px, 100%); height: auto"


class EmbeddedImages:
    """Embeds the images of one HTML page. An image beyond the limits is counted and replaced by its label."""

    def __init__(self, max_images: int = MAX_IMAGES, max_bytes: int = MAX_BYTES) -> None:
        self._images, self._bytes = max_images, max_bytes
        self.left_out = 0

    def shown(self, content: str | Message) -> Markup:
        """Return a text, or the texts and images of a message, as HTML."""
        if isinstance(content, Message):
            pieces = split_text(content.content, content.images)
        else:
            pieces = [content] if content else []
        return Markup().join(
            self._embed(piece) if isinstance(piece, Image) else escape_control(piece)
            for piece in pieces or ["(no text)"]
        )

    @property
    def note(self) -> str:
        """Return how many images the page leaves out; empty if none."""
        if not self.left_out:
            return ""
        return (
            f"{pluralize(self.left_out, 'image')} left out: a page has at most {MAX_IMAGES} images and "
            f"{MAX_BYTES >> 20} MiB of them. `tfactory ui` shows all"
        )

    def _embed(self, image: Image) -> Markup | str:
        try:
            data = thumbnail(image)
        except ValueError as error:  # the file of the run is missing or damaged
            return f"{label(image)} ({error})"
        if not self._images or len(data) > self._bytes:
            self.left_out += 1
            return f"{label(image)} (left out)"
        self._images -= 1
        self._bytes -= len(data)
        return Markup('<img src="data:image/jpeg;base64,{}" alt="{}" title="{}" style="{}"/>').format(
            base64.b64encode(data).decode(), label(image), label(image), STYLE
        )
