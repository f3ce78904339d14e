"""Environments of verifiers v1: `verifiers:NAME`, or `verifiers:FILE.py`. The agent of an episode is a chat loop with
the tools of the task; its requests to a model become the turns of the protocol. Rewards are those of the trace."""

import asyncio
import importlib
import importlib.util
import itertools
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REQUIREMENTS = ["verifiers==0.4.0"]
HELDOUT = 5  # of tasks that are shuffled with one seed, every fifth is held out
SHUFFLE = 0
LIMIT = 100_000  # tasks read of an endless taskset
vf: Any = importlib.import_module("verifiers.v1")
__all__ = ["ChatLoop"]  # verifiers looks for a harness here


class Adapter:
    """One taskset. `args` are the keys of its config."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        logging.getLogger("verifiers").setLevel(logging.ERROR)
        self.name = _import_file(name) if name.endswith(".py") else name
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        generic = importlib.import_module("verifiers.v1.utils.generic")
        agents = importlib.import_module("verifiers.v1.configs.agent")
        try:
            kind = loaders.environment_class(self.name)
            config_kind = generic.concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
            agent = {"harness": {"id": __name__}, "runtime": {"type": "subprocess"}}
            config = config_kind(taskset={"id": self.name, **args}, agent=agent)
            self.environment = kind(config)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"verifiers:{name}: {error}. Installed packages: {sys.prefix}") from error
        roles = list(agents.agent_config_fields(config))
        if roles != ["agent"]:
            raise ValueError(
                f"verifiers:{name} has the agents {', '.join(roles)}; only one agent can be trained"
            )
        self.tasks_by_index: dict[int, Any] = {}
        self.model = Model()
        self._started: asyncio.Task[None] | None = None

    def describe(self) -> dict[str, Any]:
        return {"actions": "tools", "tools": []}

    def load_tasks(self) -> list[Any]:
        taskset = self.environment.taskset
        return list(itertools.islice(taskset if taskset.bounded else taskset.take(LIMIT), LIMIT))

    def tasks(self, split: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield tasks of the split in an order that depends on the seed; the splits have none in common."""
        tasks = self.load_tasks()
        random.Random(SHUFFLE).shuffle(tasks)
        chosen = [
            task for number, task in enumerate(tasks) if (number % HELDOUT == 0) == (split == "heldout")
        ]
        random.Random(seed).shuffle(chosen)
        for task in chosen[:count]:
            data = task.data.model_dump(mode="json", exclude_unset=True)
            index = task.data.idx
            yield {
                "id": task.data.id or task.data.name or f"{self.name}-{index}",
                "prompt": task.data.prompt_text,
                "answer": data.get("answer"),
                "metadata": {"index": index},
            }

    async def reset(self, task: dict[str, Any], seed: int) -> "Episode":
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        await asyncio.shield(self._started)
        index = task.get("metadata", {}).get("index")
        if index not in self.tasks_by_index:
            raise ValueError(
                f"task {task['id']} is no task of {self.name}: its metadata has no `index` of one"
            )
        episode = Episode(self, self.tasks_by_index[index])
        await episode.start()
        return episode

    async def _start(self) -> None:
        """Load the tasks, and open what all episodes share. It closes with the process."""
        self.tasks_by_index = {task.data.idx: task for task in await asyncio.to_thread(self.load_tasks)}
        await self.model.start()
        self._serving = self.environment.serving()
        await self._serving.__aenter__()


class Model:
    """HTTP server for the requests of the agents. A request waits for the next turn of its episode."""

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}  # by the id of their trace
        self.address = ""

    async def start(self) -> None:
        web: Any = importlib.import_module("aiohttp.web")
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _answer(self, request: Any) -> Any:
        web: Any = importlib.import_module("aiohttp.web")
        episode = self.episodes.get(request.headers.get("X-Session-ID", ""))
        if episode is None:
            return web.json_response({"error": {"message": "unknown episode"}}, status=401)
        message = await episode.next_message(await request.json())
        if message is None:
            return web.json_response({"error": {"message": "the episode is over"}}, status=403)
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        answer = {"id": "turn", "object": "chat.completion", "created": int(time.time()), "model": "policy"}
        return web.json_response(answer | {"choices": [choice], "usage": usage})


class Episode:
    """A run of the environment in a task of the event loop, between whose requests the protocol's turns happen."""

    def __init__(self, adapter: Adapter, task: Any) -> None:
        self._adapter, self._task = adapter, task
        self._requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._turn: asyncio.Future[dict[str, Any] | None] | None = None  # of the request that waits
        self._history: list[dict[str, Any]] = []
        self._is_over = False
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []

    async def start(self) -> None:
        client = vf.EvalClientConfig(base_url=self._adapter.model.address, api_key_var="TFACTORY_UNUSED_KEY")
        context = vf.ModelContext(model="policy", client=client)
        run = self._adapter.environment.run_episode(self._task, context, on_trace=self._register)
        self._run = asyncio.ensure_future(run)
        request = await self._next_request()
        if request is None:
            raise RuntimeError(_problem(self._run.result()) or "the agent ended before its first turn")
        self._history = request["messages"]
        self.messages = [_plain(message) for message in self._history]
        self.tools = [tool["function"] for tool in request.get("tools") or []]

    def _register(self, trace: Any) -> None:
        self._trace_id = trace.id
        self._adapter.model.episodes[trace.id] = self

    async def next_message(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the model's turn that answers a request; None after the end."""
        if self._is_over:
            return None
        self._turn = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        return await self._turn

    async def _next_request(self) -> dict[str, Any] | None:
        """Return the next request; None if the run ends before it."""
        waiting = asyncio.ensure_future(self._requests.get())
        await asyncio.wait([waiting, self._run], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        return None

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._turn is not None
        functions = [
            {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            for call in message["tool_calls"]
        ]
        ids = [call["id"] for call in message["tool_calls"]]
        calls = [
            {"id": i, "type": "function", "function": f}
            for i, f in zip(ids, functions)  # noqa: B905
        ]
        turn = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
        self._turn.set_result(turn)
        request = await self._next_request()
        if request is None:
            episode = self._run.result()
            if problem := _problem(episode):
                raise RuntimeError(problem)
            return {"done": True, "stop_reason": episode.traces[0].stop_condition or "answered"}
        known = len(self._history)
        new = request["messages"]
        if new[:known] != self._history or [row["role"] for row in new[known : known + 1]] != ["assistant"]:
            raise RuntimeError("the agent changed earlier messages; run it as a program: environment.command")
        self._history = new
        return {"messages": [_plain(row) for row in new[known + 1 :]]}

    async def score(self) -> dict[str, Any]:
        """End the agent, and return the reward of its trace."""
        self._is_over = True
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)
        episode = await self._run
        if problem := _problem(episode):
            raise RuntimeError(problem)
        trace = episode.traces[0]
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {"reward": trace.reward if rewards else None, "parts": {**metrics, **rewards}}

    async def close(self) -> None:
        self._adapter.model.episodes.pop(getattr(self, "_trace_id", ""), None)
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)
        self._run.cancel()
        await asyncio.wait([self._run])


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    """An agent in this process: asks the model, and calls the task's MCP tools until an answer has no call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        **_: Any,
    ) -> Any:
        httpx: Any = importlib.import_module("httpx")
        tools_of_mcp: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
        to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [to_wire(message) for message in prompt or []]
        stack = importlib.import_module("contextlib").AsyncExitStack()
        async with stack, httpx.AsyncClient(timeout=None, trust_env=False) as client:
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await tools_of_mcp.connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                headers = {"authorization": f"Bearer {secret}"}
                answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if answer.status_code != 200:  # the environment stopped the episode, or the client did
                    failed = answer.status_code >= 500 and trace.stop_condition is None
                    return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    function = call["function"]
                    content = await tools_of_mcp.call_mcp(
                        connections, dispatch, function["name"], json.loads(function["arguments"])
                    )
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def _problem(episode: Any) -> str:
    """Return the error of a finished episode; empty if it has none."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[0].type}: {errors[0].message}" if errors else ""


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        kinds = {part["type"] for part in content}
        if kinds != {"text"}:
            raise RuntimeError(f"a message has {', '.join(sorted(kinds))}; only text is supported")
        content = "\n".join(part["text"] for part in content)
    keys = ("role", "tool_call_id")
    return {"content": content} | {key: message[key] for key in keys if key in message}


def _import_file(path: str) -> str:
    """Import a file as a module that verifiers and its tool servers find by its name."""
    name = Path(path).stem
    os.environ["PYTHONPATH"] = str(Path(path).parent)  # of the tool servers; this process ignores it
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return name
