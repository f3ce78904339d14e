"""Environments behind a server of OpenEnv: `openenv:http://127.0.0.1:8000`. Each episode is a session over a WebSocket.
Actions are tool calls if the server has MCP tools, text if an action has one text field, else JSON."""

import contextlib
import importlib
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

REQUIREMENTS = ["websockets==17.4"]
MAX_TASKS = 2**31 - 1
MAX_ANSWER_BYTES = 8 * 2**20
SESSION_WAIT_SECONDS = 20.0  # for the server to release a session of an episode that has ended
MCP_FIELDS = {"tool_name", "arguments"}


class Adapter:
    """Adapter of one server. `args` are the arguments of `reset`, and `actions`: "text", "tools" or "json"; `text`:
    name of the observation's field that the model reads; `sessions`: 1 for a server with one session."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        if not name.startswith(("http://", "https://")):
            raise ValueError(f"openenv:{name} is no address. Write openenv:http://HOST:PORT")
        self.connect: Any = importlib.import_module("websockets.sync.client").connect
        self.url = name.rstrip("/")
        self.reset_arguments = dict(args)
        actions = self.reset_arguments.pop("actions", None)
        self.text_field = self.reset_arguments.pop("text", None)
        is_single_session = self.reset_arguments.pop("sessions", None) == 1
        schema = self._get_json("/schema")["action"]
        fields = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}
        self.schema = {**schema, "properties": fields}
        text_fields = [key for key, value in fields.items() if value.get("type") == "string"]
        required = schema.get("required") or list(fields)
        self.action_field = required[0] if len(required) == 1 and required[0] in text_fields else None
        session = self.open_session()
        try:
            self.tools = [] if fields and not fields.keys() >= MCP_FIELDS else session.list_tools()
            self.actions = actions or ("tools" if self.tools else "text" if self.action_field else "json")
            if not is_single_session:
                self._check_sessions()
        finally:
            session.close()
        if self.actions == "text" and not self.action_field:
            raise ValueError(f"{self.url}: an action needs the fields {required}; use args.actions=json")

    def _get_json(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return json.loads(answer.read(MAX_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            raise ValueError(f"no OpenEnv server answers at {self.url}{path}: {error}. Start it") from error

    def _check_sessions(self) -> None:
        """Raise if the server refuses a second session, because the episodes of a group run concurrently."""
        try:
            Session(self).close()
        except NoSessionLeft as error:
            if error.max_sessions <= 1:
                raise ValueError(
                    f"the server at {self.url} allows one session, so that episodes cannot run concurrently. Set "
                    "SUPPORTS_CONCURRENT_SESSIONS = True in its environment and max_concurrent_envs in create_app; or "
                    "play one episode at a time: environment.options.args.sessions=1 and sampling.slots=1"
                ) from error

    def open_session(self) -> "Session":
        """Open a session. If the server has none left, wait until another episode closes one."""
        deadline = time.monotonic() + SESSION_WAIT_SECONDS
        while True:
            try:
                return Session(self)
            except NoSessionLeft as error:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"the server at {self.url} allows {error.max_sessions} sessions, all in use. "
                        f"Raise its max_concurrent_envs, or set sampling.slots={error.max_sessions}"
                    ) from error
                time.sleep(0.05)

    def describe(self) -> dict[str, Any]:
        return {"actions": self.actions, "tools": self.tools, "schema": self.schema}

    def tasks(self, split: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield tasks, each with its own seed. The splits have different seeds."""
        first_seed = (2 * seed + (split == "heldout")) * 2**20
        for index in range(count):
            task_seed = (first_seed + index) % MAX_TASKS
            yield {"id": f"openenv-{task_seed}", "metadata": {"seed": task_seed}}

    def reset(self, task: dict[str, Any], seed: int) -> "Episode":
        return Episode(self, task, seed)

    def format_observation(self, observation: dict[str, Any]) -> str:
        """Return the text that the model reads: the named field, the only text field, or the observation as JSON."""
        fields = {key: value for key, value in observation.items() if key != "metadata"}
        texts = [value for value in fields.values() if isinstance(value, str)]
        if self.text_field is not None:
            if self.text_field not in fields:
                raise ValueError(f"args.text is {self.text_field!r}; observations have {', '.join(fields)}")
            return str(fields[self.text_field])
        return texts[0] if len(texts) == len(fields) == 1 else json.dumps(fields) if fields else ""


class NoSessionLeft(Exception):
    def __init__(self, text: str, max_sessions: int) -> None:
        super().__init__(text)
        self.max_sessions = max_sessions


class Session:
    """One episode on the server: a WebSocket connection with its own environment."""

    def __init__(self, adapter: Adapter) -> None:
        address = adapter.url.replace("http", "ws", 1) + "/ws"
        self._url = adapter.url
        self._closed_error: Any = importlib.import_module("websockets.exceptions").ConnectionClosed
        self._socket = adapter.connect(address, max_size=MAX_ANSWER_BYTES, open_timeout=30)
        self.send_request("state")  # the server accepts the connection before it refuses the session

    def send_request(self, message_type: str, body: Any = None) -> dict[str, Any]:
        with contextlib.suppress(self._closed_error):  # the reason is the last message of the server
            self._socket.send(json.dumps({"type": message_type} | ({} if body is None else {"data": body})))
        try:
            answer = json.loads(self._socket.recv())
        except self._closed_error as error:
            raise ConnectionError(f"the server at {self._url} closed the connection: {error}") from error
        body = answer.get("data", {})
        if answer.get("type") != "error":
            return body
        error_text = f"{body.get('code')}: {body.get('message')} {body.get('errors', '')}".strip()
        if body.get("code") == "CAPACITY_REACHED":
            self._socket.close()
            raise NoSessionLeft(error_text, int(body.get("max_sessions", 1)))
        raise ValueError(f"OpenEnv {message_type}: {error_text}")

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the server's MCP tools; an empty list if it has none."""
        try:
            observation = self.send_request("step", {"type": "list_tools"})["observation"]
        except ValueError:
            return []
        return [
            {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            }
            for tool in observation.get("tools", [])
        ]

    def close(self) -> None:
        with contextlib.suppress(self._closed_error):
            self._socket.send('{"type": "close"}')
        self._socket.close()


class Episode:
    def __init__(self, adapter: Adapter, task: dict[str, Any], seed: int) -> None:
        self._adapter = adapter
        self._session = adapter.open_session()
        arguments = {
            "seed": seed,
            "episode_id": task["id"],
            **adapter.reset_arguments,
            **task.get("metadata", {}),
        }
        answer = self._session.send_request("reset", arguments)
        prompt = task.get("prompt") or []
        observation_text = adapter.format_observation(answer["observation"])
        self.messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if observation_text or not self.messages:
            self.messages.append({"role": "user", "content": observation_text or "Call the tools."})
        self._has_reward = self._is_done = False

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        adapter = self._adapter
        if adapter.actions == "tools":
            return self._call_tools(message["tool_calls"])
        action = message["json"] if adapter.actions == "json" else {adapter.action_field: message["content"]}
        answer = self._session.send_request("step", action)
        content = adapter.format_observation(answer["observation"])
        return self._make_answer([answer], [{"role": "user", "content": content}])

    def _call_tools(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Call the tools in their order. A turn without a call ends the episode."""
        answers, replies = [], []
        for call in calls:
            action = {"type": "call_tool", "tool_name": call["name"], "arguments": call["arguments"]}
            answers.append(self._session.send_request("step", action))
            observation = answers[-1]["observation"]
            is_ok = observation.get("error") is None
            content = _format_result(observation.get("result") if is_ok else observation["error"])
            replies.append({"role": "tool", "tool_call_id": call["id"], "content": content, "ok": is_ok})
            if answers[-1].get("done"):
                break
        result = self._make_answer(answers, replies)
        return result if calls else {**result, "done": True, "stop_reason": "no tool call"}

    def _make_answer(self, answers: list[dict[str, Any]], messages: list[dict[str, Any]]) -> dict[str, Any]:
        rewards = [float(answer["reward"]) for answer in answers if answer.get("reward") is not None]
        self._has_reward |= bool(rewards)
        self._is_done = any(answer.get("done") for answer in answers)
        metrics = {
            name: value
            for answer in answers
            for name, value in (answer.get("metadata") or {}).items()
            if isinstance(value, (int, float))
        }
        reward_field = {"reward": sum(rewards)} if rewards else {}
        return {"messages": messages, "done": self._is_done, "metrics": metrics, **reward_field}

    def score(self) -> dict[str, Any]:
        """Return an outcome of 0, because the steps have all rewards. So an unfinished episode earns 0. A finished
        episode in which no step had a reward gets no outcome."""
        return {} if self._is_done and not self._has_reward else {"reward": 0.0}

    def close(self) -> None:
        self._session.close()


def _format_result(result: Any) -> str:
    """Return the text of a tool's result."""
    if isinstance(result, dict) and result.get("data") is not None:  # fastmcp's result with its parsed value
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result, default=str)
