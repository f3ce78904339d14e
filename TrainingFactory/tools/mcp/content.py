"""What an MCP server answered, as a tool result: texts for the model, everything else attached."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from TrainingFactory.tools.mcp.secrets import without
from TrainingFactory.types import ToolResult


def tool_result(
    answer: dict[str, Any], error_text: re.Pattern[str] | None, secrets: Sequence[str]
) -> ToolResult:
    """`answer` is a CallToolResult as it came over the wire. Failure is what the server says is one, or a text
    that the config says is one: some servers report errors as plain texts."""
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
    """One part as the model sees it. What is no text is kept beside it."""
    kind = part.get("type")
    if kind == "text":
        return str(part.get("text", ""))
    if kind in ("image", "audio"):
        attachments.append(_kept(part, "mimeType", "data") | {"type": kind})
        return f"[{kind} {part.get('mimeType', '')}, {_size(str(part.get('data', '')))}]"
    if kind == "resource":
        resource = part.get("resource") or {}
        attachments.append(_kept(resource, "uri", "mimeType", "text", "data", "blob") | {"type": "resource"})
        name = f"resource {resource.get('uri', '')}"
        if "text" in resource:
            return f"[{name}]\n{resource['text']}"
        return f"[{name} {resource.get('mimeType', '')}, {_size(str(resource.get('blob', '')))}]"
    if kind == "resource_link":
        attachments.append(_kept(part, "uri", "name", "mimeType", "description") | {"type": "resource_link"})
        return f"[resource {part.get('uri', '')} {part.get('name', '')}]".replace(" ]", "]")
    attachments.append(dict(part))
    return f"[{kind}]"


def _kept(part: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {("data" if key == "blob" else key): part[key] for key in keys if part.get(key) is not None}


def _size(base64_text: str) -> str:
    size = len(base64_text) * 3 // 4
    return f"{size} bytes" if size < 1000 else f"{size // 1000} kB"
