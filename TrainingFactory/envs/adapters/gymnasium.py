"""Environments of Gymnasium: `gymnasium:FrozenLake-v1`. The model reads the observation as text and answers with an
action, as text or as a call of the tool `act`."""

import importlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any

REQUIREMENTS = ["gymnasium==1.4.0"]
# Names of the actions 0, 1, ... of the toy-text environments, by the beginning of the id.
ACTION_NAMES = {
    "FrozenLake": ["left", "down", "right", "up"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack": ["stick", "hit"],
}
GAME_INSTRUCTIONS = {
    "FrozenLake": "Walk from S to G over the frozen lake. F is ice, H is a hole. Brackets mark where you stand.",
}
HIGHLIGHTED_CELL = re.compile(r"(?:\x1b\[[0-9;]*m)+(.)(?:\x1b\[0m)+")  # a coloured cell of a rendered board
MAX_OBSERVATION_VALUES = 256  # of an observation; larger ones are images
MAX_TASKS = 2**31 - 1  # seeds of numpy


class Adapter:
    """Adapter of one environment id. `args` are the arguments of `gymnasium.make`, and `actions`: "text" or "tools"."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self.gym: Any = importlib.import_module("gymnasium")
        self.name = name
        self.arguments = dict(args)
        self.actions = self.arguments.pop("actions", "text")
        if self.actions not in ("text", "tools"):
            raise ValueError(f"environment.options.args.actions is {self.actions!r}; use text or tools")
        self.render_args: dict[str, str] = {}
        environment = self.make_environment()
        if "ansi" in environment.metadata.get("render_modes", []):
            environment.close()
            self.render_args = {"render_mode": "ansi"}
            environment = self.make_environment()
        base_name = name.rpartition("/")[2]
        self.format = ActionFormat(environment.action_space, _find_by_prefix(ACTION_NAMES, base_name, []))
        num_values = math.prod(getattr(environment.observation_space, "shape", None) or ())
        if num_values > MAX_OBSERVATION_VALUES and not self.render_args:
            raise ValueError(f"{name}: an observation has {num_values} values; images are not supported")
        answer_instruction = "Call act with" if self.actions == "tools" else "Answer with"
        instructions = _find_by_prefix(GAME_INSTRUCTIONS, base_name, f"You act in the environment {name}.")
        self.system_prompt = f"{instructions} {answer_instruction} {self.format.description}."
        environment.close()

    def make_environment(self) -> Any:
        try:
            return self.gym.make(self.name, **self.render_args, **self.arguments)
        except (self.gym.error.Error, TypeError, ImportError) as error:
            raise ValueError(f"gymnasium:{self.name}: {error}") from error

    def describe(self) -> dict[str, Any]:
        return {"actions": self.actions, "tools": [self.tool] if self.actions == "tools" else []}

    @property
    def tool(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"action": self.format.schema}, "required": ["action"]}
        return {"name": "act", "description": "Take an action.", "parameters": parameters}

    def tasks(self, split: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield tasks, each with its own seed. The splits have different seeds."""
        first_seed = (2 * seed + (split == "heldout")) * 2**20
        for index in range(count):
            task_seed = (first_seed + index) % MAX_TASKS
            metadata = {"seed": task_seed}
            yield {"id": f"{self.name}-{task_seed}", "prompt": self.system_prompt, "metadata": metadata}

    def reset(self, task: dict[str, Any], seed: int) -> "Episode":
        return Episode(self, task.get("metadata", {}).get("seed", seed))


class Episode:
    def __init__(self, adapter: Adapter, seed: int) -> None:
        self._adapter = adapter
        self._environment = adapter.make_environment()
        observation, _ = self._environment.reset(seed=seed)
        self.messages = [
            {"role": "system", "content": adapter.system_prompt},
            {"role": "user", "content": self._render(observation)},
        ]
        self._num_invalid = 0

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = message["tool_calls"]
        if self._adapter.actions == "tools" and not calls:
            content = f"Call act with {self._adapter.format.description}."
            return self._make_reply("user", content, 0.0, num_invalid=1)
        if not calls:
            return self._take_action(message["content"], "user", {})
        total_reward, replies, answer = 0.0, [], {}
        for call in calls:
            reply_fields = {"tool_call_id": call["id"], "name": call["name"]}
            answer = self._take_action(call["arguments"]["action"], "tool", reply_fields)
            total_reward += answer["reward"]
            replies += answer["messages"]
            if answer["done"]:
                break
        return {**answer, "messages": replies, "reward": total_reward}

    def _take_action(self, action_text: Any, role: str, reply_fields: dict[str, str]) -> dict[str, Any]:
        try:
            action = self._adapter.format.parse(action_text)
        except ValueError as error:
            return self._make_reply(role, str(error), 0.0, reply_fields=reply_fields, num_invalid=1)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        stop_reason = "terminated" if terminated else "truncated" if truncated else None
        return self._make_reply(role, self._render(observation), float(reward), stop_reason, reply_fields)

    def _make_reply(
        self,
        role: str,
        content: str,
        reward: float,
        stop_reason: Any = None,
        reply_fields: Any = None,
        num_invalid: int = 0,
    ) -> dict[str, Any]:
        self._num_invalid += num_invalid
        return {
            "messages": [{"role": role, "content": content, **(reply_fields or {})}],
            "reward": reward,
            "done": stop_reason is not None,
            "stop_reason": stop_reason,
            "metrics": {"invalid_actions": self._num_invalid},
        }

    def _render(self, observation: Any) -> str:
        if self._adapter.render_args:
            lines = HIGHLIGHTED_CELL.sub(r"[\1]", self._environment.render()).strip("\n").split("\n")
            return "\n".join(line for line in lines if not line.startswith("  ("))  # without the last action
        if isinstance(observation, str):
            return observation
        return json.dumps(observation, default=_to_plain)

    def score(self) -> dict[str, Any]:
        """Return an outcome of 0, because the steps have all rewards. So an episode without a step earns 0."""
        return {"reward": 0.0}

    def close(self) -> None:
        self._environment.close()


class ActionFormat:
    """Text form of an action space."""

    def __init__(self, space: Any, action_names: list[str]) -> None:
        self._space = space
        self._space_type = type(space).__name__
        self._offset = int(getattr(space, "start", 0)) if self._space_type == "Discrete" else 0
        if self._space_type == "Discrete":
            self._action_names = action_names or [str(self._offset + index) for index in range(int(space.n))]
            self.description = "one of " + ", ".join(self._action_names[:50])
            self.schema: dict[str, Any] = {"type": "string", "enum": self._action_names}
        elif self._space_type in ("Box", "MultiDiscrete", "MultiBinary"):
            low, high = (_to_plain(getattr(space, name, None)) for name in ("low", "high"))
            bounds_text = f" from {low} to {high}" if self._space_type == "Box" else ""
            self.description = f"a JSON list of shape {list(space.shape)}{bounds_text}"
            self.schema = {"type": "array"}
        elif self._space_type == "Text":
            self.description = f"a text of {space.min_length} to {space.max_length} characters"
            self.schema = {"type": "string"}
        else:
            raise ValueError(f"the action space {space} is not supported; use Discrete, Box or Text")

    def parse(self, action_text: Any) -> Any:
        """Return the action that a text names; raise ValueError with an explanation for the model if there is none."""
        if self._space_type == "Discrete":
            words = re.findall(r"-?\w+", str(action_text).lower())
            index_by_name = {name.lower(): index for index, name in enumerate(self._action_names)}
            action_indices = [index_by_name[word] for word in words if word in index_by_name]
            if action_indices:
                return self._offset + action_indices[-1]
        elif self._space_type == "Text":
            if self._space.contains(action_text.strip()):
                return action_text.strip()
        elif (values := _find_list(action_text)) is not None:
            array = importlib.import_module("numpy").array(values, dtype=self._space.dtype)
            if self._space.contains(array):
                return array
        raise ValueError(f"{str(action_text).strip()[:80]!r} is no action. Answer with {self.description}.")


def _find_list(text: Any) -> Any:
    """Return the JSON list in a text; None if there is none."""
    if isinstance(text, list):
        return text
    try:
        return json.loads(text[text.index("[") : text.rindex("]") + 1])
    except ValueError:
        return None


def _find_by_prefix(table: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for prefix, value in table.items() if name.startswith(prefix)), default)


def _to_plain(value: Any) -> Any:
    """Return numpy's values as lists of rounded numbers."""
    plain_value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain_value, list):
        return [_to_plain(child) for child in plain_value]
    return float(f"{plain_value:.4g}") if isinstance(plain_value, float) else plain_value
