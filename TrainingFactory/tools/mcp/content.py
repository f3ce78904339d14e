"""Conversion of MCP answers to tool results: text and images for the model, all other content as attachments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from TrainingFactory.common.image_parts import decode_image
from TrainingFactory.common.images import join_pieces, make_rejection_text
from TrainingFactory.common.texts import redact
from TrainingFactory.types import Image, ToolResult


def has_images(answer: dict[str, Any]) -> bool:
    """Return whether a raw CallToolResult has images, because decoding them takes long."""
    return any(_get_image_data(block) is not None for block in answer.get("content") or [])


def make_tool_result(
    answer: dict[str, Any], error_text: re.Pattern[str] | None, secrets: Sequence[str]
) -> ToolResult:
    """Convert a raw CallToolResult. It failed if the server sets isError or the text matches `error_text`."""
    attachments: list[dict[str, Any]] = []
    contents = [_to_text_or_image(block, attachments) for block in answer.get("content") or []]
    structured_content = answer.get("structuredContent")
    # Most servers repeat structured content as text, for clients that support only text.
    if structured_content is not None and not contents:
        contents = [json.dumps(structured_content, ensure_ascii=False)]
    redacted_contents = [item if isinstance(item, Image) else redact(item, secrets) for item in contents]
    content, images = join_pieces(redacted_contents, "\n")
    is_failed = bool(answer.get("isError")) or (
        error_text is not None and error_text.search(content) is not None
    )
    attachments = redact(attachments, secrets)
    error = "exception" if is_failed else None
    return ToolResult(content, ok=not is_failed, error=error, attachments=attachments, images=images)


def _get_image_data(block: dict[str, Any]) -> Any:
    """Return the base64 text of an image, or of a resource with an image; None for other content."""
    resource = block.get("resource") if block.get("type") == "resource" else None
    if isinstance(resource, dict) and str(resource.get("mimeType", "")).startswith("image/"):
        return resource.get("blob")
    return block.get("data") if block.get("type") == "image" else None


def _to_text_or_image(block: dict[str, Any], attachments: list[dict[str, Any]]) -> str | Image:
    """Return a content part as text or image. Append other parts to `attachments`; the model sees a placeholder."""
    block_type = block.get("type")
    if block_type == "text":
        return str(block.get("text", ""))
    attachment = (block.get("resource") or {}) | {"type": block_type} if block_type == "resource" else block
    if (image_data := _get_image_data(block)) is not None:
        try:
            return decode_image(image_data)
        except ValueError as error:
            attachments.append(attachment)
            return make_rejection_text(error)
    attachments.append(attachment)
    if "text" in attachment:
        return f"[{block_type} {attachment.get('uri', '')}]\n{attachment['text']}"
    labels = ["resource" if block_type == "resource_link" else block_type]
    labels += [attachment[key] for key in ("uri", "name", "mimeType") if attachment.get(key)]
    size = len(str(attachment.get("data", attachment.get("blob", "")))) * 3 // 4  # bytes; the data is base64
    size_text = "" if not size else f", {size} bytes" if size < 1000 else f", {size // 1000} kB"
    return f"[{' '.join(map(str, labels))}{size_text}]"
