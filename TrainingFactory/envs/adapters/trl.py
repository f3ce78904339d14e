"""Environments for the `environment_factory` of TRL's trainers: `trl:snake.py:SnakeEnv`. Public methods are the tools;
`reset(**row)` may return the beginning of the conversation, and `get_reward()` the reward of the episode."""

import asyncio
import functools
import importlib.util
import inspect
import json
from collections.abc import Iterator
from typing import Any

REQUIREMENTS = ["transformers==5.19.0"]
MAX_TASKS = 2**31 - 1


class Adapter:
    """Adapter of one class or function in a file. It returns an environment when it is called with `args`."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        path, colon, factory_name = name.rpartition(":")
        if not colon:
            raise ValueError(f"trl:{name} names no factory. Write trl:FILE.py:FACTORY")
        module = _load_module(path)
        if not callable(getattr(module, factory_name, None)):
            raise ValueError(f"{path} defines no {factory_name}")
        self.name, self.args = factory_name, args
        self.factory = functools.partial(getattr(module, factory_name), **args)
        environment = self.factory()
        if not callable(getattr(environment, "reset", None)):
            raise ValueError(f"{factory_name} in {path} has no method `reset`")
        self.method_names = [
            method
            for method, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
            if not method.startswith("_") and method not in ("reset", "get_reward")
        ]
        get_json_schema = importlib.import_module("transformers.utils").get_json_schema
        self.tools = [
            get_json_schema(getattr(environment, method))["function"] for method in self.method_names
        ]

    def describe(self) -> dict[str, Any]:
        return {"actions": "tools", "tools": self.tools}

    def tasks(self, split: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield rows, each with its own `seed`. The splits have different seeds. To use a dataset instead, name it in
        `data.tasks`."""
        first_seed = (2 * seed + (split == "heldout")) * 2**20
        for index in range(count):
            task_seed = (first_seed + index) % MAX_TASKS
            yield {"id": f"{self.name}-{task_seed}", "metadata": {"seed": task_seed}}

    def reset(self, task: dict[str, Any], seed: int) -> "Episode":
        return Episode(self, task, seed)


class Episode:
    def __init__(self, adapter: Adapter, task: dict[str, Any], seed: int) -> None:
        self._method_names = adapter.method_names
        self._environment = adapter.factory()
        prompt = task.get("prompt") or ""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        row = {"seed": seed, "prompt": messages, "answer": task.get("answer"), **task.get("metadata", {})}
        observation = _await_value(self._environment.reset(**_select_arguments(self._environment.reset, row)))
        if observation is not None:  # as in TRL, the end of the last message
            if not isinstance(observation, str):
                raise ValueError("reset returned an observation that is no text; images are not supported")
            last_message = messages[-1]
            messages[-1] = {**last_message, "content": last_message["content"] + observation}
        self.messages = messages

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = message["tool_calls"]
        return {"messages": [self._call_method(call) for call in calls], "done": not calls}

    def _call_method(self, call: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = {"role": "tool", "tool_call_id": call["id"]}
        try:
            result = _await_value(getattr(self._environment, call["name"])(**call["arguments"]))
        except Exception as error:  # the model reads it, as in TRL
            return reply | {"content": json.dumps({"error": str(error)}), "ok": False}
        return reply | {"content": str(result)}

    def score(self) -> dict[str, Any]:
        if not hasattr(self._environment, "get_reward"):
            return {}
        reward = _await_value(self._environment.get_reward())
        return {} if reward is None else {"reward": float(reward)}


def _await_value(value: Any) -> Any:
    """Return the value, or the result of an async method if the value is its coroutine."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _select_arguments(function: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of `row` for which the function has parameters."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def _load_module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("trl_environment", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
