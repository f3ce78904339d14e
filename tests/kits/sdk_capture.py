"""The same conversation, sent by the official SDKs to a server on the loopback: `python -m tests.kits.sdk_capture`
prints the requests as JSON, one per SDK that is installed. Needs nothing of this project."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from typing import Any

KEY = "sk-loopback-0123456789"
HEADERS = ("authorization", "x-api-key", "x-goog-api-key", "anthropic-version", "content-type")
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SYSTEM, QUESTION, THOUGHT, SAID = "Be brief.", "Who bought the boat?", "Look twice.", "I will search."
RESULTS = ("Ann sold the boat to Bo", "no match")
ANSWERS: dict[str, dict[str, Any]] = {
    "messages": {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
        "content": [{"type": "text", "text": "Bo."}], "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 7},
    },
    "generateContent": {
        "candidates": [
            {"content": {"role": "model", "parts": [{"text": "Bo."}]}, "finishReason": "STOP", "index": 0}
        ],
        "usageMetadata": {"promptTokenCount": 5, "candidatesTokenCount": 3, "totalTokenCount": 8},
    },
    "completions": {
        "id": "c1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Bo."}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    },
}  # fmt: skip


class CaptureServer:
    """Answers every request of the three wire formats and keeps what was sent."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                sent = {name.lower(): value for name, value in self.headers.items()}
                headers = {name: sent[name].replace(KEY, "KEY") for name in HEADERS if name in sent}
                requests.append({"path": self.path, "headers": headers, "body": body})
                answer = next(
                    reply for end, reply in ANSWERS.items() if self.path.partition("?")[0].endswith(end)
                )
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


def ask_openai(url: str) -> None:
    import openai  # type: ignore[import-not-found]

    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps({"query": query})},
        }
        for number, query in enumerate(("boat", "bö"))
    ]
    openai.OpenAI(api_key=KEY, base_url=f"{url}/v1").chat.completions.create(
        model="m",
        temperature=0.5,
        max_tokens=64,
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": SAID, "tool_calls": calls},
            *(
                {"role": "tool", "tool_call_id": f"call_{n}", "content": text}
                for n, text in enumerate(RESULTS)
            ),
        ],
        tools=[
            {
                "type": "function",
                "function": {"name": "search", "description": "Searches.", "parameters": SCHEMA},
            }
        ],
    )


def ask_anthropic(url: str) -> None:
    import anthropic  # type: ignore[import-not-found]

    uses = [
        {"type": "tool_use", "id": f"call_{number}", "name": "search", "input": {"query": query}}
        for number, query in enumerate(("boat", "bö"))
    ]
    results = [
        {"type": "tool_result", "tool_use_id": f"call_{number}", "content": text}
        for number, text in enumerate(RESULTS)
    ]
    anthropic.Anthropic(api_key=KEY, base_url=url).messages.create(
        model="m",
        max_tokens=64,
        system=SYSTEM,
        messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [{"type": "text", "text": SAID}, *uses]},
            {"role": "user", "content": results},
        ],
        tools=[{"name": "search", "description": "Searches.", "input_schema": SCHEMA}],
    )


def ask_gemini(url: str) -> None:
    from google import genai  # type: ignore[import-not-found]
    from google.genai import types  # type: ignore[import-not-found]

    calls = [
        types.Part(
            function_call=types.FunctionCall(id=f"call_{number}", name="search", args={"query": query})
        )
        for number, query in enumerate(("boat", "bö"))
    ]
    results = [
        types.Part(
            function_response=types.FunctionResponse(id=f"call_{n}", name="search", response={"result": text})
        )
        for n, text in enumerate(RESULTS)
    ]
    declaration = types.FunctionDeclaration(
        name="search", description="Searches.", parameters_json_schema=SCHEMA
    )
    client = genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=url))
    client.models.generate_content(
        model="m",
        contents=[
            types.Content(role="user", parts=[types.Part(text=QUESTION)]),
            types.Content(role="model", parts=[types.Part(text=SAID), *calls]),
            types.Content(role="user", parts=results),
        ],
        config=types.GenerateContentConfig(
            system_instruction=SYSTEM,
            temperature=0.5,
            max_output_tokens=64,
            tools=[types.Tool(function_declarations=[declaration])],
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        ),
    )


SDKS: dict[str, Callable[[str], None]] = {
    "openai": ask_openai,
    "anthropic": ask_anthropic,
    "google-genai": ask_gemini,
}


def capture() -> dict[str, dict[str, Any]]:
    """Return the request of each installed SDK, with its version."""
    captured = {}
    for name, ask in SDKS.items():
        try:
            sdk_version = version(name)
        except PackageNotFoundError:
            continue
        server = CaptureServer()
        try:
            ask(server.url)
        finally:
            server.http.shutdown()
        captured[name] = {"sdk": f"{name} {sdk_version}", **server.requests[0]}
    return captured


if __name__ == "__main__":
    json.dump(capture(), sys.stdout, indent=2, ensure_ascii=False)
