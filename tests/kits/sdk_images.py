"""Bodies with images that the official SDKs send, as JSON by dialect: `PYTHONPATH=.servers/sdks:. python -m
tests.kits.sdk_images`. Needs nothing of this project."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from tests.kits.sdk_capture import ANSWERS, KEY, CaptureServer

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAD0lEQVR4nGP8z8DAwMAAAAYIAQHLR3Z1AAAAAElFTkSuQmCC"
)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
ANSWERS["responses"] = {
    "id": "r", "object": "response", "created_at": 1, "model": "m", "output": [], "status": "completed",
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
}  # fmt: skip


def ask_chat(url: str) -> None:
    import openai  # type: ignore[import-not-found]

    parts: list[Any] = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": URL}},
    ]
    openai.OpenAI(api_key=KEY, base_url=f"{url}/v1").chat.completions.create(
        model="m", messages=[{"role": "user", "content": parts}]
    )


def ask_responses(url: str) -> None:
    import openai  # type: ignore[import-not-found]

    parts = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    result = [{"type": "input_image", "image_url": URL, "detail": "auto"}]
    items: list[Any] = [
        {"role": "user", "content": parts},
        {"type": "function_call", "call_id": "call_0", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_0", "output": result},
    ]
    openai.OpenAI(api_key=KEY, base_url=f"{url}/v1").responses.create(model="m", input=items)


def ask_messages(url: str) -> None:
    import anthropic  # type: ignore[import-not-found]

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    image = {"type": "image", "source": source}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_0", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": [image]}]},
    ]
    anthropic.Anthropic(api_key=KEY, base_url=url).messages.create(
        model="m", max_tokens=64, messages=messages
    )


def ask_gemini(url: str) -> None:
    from google import genai  # type: ignore[import-not-found]
    from google.genai import types  # type: ignore[import-not-found]

    image = types.Part.from_bytes(data=PNG, mime_type="image/png")
    shown = types.FunctionResponsePart(
        inline_data=types.FunctionResponseBlob(mime_type="image/png", data=PNG)
    )
    call = types.FunctionCall(id="call_0", name="look", args={})
    response = types.FunctionResponse(id="call_0", name="look", response={"result": ""}, parts=[shown])
    client = genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=url))
    client.models.generate_content(
        model="m",
        contents=[
            types.Content(role="user", parts=[types.Part(text="What is it?"), image]),
            types.Content(role="model", parts=[types.Part(function_call=call)]),
            types.Content(role="user", parts=[types.Part(function_response=response)]),
        ],
    )


ASKS = {"chat": ask_chat, "responses": ask_responses, "messages": ask_messages, "gemini": ask_gemini}


def capture() -> dict[str, dict[str, Any]]:
    bodies = {}
    for name, ask in ASKS.items():
        server = CaptureServer()
        try:
            ask(server.url)
        finally:
            server.http.shutdown()
        bodies[name] = server.requests[0]["body"]
    return bodies


if __name__ == "__main__":
    json.dump(capture(), sys.stdout, indent=1)
