"""What tests of the proxy share: a proxy on loopback in a thread, and programs that know nothing but the standard
library and call it."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.kits.serve import Said, Script, ScriptSession
from tests.kits.waiting import HANG
from TrainingFactory.agent_api.agent_program import AgentProgram, ProgramRollouts
from TrainingFactory.apps.proxy.proxy import Proxy
from TrainingFactory.common.http import listen
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.types import Completion, SamplingParams, Task, Trajectory

TALK = 'first = ask([say("a")])["choices"][0]["message"]\nask([say("a"), first, say("b")])\n'
REWARD = "/v1/reward"
TASK = Task("t", "Where is it?", "Rome", {"name": "tower"})
# A program: `ask(messages)` returns the whole answer, `say(text)` a user's message.
PROGRAM = """
import json, os, sys, urllib.error, urllib.request
def post(path, body):
    head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request, timeout=30))
def ask(messages, **more):
    return post("/chat/completions", {"messages": messages} | more)
def say(text):
    return {"role": "user", "content": text}
"""


class Talker(Script):
    """A sampler whose sessions go on after a turn."""

    def session(self) -> ScriptSession:
        self.opened += 1
        return _Session(self)


class _Session(ScriptSession):
    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        found = await super().sample(prompt_ids, params)
        if found.finish == "stop":
            self.start = None
        return found


@contextmanager
def proxied(
    sampler: Any, out: Path, token: str | None = None, trained_model: str | None = None, **options: Any
) -> Iterator[httpx.Client]:
    """A client of a proxy, which runs on a port of its own for as long."""
    rollouts = RolloutEngine(ToolEnvironment, sampler.chat, SamplingParams(max_tokens=100), **options)
    proxy = Proxy(rollouts, sampler, out, trained_model)
    bound, started = listen.bind("127.0.0.1", 0), threading.Event()
    runner = listen.make_server(proxy.make_app(token))

    async def serve() -> None:
        started.set()
        await runner.serve([bound])
        await proxy.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(HANG)
    try:
        with httpx.Client(base_url=listen.format_url(bound), timeout=HANG, trust_env=False) as client:
            yield client
    finally:
        runner.should_exit = True
        thread.join(HANG)
        assert not thread.is_alive()


def begin(client: httpx.Client, **body: Any) -> httpx.Client:
    """A client of an episode."""
    key = client.post("/v1/episodes", json=body).json()["key"]
    return httpx.Client(
        base_url=client.base_url, timeout=HANG, trust_env=False, headers={"authorization": f"Bearer {key}"}
    )


def ended(out: Path) -> list[Trajectory]:
    return list(load_trajectories(out))


def play(
    folder: Path, code: str, say: Callable[[str], Said] | Said = "Rome", **options: Any
) -> tuple[list[Trajectory], dict[str, float], Any]:
    """Episodes of a program with this code, what was counted, and the sampler."""
    (folder / "agent.py").write_text(PROGRAM + code, encoding="utf-8")
    sampler = options.pop("sampler", None) or Talker(say if callable(say) else lambda _: say)
    command = shlex.join([sys.executable, "-S", str(folder / "agent.py")])
    program = AgentProgram(command, {"cwd": str(folder), "env": options.pop("env", [])})
    return *play_program(program, sampler, **options), sampler


def play_program(
    program: AgentProgram, sampler: Any, task: Task = TASK, episodes: int = 1, **options: Any
) -> tuple[list[Trajectory], dict[str, float]]:
    params = options.pop("params", SamplingParams(max_tokens=100))

    async def run() -> list[Trajectory]:
        await program.endpoint.open()
        try:
            engine = ProgramRollouts(program, sampler.chat, params, **options)
            [group] = await engine.rollout_batch([task], sampler, episodes)
            return group
        finally:
            await program.endpoint.close()

    return asyncio.run(run()), program.endpoint.pop_metrics()


def line(**row: Any) -> str:
    return f"print({json.dumps(json.dumps(row))})\n"
