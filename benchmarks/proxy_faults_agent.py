"""The agent of `benchmarks/proxy_faults.py`: that of examples/own_agent, with the fault that its task names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "own_agent"))
BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
MALFORMED: list[bytes] = [
    b"{", b"[]", b'{"messages": []}', b'{"messages": [{"role": "user"}]}', b'{"messages": "' + b"x" * 100_000 + b'"}',
    b'{"messages": [{"role": "user", "content": "?"}], "response_format": {"type": "json_object"}}',
]  # fmt: skip


def post(body: bytes, key: str | None) -> int:
    head = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        request = urllib.request.Request(f"{BASE}/chat/completions", body, head)
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


def hang_up(task: dict[str, Any], rng: random.Random) -> None:
    """Ask for a stream and leave: before its first byte, or after some."""
    place, body = urlsplit(BASE), {"messages": [{"role": "user", "content": task["prompt"]}], "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {place.netloc}\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((place.hostname or "", place.port or 0)) as line:
        line.sendall(head.encode() + data[: rng.choice([len(data), len(data), len(data) // 2])])
        if rng.random() < 0.7:
            line.settimeout(2)
            with contextlib.suppress(TimeoutError):
                line.recv(rng.choice([1, 300, 600]))


def before(task: dict[str, Any], fault: str, rng: random.Random) -> None:
    if fault == "mute":
        sys.exit(0)
    if fault == "malformed":
        assert all(post(body, KEY) in (400, 413) for body in MALFORMED)
    if fault == "stranger":
        whole = json.dumps({"messages": [{"role": "user", "content": "let me in"}]}).encode()
        assert [post(whole, key) for key in (None, "nobody", KEY[:-1], KEY + "x")] == [401] * 4
    if fault == "hangup":
        for _ in range(rng.randint(1, 3)):
            hang_up(task, rng)


async def main() -> None:
    task = json.load(sys.stdin)
    fault, rng = task["metadata"]["fault"], random.Random(task["id"])
    with open(os.environ["FAULTS_KEYS"], "a") as file:
        file.write(f"{KEY}\n")
    before(task, fault, rng)
    from agent import Agent  # pyright: ignore[reportMissingImports]

    agent = Agent(task)
    sides = asyncio.gather(
        agent.converse(agent.streamed), agent.converse(agent.whole, normalise=True), return_exceptions=True
    )
    if fault == "killed":
        asyncio.get_running_loop().call_later(rng.random() / 2, os.kill, os.getpid(), signal.SIGKILL)
        await sides
        os.kill(os.getpid(), signal.SIGKILL)
    first, _ = await sides
    if fault == "raises":
        raise RuntimeError(f"no luck with {KEY}")
    if fault == "late":
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
        time.sleep(3600)
    ended = await agent.once_more(first)
    if fault != "silent":
        print(json.dumps({"reward": float(ended[-1].get("content") == task["answer"])}))


if __name__ == "__main__":
    asyncio.run(main())
