"""Two tools that think: another model, and an agent with a calculator of its own.

Runs offline against a stand-in endpoint; set BASE_URL (and OPENAI_API_KEY) to use a real one.

    python examples/model_and_agent_tools.py
"""

import asyncio
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.custom_tools import AgentTool, ModelTool, calculator
from TrainingFactory.types import ToolCall


class StandIn(BaseHTTPRequestHandler):
    """Speaks just enough of /chat/completions: translates one word, and has sums done by the calculator."""

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = body["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": "BONJOUR"}
        if last["role"] == "tool":
            message["content"] = f"The total is {last['content']}."
        elif "tools" in body:
            function = {"name": "calculator", "arguments": '{"expression": "12 + 30"}'}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
        data = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


async def ask(base_url: str, key: str | None) -> None:
    translate = ModelTool(
        "translate", "Translates to French.", base_url, "some-model",
        system_prompt="Answer with the translation alone, in capitals.", api_key_env=key,
    )  # fmt: skip
    endpoint = {"base_url": base_url, "model": "some-model", "api_key_env": key}
    accountant = AgentTool("accountant", "Does sums.", endpoint, [calculator], max_turns=4)
    executor = AsyncToolExecutor([translate, accountant])
    calls = [
        ToolCall("translate", {"prompt": "hello"}),
        ToolCall("accountant", {"prompt": "Add 12 and 30."}),
    ]
    try:
        for call, result in zip(calls, await executor.batch_execute(calls), strict=True):
            print(f"{call.name}: {result.content}")
    finally:
        await executor.close()


def main() -> None:
    if "BASE_URL" in os.environ:
        asyncio.run(ask(os.environ["BASE_URL"], "OPENAI_API_KEY"))
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asyncio.run(ask(f"http://127.0.0.1:{server.server_port}/v1", None))
    server.shutdown()


if __name__ == "__main__":
    main()
