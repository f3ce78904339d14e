"""Environment server: answers the requests of docs/ENVIRONMENTS.md with one adapter. Started as
`python -I server.py ADAPTER.py` by the interpreter of the adapter's virtual environment. Standard library only.

An adapter file defines `REQUIREMENTS`, a list of packages that `tfactory envs add` installs, and a class `Adapter`:

    class Adapter:
        def __init__(self, name, args): ...          # gymnasium:NAME, and environment.options.args
        def describe(self): ...                      # {"actions": "text"}, or {"actions": "tools", "tools": [...]}
        def tasks(self, split, seed, count): ...     # iterable of {"id", "prompt", "answer", "metadata"}
        def reset(self, task, seed): ...             # a new episode
        def close(self): ...                         # optional

    class Episode:
        messages = [{"role": "user", "content": "..."}]  # the conversation before the model's first turn
        tools = [...]                                # optional; default: those of `describe`
        def step(self, message): ...                 # {"messages", "done", "reward", "stop_reason", "metrics"}
        def score(self): ...                         # optional: {"reward", "parts"}
        def close(self): ...                         # optional

Each method is a plain function or an async function. Plain functions of an episode run in a thread of this episode.
Printed text goes to stderr. Raise `ValueError` for a wrong name or argument: its text is shown without the traceback.
`ConnectionError` and `TimeoutError` mean that the episode is lost, and that another one may work.
"""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 8 * 2**20
LOST_ERRORS = (ConnectionError, TimeoutError, asyncio.TimeoutError)  # the last two differ in Python 3.10
CLOSE_SECONDS = 1.5  # for the open episodes to close after the end of stdin


class Server:
    """Server that runs the requests of one episode in their order and those of different episodes concurrently."""

    def __init__(self, adapter_file: str, answer_fd: int) -> None:
        self._adapter_file, self._answer_fd = adapter_file, answer_fd
        self._adapter: Any = None
        self._episodes: dict[str, Any] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._episode_locks: dict[str, asyncio.Lock] = {}
        self._running_tasks: set[asyncio.Task[None]] = set()

    async def serve(self, requests: asyncio.StreamReader) -> None:
        """Answer requests until stdin ends, then close the open episodes."""
        while line := await requests.readline():
            if line.strip():
                task = asyncio.ensure_future(self._answer_request(json.loads(line)))
                self._running_tasks.add(task)
                task.add_done_callback(self._running_tasks.discard)
        await asyncio.wait_for(self._close_episodes(), CLOSE_SECONDS)

    async def _close_episodes(self) -> None:
        close_calls = [self.close({"episode": episode_id}) for episode_id in list(self._episodes)]
        await asyncio.gather(*close_calls, return_exceptions=True)
        if (close_adapter := getattr(self._adapter, "close", None)) is not None:
            await self._call("", close_adapter)

    async def _answer_request(self, request: Any) -> None:
        request_id, method = request.get("id"), request.get("method")
        answer: dict[str, Any] = {"id": request_id}
        try:
            if method not in ("version", "tasks", "reset", "step", "score", "close"):
                raise ValueError(f"unknown method {method!r}")
            lock = self._episode_locks.setdefault(str(request.get("episode", "")), asyncio.Lock())
            async with lock:
                answer["result"] = await getattr(self, method)(request)
            answer_line = json.dumps(answer, default=to_plain).encode() + b"\n"
            if len(answer_line) > MAX_MESSAGE_BYTES:
                raise ValueError(f"the answer has {len(answer_line)} bytes, more than {MAX_MESSAGE_BYTES}")
        except (Exception, SystemExit) as error:
            if not isinstance(error, ValueError):
                with contextlib.suppress(OSError):
                    traceback.print_exc()
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            error_body = {"message": text[:2000]} | ({"lost": True} if isinstance(error, LOST_ERRORS) else {})
            answer_line = json.dumps({"id": request_id, "error": error_body}).encode() + b"\n"
        while answer_line:
            answer_line = answer_line[os.write(self._answer_fd, answer_line) :]

    async def version(self, request: Any) -> Any:
        if request.get("protocol") != PROTOCOL_VERSION:
            raise ValueError(f"this server speaks protocol {PROTOCOL_VERSION}, not {request.get('protocol')}")
        return await self._call("", self._load_adapter, request.get("name", ""), request.get("args", {}))

    def _load_adapter(self, name: str, args: Any) -> Any:
        module = load_module("tfactory_adapter", self._adapter_file)
        self._adapter = module.Adapter(name, args)
        versions = find_package_versions(module.REQUIREMENTS)
        return {"protocol": PROTOCOL_VERSION, "name": name, "versions": versions, **self._adapter.describe()}

    async def tasks(self, request: Any) -> Any:
        arguments = (request["split"], request["seed"], request["count"])
        return {"tasks": await self._call("", lambda: list(self._adapter.tasks(*arguments)))}

    async def reset(self, request: Any) -> Any:
        episode_id = str(request["episode"])
        episode = await self._call(episode_id, self._adapter.reset, request["task"], request["seed"])
        self._episodes[episode_id] = episode
        answer = {"messages": episode.messages}
        return answer | ({"tools": episode.tools} if hasattr(episode, "tools") else {})

    async def step(self, request: Any) -> Any:
        return await self._call(request["episode"], self._get_episode(request).step, request["message"])

    async def score(self, request: Any) -> Any:
        score_episode = getattr(self._get_episode(request), "score", None)
        return {} if score_episode is None else await self._call(request["episode"], score_episode)

    async def close(self, request: Any) -> Any:
        episode_id = str(request["episode"])
        episode = self._episodes.pop(episode_id, None)
        try:
            if (close_episode := getattr(episode, "close", None)) is not None:
                await self._call(episode_id, close_episode)
        finally:
            self._episode_locks.pop(episode_id, None)
            if (thread_pool := self._pools.pop(episode_id, None)) is not None:
                thread_pool.shutdown(wait=False)
        return {}

    def _get_episode(self, request: Any) -> Any:
        if request["episode"] not in self._episodes:
            raise ValueError(f"there is no episode {request['episode']!r}; reset it first")
        return self._episodes[request["episode"]]

    async def _call(self, episode_id: str, function: Any, *arguments: Any) -> Any:
        """Call a function in the thread of the episode, or await it if it is async."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        if episode_id not in self._pools:
            self._pools[episode_id] = ThreadPoolExecutor(1, f"episode {episode_id}")
        return await asyncio.get_running_loop().run_in_executor(self._pools[episode_id], function, *arguments)


def to_plain(value: Any) -> Any:
    """Convert numpy's values to numbers or lists, and other objects to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def find_package_versions(requirements: list[str]) -> dict[str, str]:
    """Return the installed version of every package in a list of requirements."""
    package_names = [re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0] for requirement in requirements]
    return {name: importlib.metadata.version(name) for name in package_names}


def load_module(name: str, path: str) -> Any:
    """Import a file as the module `name`. Adapters use this to load files that they share."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def redirect_pipes() -> tuple[int, int]:
    """Move the pipes to other descriptors: prints go to stderr, and subprocesses have an empty stdin."""
    request_fd, answer_fd = os.dup(0), os.dup(1)  # not inherited by subprocesses
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return request_fd, answer_fd


async def main(adapter_file: str) -> None:
    request_fd, answer_fd = redirect_pipes()
    request_stream = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES + 1)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(request_stream), os.fdopen(request_fd, "rb")
    )
    await Server(adapter_file, answer_fd).serve(request_stream)


if __name__ == "__main__":
    exit_status = 0
    try:
        asyncio.run(main(sys.argv[1]))
    except (asyncio.TimeoutError, BrokenPipeError, KeyboardInterrupt):  # noqa: UP041
        pass
    except BaseException:
        traceback.print_exc()
        exit_status = 1
    sys.stderr.flush()
    os._exit(exit_status)  # threads of stuck episodes would keep the process alive
