"""What an MCP server answered, as a tool result: texts for the model, everything else attached."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from TrainingFactory.common.texts import without
from TrainingFactory.types import ToolResult


def tool_result(
    answer: dict[str, Any], error_text: re.Pattern[str] | None, secrets: Sequence[str]
) -> ToolResult:
    """Return the result for a CallToolResult as it came over the wire. Failure is what the server says is one, or a
    text that the config says is one."""
    attachments: list[dict[str, Any]] = []
    texts = [_shown(part, attachments) for part in answer.get("content") or []]
    structured = answer.get("structuredContent")
    # Servers repeat structured content as text, for clients that know only text.
    if structured is not None and not texts:
        texts = [json.dumps(structured, ensure_ascii=False)]
    content = without("\n".join(text for text in texts if text), secrets)
    failed = bool(answer.get("isError")) or (
        error_text is not None and error_text.search(content) is not None
    )
    kept = without(attachments, secrets)
    return ToolResult(content, ok=not failed, error="exception" if failed else None, attachments=kept)


def _shown(part: dict[str, Any], attachments: list[dict[str, Any]]) -> str:
    """Return one part as the model sees it. What is no text is kept beside it."""
    kind = part.get("type")
    if kind == "text":
        return str(part.get("text", ""))
    about = (part.get("resource") or {}) | {"type": kind} if kind == "resource" else part
    attachments.append(about)
    if "text" in about:
        return f"[{kind} {about.get('uri', '')}]\n{about['text']}"
    words = ["resource" if kind == "resource_link" else kind]
    words += [about[key] for key in ("uri", "name", "mimeType") if about.get(key)]
    size = len(str(about.get("data", about.get("blob", "")))) * 3 // 4  # of base64
    told = "" if not size else f", {size} bytes" if size < 1000 else f", {size // 1000} kB"
    return f"[{' '.join(map(str, words))}{told}]"
