"""A model on the loopback that solves the built-in search tasks in three wire formats, with the mistakes that a test
asks for."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from TrainingFactory.types import Message, ToolCall

APIS = ("openai", "anthropic", "gemini")


@dataclass
class Teacher:
    """`fails` returns the status and body of a request that goes wrong, by its number and question; None: answer it.
    `wrong` returns whether the final answer to a question is wrong."""

    fails: Callable[[int, str], tuple[int, bytes] | None] = lambda number, question: None
    wrong: Callable[[int, str], bool] = lambda number, question: False
    requests: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # of errors

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, data = outer.answer(self.path, body)
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                for name, value in outer.headers.items() if status != 200 else ():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Print errors of the handler, except when the client has cancelled its request."""
                if not isinstance(sys.exception(), ConnectionError):
                    super().handle_error(request, client_address)

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def name(self, api: str = "openai") -> str:
        return f"{api}:teacher@{self.url}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        api = (
            "gemini" if "generateContent" in path else "anthropic" if path.endswith("/messages") else "openai"
        )
        question, results = READERS[api](body)
        with self.lock:
            number = len(self.requests)
            self.requests.append(body)
        if (failure := self.fails(number, question)) is not None:
            return failure
        message = self._message(question, results, number)
        with self.lock:
            self.answered += 1
        return 200, json.dumps(WRITERS[api](message)).encode()

    def _message(self, question: str, results: list[str], number: int) -> Message:
        seller, thing = re.findall(r"(\w+) sold (\w+)", question)[0]
        if not results:
            return Message("assistant", "", [ToolCall("search", {"query": f"{seller} {thing}"}, "c0")])
        if len(results) == 1:
            buyer = re.findall(rf"{seller} sold {thing} to (\w+)", results[0])[0]
            return Message("assistant", "", [ToolCall("search", {"query": buyer}, "c1")])
        town = re.findall(r"lives in (\w+)", results[1])[0]
        return Message("assistant", "Nowhere" if self.wrong(number, question) else town)


def _read_openai(body: dict[str, Any]) -> tuple[str, list[str]]:
    messages = body["messages"]
    question = next(message["content"] for message in messages if message["role"] == "user")
    return question, [message["content"] for message in messages if message["role"] == "tool"]


def _read_anthropic(body: dict[str, Any]) -> tuple[str, list[str]]:
    blocks = [
        block for row in body["messages"] if isinstance(row["content"], list) for block in row["content"]
    ]
    return body["messages"][0]["content"], [
        block["content"] for block in blocks if block["type"] == "tool_result"
    ]


def _read_gemini(body: dict[str, Any]) -> tuple[str, list[str]]:
    parts = [part for content in body["contents"] for part in content["parts"]]
    results = [part["functionResponse"]["response"]["result"] for part in parts if "functionResponse" in part]
    return parts[0]["text"], results


def _write_openai(message: Message) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in message.tool_calls
    ]
    row = {"role": "assistant", "content": message.content or None} | ({"tool_calls": calls} if calls else {})
    return {
        "choices": [{"message": row, "finish_reason": "stop"}],
        "usage": dict(zip(OPENAI_USAGE, USED, strict=True)),
    }


def _write_anthropic(message: Message) -> dict[str, Any]:
    text = [{"type": "text", "text": message.content}] if message.content else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in message.tool_calls
    ]
    usage = {"input_tokens": USED[0], "output_tokens": USED[1]}
    return {"content": [*text, *calls], "stop_reason": "tool_use" if calls else "end_turn", "usage": usage}


def _write_gemini(message: Message) -> dict[str, Any]:
    text = [{"text": message.content}] if message.content else []
    calls = [{"functionCall": {"name": call.name, "args": call.arguments}} for call in message.tool_calls]
    content = {"role": "model", "parts": [*text, *calls]}
    usage = {"promptTokenCount": USED[0], "candidatesTokenCount": USED[1]}
    return {"candidates": [{"content": content, "finishReason": "STOP"}], "usageMetadata": usage}


USED = (100, 10)  # tokens of every reply
OPENAI_USAGE = ("prompt_tokens", "completion_tokens")
READERS = {"openai": _read_openai, "anthropic": _read_anthropic, "gemini": _read_gemini}
WRITERS = {"openai": _write_openai, "anthropic": _write_anthropic, "gemini": _write_gemini}


@contextmanager
def teaching(**options: Any) -> Iterator[Teacher]:
    teacher = Teacher(**options)
    try:
        yield teacher
    finally:
        teacher.http.shutdown()
        teacher.http.server_close()
