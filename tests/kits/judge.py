"""A judge that really listens on the loopback and does as it is told: in time or late, sensibly or not."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from TrainingFactory.rewards.judge.model_judge import model_judge
from TrainingFactory.rewards.judge.prompts import FENCE_END, FENCE_START
from TrainingFactory.rewards.workers.process import FinishedEpisode
from TrainingFactory.types import Completion, Message, Status, Task, ToolCall, Trajectory, Turn

KEY = "sk-judge-9876"
Said = str | int | bytes | tuple[int, bytes] | None  # a text, a status, a body, both, or the connection cut


@dataclass
class Judge:
    """`say` gets the whole prompt and the number of the request. `hang` is waited for before each answer."""

    say: Callable[[str, int], Said]
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    usage: dict[str, int] | None = field(
        default_factory=lambda: {"prompt_tokens": 100, "completion_tokens": 10}
    )
    finish: str = "stop"
    hang: threading.Event = field(default_factory=threading.Event)
    most: int = 0  # requests at the same time
    delay: float = 0.0
    port: int = 0
    keeps: bool = False  # connections open, as HTTP/1.1 does
    connections: int = 0
    sends: dict[str, str] = field(default_factory=dict[str, str])  # headers of what is no success
    missing: int = 0  # bytes that are promised and not sent

    def __post_init__(self) -> None:
        self.hang.set()
        self.running, self.lock, self.stopped = 0, threading.Lock(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1" if self.keeps else "HTTP/1.0"

            def setup(self) -> None:
                super().setup()
                outer.connections += 1

            def do_POST(self) -> None:
                with suppress(OSError):
                    outer.serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # of the usual 5 a burst loses some, which are sent again after a second

        self.http = Server(("127.0.0.1", self.port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self.lock:
            number = len(self.asked)
            self.asked.append(body)
            self.headers.append(dict(request.headers) | {"path": request.path})
            self.running += 1
            self.most = max(self.most, self.running)
        self.stopped.wait(self.delay)
        self.hang.wait(20)
        prompt = "\n".join([body.get("system", ""), *(each["content"] for each in body["messages"])])
        said = self.say(prompt, number)
        with self.lock:
            self.running -= 1
        if said is None:  # dies before it has answered
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        status = said[0] if isinstance(said, tuple) else said if isinstance(said, int) else 200
        data = said[1] if isinstance(said, tuple) else said
        data = data if isinstance(data, bytes) else json.dumps(self._answer(request.path, data)).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data) + self.missing))
        for name, value in self.sends.items() if status != 200 else ():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

    def _answer(self, path: str, said: str | int) -> dict[str, Any]:
        if isinstance(said, int):
            return {"error": {"message": "as asked"}}
        if path.endswith("/messages"):
            usage = {"input_tokens": 100, "output_tokens": 10}
            return {"content": [{"type": "text", "text": said}], "stop_reason": self.finish, "usage": usage}
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": self.finish}
        return {"choices": [choice]} | ({"usage": self.usage} if self.usage else {})

    def close(self) -> None:
        self.hang.set()
        self.stopped.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@contextmanager
def judging(say: Callable[[str, int], Said] | str = "Score: 7", **settings: Any) -> Iterator[Judge]:
    server = Judge((lambda prompt, number: say) if isinstance(say, str) else say, **settings)
    try:
        yield server
    finally:
        server.close()


def outside(prompt: str) -> str:
    """What an obedient judge reads as its instructions: everything that is not fenced. It takes the first boundary
    that its rules name for the true one, and a fence ends at the first line that closes it."""
    found = re.search(rf"{FENCE_START} ([0-9a-f]+) ", prompt)
    assert found, prompt
    boundary = found.group(1)
    kept, inside = [], False
    for line in prompt.split("\n"):
        if line.startswith(f"{FENCE_START} {boundary} "):
            inside = True
        elif line == f"{FENCE_END} {boundary}>>>":
            inside = False
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def finished(
    text: str = "It is 4.",
    *,
    name: str = "t",
    prompt: str = "What is 2 + 2?",
    answer: Any = "4",
    status: Status = "done",
    tool: str | None = None,
) -> Trajectory:
    """An episode whose last turn says `text`, after a tool that said `tool` if there is one."""
    turns: list[Turn] = []
    if tool is not None:
        asking = Message("assistant", "", [ToolCall("look", {"at": "it"}, "c1")])
        reply = Message("tool", tool, tool_call_id="c1", name="look")
        turns.append(Turn([], Completion([1], [0.0], "stop"), asking, [reply]))
    turns.append(Turn([], Completion([1], [0.0], "stop"), Message("assistant", text)))
    asked = [Message("user", prompt)]
    return Trajectory(Task(name, prompt, answer), name, prompt=asked, turns=turns, status=status)


def episode(text: str = "It is 4.", **more: Any) -> FinishedEpisode:
    return FinishedEpisode(finished(text, **more))


def judge_at(url: str, **options: Any) -> Any:
    given = {"base_url": url, "model": "big", "api_key_env": "OPENAI_API_KEY", "retries": 0, "pause": 0.001}
    return model_judge(**given | options)


async def all_scored(judge: Any, *trajectories: Trajectory) -> list[Any]:
    """Return rewards, or what was raised."""
    asked = (judge(FinishedEpisode(each)) for each in trajectories)
    return await asyncio.gather(*asked, return_exceptions=True)


def scored(judge: Any, *trajectories: Trajectory) -> list[Any]:
    """Return rewards, or what was raised, and close the judge, as a run does at its end."""

    async def run() -> list[Any]:
        try:
            return await all_scored(judge, *trajectories)
        finally:
            await judge.close()

    return asyncio.run(run())


def scored_by(pool: Any, trajectories: list[Trajectory]) -> list[Any]:
    """What a pool gives for them, which is closed after it."""

    async def all_of_them() -> list[Any]:
        try:
            return await pool.compute_rewards(trajectories)
        finally:
            await pool.close()

    return asyncio.run(all_of_them())
