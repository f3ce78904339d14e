"""BFCL's multi-turn tasks as environments: `bfcl/multi_turn_base`.

Of the package `bfcl-eval` only the data files and the classes behind the tools are used (a file system, a car, a stock
broker, ...). Calls of the model go through our executor, those of the ground truth are read by `ast`; nothing of the
package that evaluates text is called. docs/BENCHMARKS.md says what is compared.
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
from TrainingFactory.envs.builtin.splits import belongs
from TrainingFactory.protocols import Episode, Tool, ToolSource
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import validator_of
from TrainingFactory.types import Message, Reward, Step, Task, ToolCall, ToolResult, ToolSpec

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
SOURCES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
STEMS = {  # class -> the file of its source, and of the docs of its functions
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking", "VehicleControlAPI": "vehicle_control",
}  # fmt: skip
STATELESS = "MathAPI"
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
LIMITS = {"precision": 1000, "exponent": 1000}  # arguments with which one call could compute for ever
NEW_TOOLS = "These functions are new; call them like the others:"


class BfclEnvironment(ToolEnvironment):
    """One conversation of several requests, with tools that share a state; a subclass is made for each category. Where
    the model answers without a call, the next request of the user comes."""

    category: ClassVar[str]
    short: ClassVar[bool]  # show names and types alone, for a model with little room

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        """Give all 200 in their own order for the split "all"; a part of them, shuffled, for train and heldout."""
        rows = list(_rows(cls.category).values())
        if split != "all":
            # All categories are variants of the same tasks, so a task's number decides for all of them.
            rows = [row for row in rows if belongs(f"bfcl {row['id'].rpartition('_')[2]}", split)]
            random.Random(f"bfcl {seed}").shuffle(rows)
        for row in rows[:count]:
            yield Task(row["id"], [message_from_dict(said) for said in row["question"][0]])

    def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = (), **options: Any) -> None:
        rows = _rows(self.category)
        if task.id not in rows:
            raise ValueError(f"BFCL's {self.category} has no task {task.id!r}; its tasks are its own")
        self.row = rows[task.id]
        missed: dict[str, list[str]] = self.row.get("missed_function", {})
        self._released = {name: int(turn) for turn, names in missed.items() for name in names}
        self._mine, self._truth = _Scenario(self.row), _Scenario(self.row)
        self._results: list[str] = []  # of all calls so far
        self._before = 0  # of them, those before the present request
        self.passed: list[bool] = []  # one entry for each request that was answered
        own = [_Function(self, spec) for name in self.row["involved_classes"] for spec in _specs(name)]
        super().__init__(task, [*own, *tools], **options)
        shown = [function for function in own if function.spec.name not in self._released]
        if self.short:
            shown = [_Function(self, _shortened(function.spec)) for function in shown]
        self.tools = [*shown, *self.tools[len(own) :]]

    async def step(self, message: Message) -> Step:
        if message.tool_calls:
            return await super().step(message)
        self.passed.append(self._as_the_truth())
        self._before = len(self._results)
        if len(self.passed) == len(self.row["question"]):
            return Step(done=True)
        return Step(self._next_request())

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Answer one call of the model from the state of this episode."""
        result = self._mine.call(name, arguments)
        self._results.append(result.content)
        return result

    def reward(self, episode: Episode) -> Reward:
        """Return 1 if every request was answered and left what the ground truth leaves, else 0."""
        wanted = len(self.row["question"])
        solved = len(self.passed) == wanted and all(self.passed)
        return Reward(float(solved), parts={"requests": sum(self.passed) / wanted})

    def expert(self) -> Iterator[Message]:
        """Make the calls of the ground truth, one a turn."""
        for calls in self.row["ground_truth"]:
            for name, arguments in calls:
                yield Message("assistant", tool_calls=[ToolCall(name, deepcopy(arguments))])
            yield Message("assistant", "Done." if calls else "I cannot do that with what I have.")

    def _as_the_truth(self) -> bool:
        """Tell whether the state is what the calls of the ground truth leave, and their results were seen."""
        calls = self.row["ground_truth"][len(self.passed)]
        wanted = Counter(self._truth.call(name, arguments).content for name, arguments in calls)
        if not calls:  # the request cannot be met, and what the model says to it is not judged
            return True
        made = len(self._results) > self._before
        return made and not wanted - Counter(self._results) and self._mine.state() == self._truth.state()

    def _next_request(self) -> list[Message]:
        number = len(self.passed)
        new = [tool.spec for tool in self.executor.tools if self._released.get(tool.spec.name) == number]
        docs = json.dumps([spec_to_dict(_shortened(spec) if self.short else spec) for spec in new])
        told = [Message("user", f"{NEW_TOOLS}\n{docs}")] if new else []
        return [*told, *map(message_from_dict, self.row["question"][number])]


class _Function:
    """A method of one of the classes as a tool of one episode."""

    options = ToolOptions(ordered=True)

    def __init__(self, environment: BfclEnvironment, spec: ToolSpec) -> None:
        self.spec = spec
        self.function = (
            environment.call
        )  # of the environment itself, so that a replay runs it again for its state

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        # On the event loop: it takes no time, and MathAPI sets a precision that all threads share.
        return self.function(self.spec.name, arguments)


class _Scenario:
    """The objects behind the tools of a task, in their first state, and the methods that may be called."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._objects = {name: _class(name)() for name in row["involved_classes"]}
        for name, made in self._objects.items():
            if name != STATELESS:
                scenario = deepcopy(row["initial_config"].get(name, {}))
                made._load_scenario(scenario, long_context="long_context" in row["id"])
        self._methods = {
            spec.name: getattr(made, spec.name)
            for name, made in self._objects.items()
            for spec in _specs(name)
        }

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        try:
            value = self._methods[name](**deepcopy(arguments))
        except Exception as error:  # foreign code
            return ToolResult(f"Error during execution: {error}", ok=False, error="exception")
        failed = isinstance(value, dict) and "error" in value
        return ToolResult(_text(value), ok=not failed, error="exception" if failed else None)

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the public attributes of each object, which is what BFCL compares as well."""
        return {
            name: {key: value for key, value in vars(made).items() if not key.startswith("_")}
            for name, made in self._objects.items()
        }


@cache
def environment(name: str) -> type[BfclEnvironment]:
    """Return the environment of one category: `multi_turn_base`, or `multi_turn_base/short`."""
    category, *kind = name.split("/")
    known = [*CATEGORIES, *(f"{each}/short" for each in CATEGORIES)]
    if name not in known:
        hint = did_you_mean(nearest(name, known))
        raise ValueError(f"there is no environment bfcl/{name}{hint} (known: {', '.join(known)})")
    _rows(category)  # says now what is missing
    return type(f"bfcl/{name}", (BfclEnvironment,), {"category": category, "short": bool(kind)})


@cache
def _rows(category: str) -> dict[str, dict[str, Any]]:
    """Read the tasks of a category by id, each with the calls of its ground truth as names and arguments."""
    rows = {row["id"]: row for row in _lines(f"BFCL_v4_{category}.json")}
    for answer in _lines(f"possible_answer/BFCL_v4_{category}.json"):
        row = rows[answer["id"]]
        known = {spec.name: spec.parameters for name in row["involved_classes"] for spec in _specs(name)}
        row["ground_truth"] = []
        for texts in answer["ground_truth"]:
            calls = [parse_call(text, row["involved_classes"]) for text in texts]
            # What the function's own docs forbid (a text for a whole number) can be asked of nobody.
            row["ground_truth"] += [[c for c in calls if validator_of(known[c[0]]).is_valid(c[1])]]
    return rows


def parse_call(text: str, classes: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """Read `sort('a.txt')` as the name of a documented function and its arguments by name, all of them literals."""
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text!r} is no call of a function")
    name = call.func.id
    owner = next((each for each in classes if name in {spec.name for spec in _specs(each)}), None)
    if owner is None:
        raise ValueError(f"{text!r} calls {name}, which is no documented function of {', '.join(classes)}")
    positional = [ast.literal_eval(value) for value in call.args]
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    bound = inspect.signature(getattr(_class(owner), name)).bind(None, *positional, **named)
    return name, dict(list(bound.arguments.items())[1:])


@cache
def _specs(name: str) -> list[ToolSpec]:
    docs = _lines(f"multi_turn_func_doc/{STEMS[name]}.json")
    return [ToolSpec(doc["name"], doc["description"], _schema(doc["parameters"])) for doc in docs]


def _shortened(spec: ToolSpec) -> ToolSpec:
    """Return the spec with the names and types of its parameters, and no other word."""
    found = spec.parameters.get("properties", {})
    names = {name: {"type": value.get("type", "string")} for name, value in found.items()}
    return ToolSpec(spec.name, "", {"type": "object", "properties": names})


def _schema(found: dict[str, Any]) -> dict[str, Any]:
    """Return a doc's parameters as a JSON schema: `dict` and `float` are no types there."""
    made: dict[str, Any] = dict(found)
    if "type" in found:
        made["type"] = JSON_TYPES.get(found["type"], found["type"])
    if "items" in found:
        made["items"] = _schema(found["items"])
    if "properties" in found:
        made["properties"] = {name: _schema(value) for name, value in found["properties"].items()}
        for name in LIMITS.keys() & made["properties"].keys():
            made["properties"][name]["maximum"] = LIMITS[name]
        made["additionalProperties"] = False
    return made


@cache
def _class(name: str) -> Any:
    return getattr(importlib.import_module(f"{SOURCES}.{STEMS[name]}"), name)


def _lines(file: str) -> list[dict[str, Any]]:
    """Read a file of the package's data."""
    spec = find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "environment bfcl/CATEGORY needs the package bfcl-eval, without the gigabytes that it asks for: "
            "pip install --no-deps bfcl-eval"
        )
    path = Path(spec.submodule_search_locations[0], "data", file)
    if not path.is_file():
        raise ValueError(f"there is no {path}: this needs bfcl-eval 2026.3.23 or one with the same data")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _text(value: Any) -> str:
    """Write what a function returned as BFCL does."""
    try:
        return json.dumps(value) if isinstance(value, dict) else str(value)
    except (TypeError, ValueError):  # an object of its own inside
        return str(value)
