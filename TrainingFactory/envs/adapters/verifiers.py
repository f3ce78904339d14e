"""Environments of verifiers v1: `verifiers:NAME`, or `verifiers:FILE.py`. The agent of an episode is a chat loop with
the tools of the task; its requests to a model become the turns of the protocol. The reward of an episode is the reward
of its trace."""

import asyncio
import importlib
import itertools
import json
import logging
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REQUIREMENTS = ["verifiers==0.4.0"]
HELDOUT_EVERY = 5  # of tasks that are shuffled with one seed, every fifth is held out
SHUFFLE_SEED = 0
MAX_TASKS = 100_000  # tasks read of an endless taskset
server: Any = importlib.import_module("__main__")  # server.py
turns: Any = server.load_module("agent_turns", str(Path(__file__).with_name("agent_turns.py")))
vf: Any = importlib.import_module("verifiers.v1")
__all__ = ["ChatLoop"]  # verifiers looks for a harness here


class Adapter:
    """Adapter of one taskset. `args` are the keys of its config."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        logging.getLogger("verifiers").setLevel(logging.ERROR)
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        generic = importlib.import_module("verifiers.v1.utils.generic")
        agents = importlib.import_module("verifiers.v1.configs.agent")
        try:
            self.name = turns.import_file(name) if name.endswith(".py") else name
            env_class = loaders.environment_class(self.name)
            config_class = generic.concrete_type(env_class, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
            agent_config = {"harness": {"id": __name__}, "runtime": {"type": "subprocess"}}
            config = config_class(taskset={"id": self.name, **args}, agent=agent_config)
            self.environment = env_class(config)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"verifiers:{name}: {error} (installed packages: {sys.prefix}; for an environment of v0, with a "
                "function `load_environment`, write verifiers_v0:NAME)"
            ) from error
        agent_names = list(agents.agent_config_fields(config))
        if agent_names != ["agent"]:
            raise ValueError(
                f"verifiers:{name} has the agents {', '.join(agent_names)}; only one agent can be trained"
            )
        self.tasks_by_index: dict[int, Any] = {}
        self.server = ModelServer()
        self._start_task: asyncio.Task[None] | None = None

    def describe(self) -> dict[str, Any]:
        return {"actions": "tools", "tools": []}

    def load_tasks(self) -> list[Any]:
        taskset = self.environment.taskset
        return list(itertools.islice(taskset if taskset.bounded else taskset.take(MAX_TASKS), MAX_TASKS))

    def tasks(self, split: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield tasks of the split in an order that depends on the seed. The splits have no task in common."""
        tasks = self.load_tasks()
        random.Random(SHUFFLE_SEED).shuffle(tasks)
        split_tasks = [
            task for i, task in enumerate(tasks) if (i % HELDOUT_EVERY == 0) == (split == "heldout")
        ]
        random.Random(seed).shuffle(split_tasks)
        for task in split_tasks[:count]:
            columns = task.data.model_dump(mode="json", exclude_unset=True)
            index = task.data.idx
            yield {
                "id": task.data.id or task.data.name or f"{self.name}-{index}",
                "prompt": task.data.prompt_text,
                "answer": columns.get("answer"),
                "metadata": {"index": index},
            }

    async def reset(self, task: dict[str, Any], seed: int) -> "Episode":
        if self._start_task is None:
            self._start_task = asyncio.ensure_future(self._start_serving())
        await asyncio.shield(self._start_task)
        index = task.get("metadata", {}).get("index")
        if index not in self.tasks_by_index:
            raise ValueError(
                f"task {task['id']} is no task of {self.name}: its metadata has no `index` of one"
            )
        episode = Episode(self, self.tasks_by_index[index])
        await episode.open()
        return episode

    async def _start_serving(self) -> None:
        """Load the tasks, and open the resources that all episodes share. They close when the process ends."""
        self.tasks_by_index = {task.data.idx: task for task in await asyncio.to_thread(self.load_tasks)}
        await self.server.start()
        self._serving_context = self.environment.serving()
        await self._serving_context.__aenter__()


class ModelServer:
    """HTTP server that agents call as their model. Each request waits until its episode is given the next turn."""

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}  # by the id of their trace
        self.address = ""

    async def start(self) -> None:
        web: Any = importlib.import_module("aiohttp.web")
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._answer_request)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _answer_request(self, request: Any) -> Any:
        web: Any = importlib.import_module("aiohttp.web")
        episode = self.episodes.get(request.headers.get("X-Session-ID", ""))
        if episode is None:
            return web.json_response({"error": {"message": "unknown episode"}}, status=401)
        message = await episode.request_message(await request.json())
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


class Episode(turns.AgentEpisode):
    """One episode: a run of the environment with one task. `ModelServer` receives its requests."""

    def __init__(self, adapter: Adapter, task: Any) -> None:
        super().__init__()
        self._adapter, self._task = adapter, task

    async def open(self) -> None:
        client = vf.EvalClientConfig(base_url=self._adapter.server.address, api_key_var="TFACTORY_UNUSED_KEY")
        context = vf.ModelContext(model="policy", client=client)
        await self.start(self._adapter.environment.run_episode(self._task, context, on_trace=self._add_trace))

    def _add_trace(self, trace: Any) -> None:
        self._trace_id = trace.id
        self._adapter.server.episodes[trace.id] = self

    def find_problem(self, result: Any) -> str:
        errors = [*result.errors, *(error for trace in result.traces for error in trace.errors)]
        return f"{errors[0].type}: {errors[0].message}" if errors else ""

    def make_final_answer(self, result: Any) -> dict[str, Any]:
        return {"stop_reason": result.traces[0].stop_condition or "answered"}

    async def score(self) -> dict[str, Any]:
        """End the agent, and return the reward of its trace."""
        trace = (await self.finish()).traces[0]
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {"reward": trace.reward if rewards else None, "parts": {**metrics, **rewards}}

    async def close(self) -> None:
        self._adapter.server.episodes.pop(getattr(self, "_trace_id", ""), None)
        await super().close()


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    """Agent loop in this process: it requests a turn and runs the turn's MCP calls, until a turn has no call."""

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
        mcp: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
        message_to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
        system_prompt, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        exit_stack = importlib.import_module("contextlib").AsyncExitStack()
        async with exit_stack, httpx.AsyncClient(timeout=None, trust_env=False) as client:
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await mcp.connect_mcp({"mcpServers": servers}, exit_stack)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                headers = {"authorization": f"Bearer {secret}"}
                answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if answer.status_code != 200:  # the environment stopped the episode, or the client did
                    has_failed = answer.status_code >= 500 and trace.stop_condition is None
                    return vf.ProgramResult(exit_code=int(has_failed), stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    function = call["function"]
                    content = await mcp.call_mcp(
                        connections, dispatch, function["name"], json.loads(function["arguments"])
                    )
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
