"""Environments of verifiers v0: `verifiers_v0:NAME`, or `verifiers_v0:FILE.py` with a function `load_environment`. The
environment asks its client for model responses; these requests become the turns of the protocol."""

import importlib
import logging
import random
import re
import signal
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

REQUIREMENTS = ["verifiers==0.2.1"]
HELDOUT_EVERY = (
    5  # without a dataset for evaluation, every fifth of the rows that are shuffled with one seed is held out
)
SHUFFLE_SEED = 0
# verifiers handles signals, which only the main thread may. This process ends at the end of stdin.
signal.signal = lambda *_: None
server: Any = importlib.import_module("__main__")  # server.py
turns: Any = server.load_module("agent_turns", str(Path(__file__).with_name("agent_turns.py")))
vf_types: Any = importlib.import_module("verifiers.types")
vf_errors: Any = importlib.import_module("verifiers.errors")
vf_clients: Any = importlib.import_module("verifiers.clients.client")
CURRENT_EPISODE: ContextVar["Episode | None"] = ContextVar("CURRENT_EPISODE", default=None)


class Adapter:
    """Adapter of one environment. `args` are the arguments of `load_environment`."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        load_environment = importlib.import_module("verifiers.utils.env_utils").load_environment
        try:
            self.name = turns.import_file(name) if name.endswith(".py") else name
            self.environment = load_environment(self.name, **args)
        except Exception as error:  # whatever code of the environment raises
            raise ValueError(
                f"verifiers_v0:{name}: {error} (installed packages: {sys.prefix}; for an environment of v1, write "
                "verifiers:NAME)"
            ) from error
        environments = [self.environment, *getattr(self.environment, "envs", [])]  # of an EnvGroup
        if any(environment.requires_group_rollouts for environment in environments):
            raise ValueError(
                f"verifiers_v0:{name} has a reward that compares the episodes of a group; not supported"
            )
        if any(environment.message_type != "chat" for environment in environments):
            raise ValueError(f"verifiers_v0:{name} completes plain texts; only chats are supported")
        rubrics = [environment.rubric for environment in environments]
        self.reward_names = {
            name
            for rubric in rubrics
            for name, weight in zip(  # noqa: B905
                rubric._get_reward_func_names(), rubric._get_reward_weights()
            )
            if weight
        }
        logger = logging.getLogger("verifiers")
        logger.setLevel(logging.ERROR)
        logger.addHandler(FailedRewardHandler())

    def describe(self) -> dict[str, Any]:
        return {"actions": "tools", "tools": []}

    def tasks(self, split: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield rows of the split in an order that depends on the seed. The splits have no row in common."""
        is_heldout = split == "heldout"
        train_rows, eval_rows = self.environment.build_dataset(), self.environment.build_eval_dataset()
        dataset_name = "eval" if train_rows is None or (eval_rows is not None and is_heldout) else "train"
        rows: Any = eval_rows if dataset_name == "eval" else train_rows
        indices = list(range(len(rows)))
        if train_rows is None or eval_rows is None:
            random.Random(SHUFFLE_SEED).shuffle(indices)
            indices = [index for i, index in enumerate(indices) if (i % HELDOUT_EVERY == 0) == is_heldout]
        random.Random(seed).shuffle(indices)
        for index in indices[:count]:
            row = rows[index]
            prompt = row["prompt"]
            yield {
                "id": f"{self.name}-{dataset_name}-{index}",
                "prompt": prompt if isinstance(prompt, str) else turns.strip_message(prompt[-1])["content"],
                "answer": row.get("answer"),
                "metadata": {"dataset": dataset_name, "index": index},
            }

    def find_row(self, task: dict[str, Any]) -> dict[str, Any]:
        metadata = task.get("metadata", {})
        environment = self.environment
        builders = {"train": environment.build_dataset, "eval": environment.build_eval_dataset}
        rows = builders[metadata["dataset"]]() if metadata.get("dataset") in builders else None
        index = metadata.get("index")
        if rows is None or not isinstance(index, int) or not 0 <= index < len(rows):
            raise ValueError(
                f"task {task['id']} is no task of {self.name}: its metadata has no `dataset` and `index` of one"
            )
        return rows[index]

    async def reset(self, task: dict[str, Any], seed: int) -> "Episode":
        episode = Episode(self)
        await episode.start(episode.run(self.find_row(task)))
        return episode

    async def close(self) -> None:
        await self.environment._teardown()


class FailedRewardHandler(logging.Handler):
    """Log handler that records failed reward functions. verifiers logs a reward function that raises and counts it as
    0; here such an episode is not scored."""

    def emit(self, record: logging.LogRecord) -> None:
        log_message, episode = record.getMessage(), CURRENT_EPISODE.get()
        match = re.match(r"Error calling reward function (\w+)", log_message)
        if match and episode is not None and match[1] in episode.adapter.reward_names:
            episode.reward_errors.append(log_message)


class Episode(turns.AgentEpisode):
    """A rollout of the environment with one row of its dataset."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter
        self.reward_errors: list[str] = []  # of reward functions

    async def run(self, row: dict[str, Any]) -> Any:
        CURRENT_EPISODE.set(self)
        return await self.adapter.environment.run_rollout(row, Client(self), "policy", {})

    def find_problem(self, result: Any) -> str:
        error = result.get("error")
        return "" if error is None else error["error_chain_repr"]

    def make_final_answer(self, result: Any) -> dict[str, Any]:
        """Return the stop condition, and the messages that the environment added after the last turn."""
        rows = [_to_chat_message(message) for message in result["completion"] or []]
        last_turn_index = max((i for i, row in enumerate(rows) if row["role"] == "assistant"), default=-1)
        messages = [turns.strip_message(row) for row in rows[last_turn_index + 1 :]]
        return {"messages": messages, "stop_reason": result["stop_condition"]}

    async def score(self) -> dict[str, Any]:
        """End the rollout, and return the reward and the metrics of its rubric."""
        result = await self.finish()
        if self.reward_errors:
            raise RuntimeError("; ".join(self.reward_errors))
        return {"reward": result["reward"], "parts": result["metrics"]}


class Client(vf_clients.Client):
    """Client of the environment whose model responses are the turns of an episode."""

    def __init__(self, episode: Episode) -> None:
        super().__init__(episode)
        self._episode = episode

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        functions = [tool.model_dump(include={"name", "description", "parameters"}) for tool in tools or []]
        request = {
            "messages": [_to_chat_message(message) for message in prompt],
            "tools": [{"type": "function", "function": function} for function in functions],
        }
        turn = await self._episode.request_message(request)
        if turn is None:
            raise vf_errors.OverlongPromptError(
                "the client ended the episode"
            )  # ends a rollout, which is scored
        calls = [{"id": call["id"], **call["function"]} for call in turn.get("tool_calls", [])]
        message = {"content": turn["content"], "tool_calls": calls or None}
        finish_reason = "tool_calls" if calls else "stop"
        return vf_types.Response(
            id="turn",
            created=0,
            model=model,
            message={**message, "finish_reason": finish_reason, "is_truncated": False},
        )

    def _raise_no_api(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a client without an API")

    setup_client = to_native_tool = to_native_prompt = get_native_response = _raise_no_api
    raise_from_native_response = from_native_response = _raise_no_api

    async def close(self) -> None: ...


def _to_chat_message(message: Any) -> dict[str, Any]:
    """Return a message in the shape of chat completions."""
    row = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    return {**row, "role": "user"} if row["role"] == "text" else row
