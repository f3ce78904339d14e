"""What a request costs the server in each API dialect: `python -m benchmarks.dialects`.

The server answers over HTTP on loopback with a scripted sampler, so that reading the request, the chat template,
parsing the sampled tokens and writing the answer remain. The request has a system prompt, a tool, a call and its
result; the answer has reasoning, text and a call. The dialects take turns, in many short rounds that each begin with
another dialect, so that a busy machine slows down all of them. `ms` is the median over rounds of the CPU milliseconds
per request of the whole process, client included; `ratio` is the median of the round's value over that of chat
completions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from TrainingFactory.apps.serving.served import ServedModel
from TrainingFactory.apps.serving.server import ChatServer
from TrainingFactory.common.http import listen
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.types import Completion, Message, SamplingParams, ToolCall, ToolSpec

WARM = Path(__file__).parents[1] / "examples" / "own_agent" / "model"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = ToolSpec("lookup", "Where somebody lives.", SCHEMA)
ANSWER = Message(
    "assistant", "I look it up.", [ToolCall("lookup", {"name": "Viktor"})], reasoning="Who? " * 20
)
SYSTEM, QUESTION, RESULT = "Look up, then answer. " * 10, "Where does Viktor live?", "Dublin"
CALL = {"name": "lookup", "arguments": '{"name": "Olga"}'}
FUNCTION = {"name": TOOL.name, "description": TOOL.description, "parameters": SCHEMA}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {
        "messages": [
            {"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION},
            {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": CALL}]},
            {"role": "tool", "tool_call_id": "a", "content": RESULT},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    }),
    "messages": ("/v1/messages", {
        "max_tokens": 200, "system": SYSTEM, "thinking": {"type": "adaptive"},
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "lookup", "input": {"name": "Olga"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": RESULT}]},
        ],
        "tools": [{"name": TOOL.name, "description": TOOL.description, "input_schema": SCHEMA}],
    }),
    "responses": ("/v1/responses", {
        "instructions": SYSTEM,
        "input": [
            {"role": "user", "content": QUESTION}, {"type": "function_call", "call_id": "a"} | CALL,
            {"type": "function_call_output", "call_id": "a", "output": RESULT},
        ],
        "tools": [{"type": "function"} | FUNCTION],
    }),
    "gemini": ("/v1beta/models/warm:generateContent", {
        "systemInstruction": {"parts": [{"text": SYSTEM}]},
        "contents": [
            {"role": "user", "parts": [{"text": QUESTION}]},
            {"role": "model", "parts": [{"functionCall": {"name": "lookup", "args": {"name": "Olga"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "lookup", "response": {"result": RESULT}}}]},
        ],
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        "tools": [{"functionDeclarations": [
            {"name": TOOL.name, "description": TOOL.description, "parametersJsonSchema": SCHEMA}]}],
    }),
}  # fmt: skip


class Scripted:
    """A sampler, and its sessions, that always answer with the same tokens."""

    policy_version, max_length = 0, 4096

    def __init__(self, ids: Sequence[int], stop_ids: Sequence[int]) -> None:
        self._ids, self._stop_ids = list(ids), stop_ids

    def session(self) -> ScriptedSession:
        return ScriptedSession(self._ids)


class ScriptedSession:
    def __init__(self, ids: list[int]) -> None:
        self._ids, self._start = ids, -1

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if self._start < 0:
            self._start = len(prompt_ids)
        done = len(prompt_ids) - self._start
        ids = self._ids[done : done + params.max_tokens]
        return Completion(ids, [-0.5] * len(ids), "stop" if ids[-1] in params.stop_ids else "length")

    def close(self) -> None: ...


def measure(client: httpx.Client, dialect: str, stream: bool, requests: int) -> float:
    """Return CPU milliseconds per request."""
    path, body = BODIES[dialect]
    if stream and dialect == "gemini":
        path = path.replace(":generate", ":streamGenerate") + "?alt=sse"
    elif stream:
        body = body | {"stream": True}
    data, start = json.dumps(body), time.process_time()
    for _ in range(requests):
        answer = client.post(path, content=data, headers={"content-type": "application/json"})
        assert answer.status_code == 200 and "lookup" in answer.text, answer.text
    return 1000 * (time.process_time() - start) / requests


def run(requests: int, rounds: int) -> list[dict[str, Any]]:
    loaded = load_model(str(WARM))
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    sampler: Any = Scripted(chat.write(ANSWER, tools=[TOOL]), chat.stop_ids)
    server, bound = ChatServer("warm", ServedModel(chat, sampler, 4)), listen.bind("127.0.0.1", 0)
    runner = listen.make_server(server.make_api().app)
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [bound]})
    thread.start()
    rows: list[dict[str, Any]] = []
    try:
        with httpx.Client(base_url=listen.format_url(bound), timeout=60, trust_env=False) as client:
            for stream in (False, True):
                times = {dialect: [] for dialect in BODIES}
                for number in range(rounds + 1):  # the first warms up
                    start = number % len(BODIES)
                    for dialect in [*BODIES][start:] + [*BODIES][:start]:
                        milliseconds = measure(client, dialect, stream, requests)
                        times[dialect] += [milliseconds] if number else []
                for dialect, values in times.items():
                    pairs = zip(values, times["chat"], strict=True)
                    ratio = statistics.median(value / base for value, base in pairs)
                    row = {"dialect": dialect, "stream": stream, "ms": round(statistics.median(values), 3)}
                    rows.append(row | {"ratio": round(ratio, 3)})
    finally:
        runner.should_exit = True
        thread.join()
        server.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10, help="requests of a dialect in a round")
    parser.add_argument("--rounds", type=int, default=80)
    options = parser.parse_args()
    for row in run(options.requests, options.rounds):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
