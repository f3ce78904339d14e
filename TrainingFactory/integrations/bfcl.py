"""BFCL's multi-turn tasks as environments: `bfcl/multi_turn_base`.

Uses only the data files of the package `bfcl-eval` and the classes behind its tools (a file system, a car, a stock
broker, ...). The model's calls go through our executor, and `ast` parses the calls of the ground truth; no function of
the package that evaluates text is called. docs/BENCHMARKS.md describes what is compared.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from TrainingFactory.common.openai_format import message_from_dict, spec_to_dict
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.envs.builtin.splits import in_split
from TrainingFactory.protocols import Episode, Tool, ToolSource
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import make_validator
from TrainingFactory.types import Message, Reward, Step, Task, ToolCall, ToolResult, ToolSpec

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
SOURCE_PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
FILE_STEMS = {  # class -> stem of its source file and of the file with its function docs
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking", "VehicleControlAPI": "vehicle_control",
}  # fmt: skip
STATELESS_CLASS = "MathAPI"
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
MAX_ARGUMENTS = {"precision": 1000, "exponent": 1000}  # larger values could make one call compute forever
NEW_TOOLS_TEXT = "These functions are new; call them like the others:"


class BfclEnvironment(ToolEnvironment):
    """One conversation with several user requests and tools that share state; each category of BFCL has a subclass. An
    answer without a tool call ends the current request, and the user sends the next one."""

    category: ClassVar[str]
    is_short: ClassVar[bool]  # show only names and types of functions, for models with a short context

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        """Yield at most `count` tasks. The split "all" has all 200 in BFCL's order; train and heldout have separate
        parts of them, shuffled."""
        rows = list(_load_rows(cls.category).values())
        if split != "all":
            # Categories are variants of the same tasks, so the task number assigns the split in all of them.
            rows = [row for row in rows if in_split(f"bfcl {row['id'].rpartition('_')[2]}", split)]
            random.Random(f"bfcl {seed}").shuffle(rows)
        for row in rows[:count]:
            yield Task(row["id"], [message_from_dict(message) for message in row["question"][0]])

    def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = (), **options: Any) -> None:
        rows = _load_rows(self.category)
        if task.id not in rows:
            raise ValueError(f"BFCL's {self.category} has no task {task.id!r}. Remove data.tasks.")
        self.row = rows[task.id]
        missing_functions: dict[str, list[str]] = self.row.get("missed_function", {})
        self._release_turns = {name: int(turn) for turn, names in missing_functions.items() for name in names}
        self._model_scenario, self._expected_scenario = _Scenario(self.row), _Scenario(self.row)
        self._results: list[str] = []  # results of all calls so far
        self._num_earlier_results = 0  # number of results from before the present request
        self.request_results: list[bool] = []  # one entry for each answered request
        functions = [_Function(self, spec) for name in self.row["involved_classes"] for spec in _specs(name)]
        super().__init__(task, [*functions, *tools], **options)
        visible_functions = [
            function for function in functions if function.spec.name not in self._release_turns
        ]
        if self.is_short:
            visible_functions = [_Function(self, _shorten(function.spec)) for function in visible_functions]
        self.tools = [*visible_functions, *self.tools[len(functions) :]]

    async def step(self, message: Message) -> Step:
        if message.tool_calls:
            return await super().step(message)
        self.request_results.append(self._matches_ground_truth())
        self._num_earlier_results = len(self._results)
        if len(self.request_results) == len(self.row["question"]):
            return Step(done=True)
        return Step(self._open_next_request())

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run one of the model's calls on the state of this episode."""
        result = self._model_scenario.call(name, arguments)
        self._results.append(result.content)
        return result

    def reward(self, episode: Episode) -> Reward:
        """Return 1 if every request was answered and matches the ground truth, else 0."""
        num_requests = len(self.row["question"])
        is_solved = len(self.request_results) == num_requests and all(self.request_results)
        return Reward(float(is_solved), parts={"requests": sum(self.request_results) / num_requests})

    def expert(self) -> Iterator[Message]:
        """Yield the calls of the ground truth, one per turn."""
        for calls in self.row["ground_truth"]:
            for name, arguments in calls:
                yield Message("assistant", tool_calls=[ToolCall(name, deepcopy(arguments))])
            yield Message("assistant", "Done." if calls else "I cannot do that with what I have.")

    def _matches_ground_truth(self) -> bool:
        """Return whether the model's state equals the ground truth's, and the model saw all of its results."""
        calls = self.row["ground_truth"][len(self.request_results)]
        results = Counter(self._expected_scenario.call(name, arguments).content for name, arguments in calls)
        if not calls:  # the request cannot be fulfilled, and the model's reply is not judged
            return True
        if len(self._results) == self._num_earlier_results or results - Counter(self._results):
            return False
        return self._model_scenario.read_state() == self._expected_scenario.read_state()

    def _open_next_request(self) -> list[Message]:
        index = len(self.request_results)
        new_functions = [
            tool.spec for tool in self.executor.tools if self._release_turns.get(tool.spec.name) == index
        ]
        docs = json.dumps([spec_to_dict(_shorten(spec) if self.is_short else spec) for spec in new_functions])
        announcement = [Message("user", f"{NEW_TOOLS_TEXT}\n{docs}")] if new_functions else []
        return [*announcement, *map(message_from_dict, self.row["question"][index])]


class _Function:
    """A method of one of BFCL's classes as a tool of one episode."""

    options = ToolOptions(ordered=True)

    def __init__(self, environment: BfclEnvironment, spec: ToolSpec) -> None:
        self.spec = spec
        # A method of the environment itself, so that a replay calls it again to restore the state.
        self.function = environment.call

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        # On the event loop: it takes no time, and MathAPI sets a precision that all threads share.
        return self.function(self.spec.name, arguments)


class _Scenario:
    """The BFCL objects behind the tools of a task, initialized for the task, and their callable methods."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._instances = {name: _load_class(name)() for name in row["involved_classes"]}
        for name, instance in self._instances.items():
            if name != STATELESS_CLASS:
                initial_config = deepcopy(row["initial_config"].get(name, {}))
                instance._load_scenario(initial_config, long_context="long_context" in row["id"])
        self._methods = {
            spec.name: getattr(instance, spec.name)
            for name, instance in self._instances.items()
            for spec in _specs(name)
        }

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        try:
            output = self._methods[name](**deepcopy(arguments))
        except Exception as error:  # foreign code
            return ToolResult(f"Error during execution: {error}", ok=False, error="exception")
        is_failed = isinstance(output, dict) and "error" in output
        return ToolResult(_format_result(output), ok=not is_failed, error="exception" if is_failed else None)

    def read_state(self) -> dict[str, dict[str, Any]]:
        """Return the public attributes of each object, as BFCL compares them."""
        return {
            name: {key: value for key, value in vars(instance).items() if not key.startswith("_")}
            for name, instance in self._instances.items()
        }


@cache
def make_environment_class(name: str) -> type[BfclEnvironment]:
    """Return the environment of one category: `multi_turn_base`, or `multi_turn_base/short`."""
    category, *variant = name.split("/")
    known_names = [*CATEGORIES, *(f"{category}/short" for category in CATEGORIES)]
    if name not in known_names:
        hint = did_you_mean(nearest(name, known_names))
        raise ValueError(f"there is no environment bfcl/{name}{hint} (known: {', '.join(known_names)})")
    _load_rows(category)  # raises if the package or its data is missing
    return type(f"bfcl/{name}", (BfclEnvironment,), {"category": category, "is_short": bool(variant)})


@cache
def _load_rows(category: str) -> dict[str, dict[str, Any]]:
    """Load the tasks of a category by id, with their ground truth as (function name, arguments)."""
    rows = {row["id"]: row for row in _read_lines(f"BFCL_v4_{category}.json")}
    for answer in _read_lines(f"possible_answer/BFCL_v4_{category}.json"):
        row = rows[answer["id"]]
        schemas = {spec.name: spec.parameters for name in row["involved_classes"] for spec in _specs(name)}
        row["ground_truth"] = []
        for call_texts in answer["ground_truth"]:
            calls = [parse_call(text, row["involved_classes"]) for text in call_texts]
            # A call that violates the function's own schema (a string for an integer) is not required of the model.
            valid_calls = [call for call in calls if make_validator(schemas[call[0]]).is_valid(call[1])]
            row["ground_truth"].append(valid_calls)
    return rows


def parse_call(text: str, classes: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """Parse `sort('a.txt')` to the name of a documented function and its keyword arguments, which must be literals."""
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text!r} is not a function call")
    name = call.func.id
    owner = next((owner for owner in classes if name in {spec.name for spec in _specs(owner)}), None)
    if owner is None:
        raise ValueError(f"{text!r} calls {name}, which is not a documented function of {', '.join(classes)}")
    args = [ast.literal_eval(value) for value in call.args]
    kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    bound_args = inspect.signature(getattr(_load_class(owner), name)).bind(None, *args, **kwargs)
    return name, dict(list(bound_args.arguments.items())[1:])


@cache
def _specs(class_name: str) -> list[ToolSpec]:
    docs = _read_lines(f"multi_turn_func_doc/{FILE_STEMS[class_name]}.json")
    return [ToolSpec(doc["name"], doc["description"], _convert_schema(doc["parameters"])) for doc in docs]


def _shorten(spec: ToolSpec) -> ToolSpec:
    """Return the spec reduced to the names and types of its parameters."""
    properties = spec.parameters.get("properties", {})
    types = {name: {"type": schema.get("type", "string")} for name, schema in properties.items()}
    return ToolSpec(spec.name, "", {"type": "object", "properties": types})


def _convert_schema(doc: dict[str, Any]) -> dict[str, Any]:
    """Convert documented parameters, with BFCL's types `dict`, `float` and `tuple`, to a JSON schema."""
    schema: dict[str, Any] = dict(doc)
    if "type" in doc:
        schema["type"] = JSON_TYPES.get(doc["type"], doc["type"])
    if "items" in doc:
        schema["items"] = _convert_schema(doc["items"])
    if "properties" in doc:
        schema["properties"] = {name: _convert_schema(child) for name, child in doc["properties"].items()}
        for name in MAX_ARGUMENTS.keys() & schema["properties"].keys():
            schema["properties"][name]["maximum"] = MAX_ARGUMENTS[name]
        schema["additionalProperties"] = False
    return schema


@cache
def _load_class(class_name: str) -> Any:
    return getattr(importlib.import_module(f"{SOURCE_PACKAGE}.{FILE_STEMS[class_name]}"), class_name)


def _read_lines(file_name: str) -> list[dict[str, Any]]:
    """Read a JSONL file of the package's data."""
    package_spec = find_spec("bfcl_eval")
    if package_spec is None or not package_spec.submodule_search_locations:
        raise ValueError(
            "environment bfcl/CATEGORY needs the package bfcl-eval. Install it without its dependencies (gigabytes "
            "that are not needed): pip install --no-deps bfcl-eval"
        )
    path = Path(package_spec.submodule_search_locations[0], "data", file_name)
    if not path.is_file():
        raise ValueError(f"{path} is missing. Install bfcl-eval 2026.3.23 or a version with the same data.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _format_result(output: Any) -> str:
    """Convert a function's return value to text as BFCL does."""
    try:
        return json.dumps(output) if isinstance(output, dict) else str(output)
    except (TypeError, ValueError):  # contains an object that JSON cannot represent
        return str(output)
