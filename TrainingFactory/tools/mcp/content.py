"""Conversion of MCP answers to tool results: text for the model, all other content as attachments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from TrainingFactory.common.texts import redact
from TrainingFactory.types import ToolResult


def tool_result(
    answer: dict[str, Any], error_text: re.Pattern[str] | None, secrets: Sequence[str]
) -> ToolResult:
    """Convert a raw CallToolResult. It is a failure if the server sets isError or the text matches `error_text`."""
    attachments: list[dict[str, Any]] = []
    texts = [_to_text(part, attachments) for part in answer.get("content") or []]
    structured = answer.get("structuredContent")
    # Most servers repeat structured content as text, for clients that support only text.
    if structured is not None and not texts:
        texts = [json.dumps(structured, ensure_ascii=False)]
    content = redact("\n".join(text for text in texts if text), secrets)
    failed = bool(answer.get("isError")) or (
        error_text is not None and error_text.search(content) is not None
    )
    attachments = redact(attachments, secrets)
    return ToolResult(content, ok=not failed, error="exception" if failed else None, attachments=attachments)


def _to_text(part: dict[str, Any], attachments: list[dict[str, Any]]) -> str:
    """Return a content part as text. Append non-text parts to `attachments`; the model sees a placeholder."""
    kind = part.get("type")
    if kind == "text":
        return str(part.get("text", ""))
    attachment = (part.get("resource") or {}) | {"type": kind} if kind == "resource" else part
    attachments.append(attachment)
    if "text" in attachment:
        return f"[{kind} {attachment.get('uri', '')}]\n{attachment['text']}"
    words = ["resource" if kind == "resource_link" else kind]
    words += [attachment[key] for key in ("uri", "name", "mimeType") if attachment.get(key)]
    size = len(str(attachment.get("data", attachment.get("blob", "")))) * 3 // 4  # bytes; the data is base64
    size_text = "" if not size else f", {size} bytes" if size < 1000 else f", {size // 1000} kB"
    return f"[{' '.join(map(str, words))}{size_text}]"
