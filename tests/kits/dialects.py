"""Clients of the four API dialects: with plain HTTP, and with the official SDKs that `make servers` installs. Each
keeps its history as its users do: it appends what the answer has, and sends all of it with the next request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kits.waiting import HANG
from TrainingFactory.types import Message, ToolSpec

FOLDER = Path(__file__).resolve().parents[2] / ".servers" / "sdks"
needs_sdks = pytest.mark.skipif(
    not FOLDER.with_suffix(".installed").exists(),
    reason="the SDKs of OpenAI, Anthropic and Google are not installed: make servers",
)
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "gemini": "/v1beta/models/script:generateContent",
}
# The header in which each SDK sends its key.
KEY_HEADERS = {"messages": "x-api-key", "gemini": "x-goog-api-key"}


@contextmanager
def importable() -> Iterator[None]:
    """Make the SDKs importable, for no longer than they are imported."""
    sys.path.append(str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


@dataclass
class Reply:
    """An answer as a client sees it. Calls are name and arguments."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stop: str | None = None
    tokens: int = 0  # sampled ones, of the usage


class Talk:
    """A conversation with plain HTTP requests."""

    def __init__(
        self, dialect: str, base_url: str, key: str = "x", tools: list[ToolSpec] | None = None, **fields: Any
    ) -> None:
        self.dialect, self.base_url, self.key, self.fields = dialect, base_url.rstrip("/"), key, fields
        self.system = ""
        self.history: list[Any] = []
        self.tools = [TOOLS[dialect](tool) for tool in tools or []]
        self.open_calls: list[tuple[str, str]] = []  # id and name

    def begin(self, messages: list[Message]) -> None:
        for message in messages:
            if message.role == "system":
                self.system = message.content
            else:
                self.say(message.content)

    def say(self, text: str) -> None:
        if self.dialect == "gemini":
            self.history.append({"role": "user", "parts": [{"text": text}]})
        else:
            self.history.append({"role": "user", "content": text})

    def give_results(self, texts: list[str]) -> None:
        """Append the results of the last answer's calls."""
        pairs = list(zip(self.open_calls, texts, strict=True))
        if self.dialect == "chat":
            self.history += [{"role": "tool", "tool_call_id": id_, "content": t} for (id_, _), t in pairs]
        elif self.dialect == "messages":
            rows = [{"type": "tool_result", "tool_use_id": id_, "content": text} for (id_, _), text in pairs]
            self.history.append({"role": "user", "content": rows})
        elif self.dialect == "responses":
            kind = "function_call_output"
            self.history += [{"type": kind, "call_id": id_, "output": text} for (id_, _), text in pairs]
        else:  # without ids
            results = [{"name": name, "response": {"result": text}} for (_, name), text in pairs]
            self.history.append({"role": "user", "parts": [{"functionResponse": row} for row in results]})

    def body(self) -> dict[str, Any]:
        system, tools = self.system, self.tools
        if self.dialect == "chat":
            first = [{"role": "system", "content": system}] if system else []
            body: dict[str, Any] = {"messages": [*first, *self.history]}
        elif self.dialect == "messages":
            body = {"max_tokens": 500, "messages": self.history} | ({"system": system} if system else {})
            body["thinking"] = {"type": "adaptive"}
        elif self.dialect == "responses":
            body = {"input": self.history} | ({"instructions": system} if system else {})
        else:
            body = {
                "contents": self.history,
                "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
            }
            body |= {"systemInstruction": {"parts": [{"text": system}]}} if system else {}
            tools = [{"functionDeclarations": tools}] if tools else []
        return body | ({"tools": tools} if tools else {}) | self.fields

    def headers(self) -> dict[str, str]:
        name = KEY_HEADERS.get(self.dialect, "authorization")
        return {name: self.key if name in KEY_HEADERS.values() else f"Bearer {self.key}"}

    def answer(self) -> Reply:
        with httpx.Client(base_url=self.base_url, timeout=HANG, trust_env=False) as client:
            got = client.post(PATHS[self.dialect], json=self.body(), headers=self.headers())
        assert got.status_code == 200, got.text
        return self.keep(got.json())

    def keep(self, answer: Any) -> Reply:
        """Append an answer to the history; return what it says."""
        if self.dialect == "chat":
            [choice] = answer["choices"]
            self.history.append(choice["message"])
            return self.read_chat(choice, answer["usage"])
        if self.dialect == "messages":
            self.history.append({"role": "assistant", "content": answer["content"]})
            return self.read_messages(answer)
        if self.dialect == "responses":
            self.history += answer["output"]
            return self.read_responses(answer)
        [candidate] = answer["candidates"]
        for part in candidate["content"]["parts"]:
            part.get("functionCall", {}).pop("id", None)
        self.history.append(candidate["content"])
        return self.read_gemini([candidate], answer["usageMetadata"])

    def read_chat(self, choice: Any, usage: Any) -> Reply:
        row = choice["message"]
        rows = [(call["id"], call["function"]) for call in row.get("tool_calls") or []]
        self.open_calls = [(id_, function["name"]) for id_, function in rows]
        calls = [(function["name"], json.loads(function["arguments"])) for _, function in rows]
        reasoning = row.get("reasoning_content") or ""
        return Reply(
            row["content"] or "", reasoning, calls, choice["finish_reason"], usage["completion_tokens"]
        )

    def read_messages(self, answer: Any) -> Reply:
        blocks = answer["content"]
        used = [block for block in blocks if block["type"] == "tool_use"]
        self.open_calls = [(block["id"], block["name"]) for block in used]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        calls = [(block["name"], block["input"]) for block in used]
        return Reply(text, thought, calls, answer["stop_reason"], answer["usage"]["output_tokens"])

    def read_responses(self, answer: Any) -> Reply:
        items = answer["output"]
        called = [item for item in items if item["type"] == "function_call"]
        self.open_calls = [(item["call_id"], item["name"]) for item in called]

        def text(kind: str) -> str:
            return "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])

        calls = [(item["name"], json.loads(item["arguments"])) for item in called]
        return Reply(
            text("message"), text("reasoning"), calls, answer["status"], answer["usage"]["output_tokens"]
        )

    def read_gemini(self, candidates: list[Any], usage: Any) -> Reply:
        parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
        called = [part["functionCall"] for part in parts if "functionCall" in part]
        self.open_calls = [("", call["name"]) for call in called]
        text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
        thought = "".join(part["text"] for part in parts if part.get("thought"))
        calls = [(call["name"], call["args"]) for call in called]
        return Reply(text, thought, calls, candidates[-1]["finishReason"], usage["candidatesTokenCount"])


def _function(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


TOOLS: dict[str, Any] = {
    "chat": lambda tool: {"type": "function", "function": _function(tool)},
    "messages": lambda tool: {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.parameters,
    },
    "responses": lambda tool: {"type": "function"} | _function(tool),
    "gemini": lambda tool: {
        "name": tool.name,
        "description": tool.description,
        "parametersJsonSchema": tool.parameters,
    },
}


class SDKTalk(Talk):
    """A conversation through an official SDK, with or without a stream. The history has the SDK's own objects."""

    def __init__(self, *args: Any, stream: bool = False, model: str = "script", **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.stream, self.model = stream, model
        with importable():
            self.client = getattr(self, f"_{self.dialect}_client")()

    def answer(self) -> Reply:
        with importable():  # SDKs import some modules late
            return getattr(self, f"_{self.dialect}")()

    def _chat_client(self) -> Any:
        import openai  # type: ignore[import-not-found]

        return openai.OpenAI(api_key=self.key, base_url=f"{self.base_url}/v1", max_retries=0, timeout=HANG)

    _responses_client = _chat_client

    def _messages_client(self) -> Any:
        import anthropic  # type: ignore[import-not-found]

        return anthropic.Anthropic(api_key=self.key, base_url=self.base_url, max_retries=0, timeout=HANG)

    def _gemini_client(self) -> Any:
        from google import genai  # type: ignore[import-not-found]

        return genai.Client(
            api_key=self.key, http_options={"base_url": self.base_url, "timeout": HANG * 1000}
        )

    def _chat(self) -> Reply:
        body = self.body() | {"model": self.model}
        if self.stream:
            options = {"stream_options": {"include_usage": True}}
            with self.client.chat.completions.stream(**body, **options) as events:
                answer = events.until_done().get_final_completion()
        else:
            answer = self.client.chat.completions.create(**body)
        [choice] = answer.choices
        self.history.append(choice.message)
        return self.read_chat(choice.model_dump(), answer.usage.model_dump())

    def _messages(self) -> Reply:
        body = self.body() | {"model": self.model}
        if self.stream:
            with self.client.messages.stream(**body) as events:
                answer = events.get_final_message()
        else:
            answer = self.client.messages.create(**body)
        self.history.append({"role": "assistant", "content": answer.content})
        return self.read_messages(answer.model_dump())

    def _responses(self) -> Reply:
        body = self.body() | {"model": self.model}
        if self.stream:
            with self.client.responses.stream(**body) as events:
                answer = events.get_final_response()
        else:
            answer = self.client.responses.create(**body)
        self.history += answer.output
        return self.read_responses(answer.model_dump())

    def _gemini(self) -> Reply:
        body = self.body()
        config = {"thinking_config": {"include_thoughts": True}}
        config |= {"system_instruction": self.system} if self.system else {}
        config |= {"tools": body["tools"]} if "tools" in body else {}
        generate = (
            self.client.models.generate_content_stream if self.stream else self.client.models.generate_content
        )
        got = generate(model=self.model, contents=self.history, config=config | self.fields)
        chunks = list(got) if self.stream else [got]
        candidates = [chunk.candidates[0] for chunk in chunks]
        self.history += [candidate.content for candidate in candidates]
        rows = [
            candidate.model_dump(by_alias=True, exclude_none=True, mode="json") for candidate in candidates
        ]
        return self.read_gemini(rows, chunks[-1].usage_metadata.model_dump(by_alias=True))


def versions() -> dict[str, str]:
    """Return the versions of the SDKs."""
    rows = (Path(__file__).parents[1] / "servers" / "sdks.txt").read_text().splitlines()
    pinned = dict(row.split("==") for row in rows if "==" in row)
    names = {"chat": "openai", "responses": "openai", "messages": "anthropic", "gemini": "google-genai"}
    return {dialect: f"{name} {pinned[name]}" for dialect, name in names.items()}
