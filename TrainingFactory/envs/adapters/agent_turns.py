"""Base for adapters of packages whose environments send requests to a model: each request becomes a turn of the
protocol. Imports the standard library only."""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any


class AgentEpisode:
    """An episode of a foreign environment, which runs in a task of the event loop. `step` answers the environment's
    request to the model and waits for its next request. Requests and turns have the shape of chat completions.
    Subclasses define `find_problem` and `make_final_answer`."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._turn_future: asyncio.Future[dict[str, Any] | None] | None = None  # of the request that waits
        self._history: list[dict[str, Any]] = []
        self._is_over = False
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []

    def find_problem(self, result: Any) -> str:
        """Return the error of a finished run; empty if it has none."""
        raise NotImplementedError

    def make_final_answer(self, result: Any) -> dict[str, Any]:
        """Convert the result of a finished run to the response of the last `step`, without the key `done`."""
        raise NotImplementedError

    async def start(self, run_coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a run and wait for its first request."""
        self._run_task = asyncio.ensure_future(run_coroutine)
        request = await self._receive_request()
        if request is None:
            raise RuntimeError(
                self.find_problem(self._run_task.result()) or "the agent ended before its first turn"
            )
        self._history = request["messages"]
        self.messages = [strip_message(message) for message in self._history]
        self.tools = [tool["function"] for tool in request.get("tools") or []]

    async def request_message(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the model's turn that answers a request; None after the end."""
        if self._is_over:
            return None
        self._turn_future = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        return await self._turn_future

    async def _receive_request(self) -> dict[str, Any] | None:
        """Return the next request; None if the run ends before it."""
        queue_task = asyncio.ensure_future(self._requests.get())
        await asyncio.wait([queue_task, self._run_task], return_when=asyncio.FIRST_COMPLETED)
        if queue_task.done():
            return queue_task.result()
        queue_task.cancel()
        return None

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._turn_future is not None
        calls = [_to_chat_call(call) for call in message["tool_calls"]]
        turn = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
        self._turn_future.set_result(turn)
        request = await self._receive_request()
        if request is None:
            result = self._run_task.result()
            if problem := self.find_problem(result):
                raise RuntimeError(problem)
            return {"done": True, **self.make_final_answer(result)}
        history_length = len(self._history)
        messages = request["messages"]
        if messages[:history_length] != self._history or [
            row["role"] for row in messages[history_length : history_length + 1]
        ] != ["assistant"]:
            raise RuntimeError("the agent changed earlier messages; run it as a program: environment.command")
        self._history = messages
        return {"messages": [strip_message(row) for row in messages[history_length + 1 :]]}

    async def finish(self) -> Any:
        """Refuse further requests, wait for the end of the run, and return its result."""
        self._end_turn()
        result = await self._run_task
        if problem := self.find_problem(result):
            raise RuntimeError(problem)
        return result

    async def close(self) -> None:
        self._end_turn()
        self._run_task.cancel()
        await asyncio.wait([self._run_task])

    def _end_turn(self) -> None:
        self._is_over = True
        if self._turn_future is not None and not self._turn_future.done():
            self._turn_future.set_result(None)


def _to_chat_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


def strip_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        part_types = {part["type"] for part in content}
        if part_types != {"text"}:
            raise RuntimeError(f"a message has {', '.join(sorted(part_types))}; only text is supported")
        content = "\n".join(part["text"] for part in content)
    keys = ("role", "tool_call_id")
    return {"content": content} | {key: message[key] for key in keys if key in message}


def import_file(path: str) -> str:
    """Import a file as a module that the package and its subprocesses find by its name. Return the name."""
    module_name = Path(path).stem
    os.environ["PYTHONPATH"] = str(Path(path).parent)  # of subprocesses; this process ignores it
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module_name
