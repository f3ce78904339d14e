"""Images of messages: encoding at the places where a chat template renders them, and workarounds for templates and
models that cannot show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby
from typing import TYPE_CHECKING

from TrainingFactory.common.image_tokens import VIRTUAL, find_image, has_images
from TrainingFactory.common.images import as_text, placeholder
from TrainingFactory.models.encoding import ControlToken, TextEncoder
from TrainingFactory.types import Image, Message, PlacedImage

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision

IMAGE_PLACE = -1  # the place of an image in a rendering
BLANK_IMAGE = Image("", 1, 1, b"")  # for probes, which render no pixels
IMAGES_NOTE = (
    "note: the chat template shows no images of tool results, so they are in a user message after the results"
)


class ImageLocator:
    """Locator of image placeholders in the renderings of a chat template. The same placeholder in a conversation's
    texts stays text, because only the template's own text is searched."""

    def __init__(self, vision: Vision | None, encoder: TextEncoder) -> None:
        self._vision, self._encoder = vision, encoder
        self._image_id = None if vision is None else encoder.control_texts[vision.placeholder]

    def split_at_images(self, text: str) -> list[str | ControlToken]:
        """Split a template's own text at its control tokens and image placeholders."""
        parts = self._encoder.split_at_controls(text)
        if self._vision is None:
            return parts
        parts_before, parts_after = (
            self._encoder.split_at_controls(part) for part in (self._vision.prefix, self._vision.suffix)
        )
        image_parts = [*parts_before, ControlToken(IMAGE_PLACE), *parts_after]
        return list(
            chain.from_iterable(image_parts if part == (self._image_id,) else [part] for part in parts)
        )

    def count_images(self, text: str) -> int:
        return self.split_at_images(text).count(ControlToken(IMAGE_PLACE))

    def require_image(self, render: Callable[[], str]) -> None:
        """Raise ValueError unless the rendering of a message with one image shows that image once."""
        shows_image = False
        with suppress(ValueError):
            shows_image = self.count_images(render()) == 1
        if not shows_image:
            raise ValueError(
                "the chat template renders no images, though the model sees them; set model.chat_template to a "
                "template that does, or model.vision=false"
            )

    def encode_next(self, images: Iterator[Image]) -> list[int]:
        """Return the tokens of the next image."""
        image = next(images, None)
        if image is None or self._vision is None:
            raise ValueError(
                "the chat template writes a place for an image that the conversation does not have; set "
                "model.chat_template to a corrected template"
            )
        return self._vision.get_image_ids(image)


def check_all_images_shown(remaining_images: Iterator[Image]) -> None:
    if next(remaining_images, None) is not None:
        raise ValueError(
            "the chat template drops an image of this conversation; set model.chat_template to a template that shows "
            "the images of all roles"
        )


def collect_images(messages: Sequence[Message]) -> list[Image]:
    return [image for message in messages for _, image in message.images]


def replace_images(message: Message) -> Message:
    """Return a tool result with a text in place of its images, for a model that sees none."""
    if message.role != "tool":
        raise ValueError(
            f"a {message.role} message has an image, but the model was loaded without vision; name a vision-language "
            "model and set model.vision=true"
        )
    return replace(message, content=as_text(message.content, message.images), images=[])


def join_results(messages: Sequence[Message]) -> list[Message]:
    """Join the tool results of each turn into one user message, for templates that render no tool messages."""
    joined_messages: list[Message] = []
    for are_results, group in groupby(messages, lambda message: message.role == "tool"):
        group_messages = list(group)
        headings = [f"Result of {message.name or 'the tool'}:\n" for message in group_messages]
        joined_messages += [_join_messages(headings, group_messages)] if are_results else group_messages
    return joined_messages


def move_images_after_results(messages: Sequence[Message]) -> list[Message]:
    """Move the images of tool results into a user message after the results of each turn, for templates that render
    them only there."""
    new_messages: list[Message] = []
    for are_results, group in groupby(messages, lambda message: message.role == "tool"):
        group_messages = list(group)
        with_images = [message for message in group_messages if message.images] if are_results else []
        new_messages += [
            replace(message, images=[]) if with_images else message for message in group_messages
        ]
        if with_images:
            headings = [f"Images of the result of {message.name or 'the tool'}:\n" for message in with_images]
            images = [
                [PlacedImage(0, image) for image in collect_images([message])] for message in with_images
            ]
            new_messages.append(
                _join_messages(headings, [Message("user", images=image_list) for image_list in images])
            )
    return new_messages


def _join_messages(headings: Sequence[str], messages: Sequence[Message]) -> Message:
    """Return a user message with the contents and images of several messages, each after its heading."""
    content, images = "", list[PlacedImage]()
    for heading, message in zip(headings, messages, strict=True):
        content += ("\n\n" if content else "") + heading
        images += [PlacedImage(len(content) + offset, image) for offset, image in message.images]
        content += message.content
    return Message("user", content, images=images)


def decode_with_images(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> str:
    """Decode token ids and write a placeholder text for each image."""
    if not has_images(token_ids):
        return decode(token_ids)
    # An image that is shown twice in a row begins again with its first id.
    first_ids = {find_image(token).first_id for token in token_ids if token >= VIRTUAL}
    runs = groupby(token_ids, lambda token: token if token in first_ids else token >= VIRTUAL)
    return "".join(
        decode(list(run)) if key is False else "" if key is True else placeholder(find_image(int(key)).image)
        for key, run in runs
    )
