"""Tools from a config, a file, a server or Python reach the episodes; the cache is switched on."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.kits.cli import Run
from tests.kits.mcp import own
from tests.kits.rollout import call_text, rollout
from tests.kits.run import Quiet, small
from tests.kits.tools import execute
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.assembly.tools import choose_names, mark_cacheable
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.envs import SearchEnvironment, ToolEnvironment
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.tools import MCPTools, ToolCache, tool
from TrainingFactory.types import Reward, Task, ToolCall

FILE = '''
from TrainingFactory.tools import tool

@tool
def double(number: int) -> str:
    """Twice a number."""
    return str(2 * number)

@tool
def half(number: int) -> str:
    """Half a number."""
    return str(number / 2)

def thrice(number: int) -> str:
    """Three times a number."""
    return str(3 * number)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mytools.py").write_text(FILE)
    Path("tasks.jsonl").write_text('{"id": "a", "prompt": "2*3?", "answer": "6"}\n')
    servers = {name: own("tiny.py", tools=["say", "count"], prefix=True) for name in ("left", "right")}
    Path("both.json").write_text(json.dumps({"mcpServers": servers}))
    Path("left.json").write_text(json.dumps({"mcpServers": {"left": servers["left"]}}))
    with sqlite3.connect("shop.db") as database:
        database.execute("create table sales (name text)")
    return tmp_path


def equipped(environment: Any, /, **config: Any) -> Any:
    async def equip() -> Any:
        tools = RunTools(TrainingConfig(**config), (), None)
        try:
            return await tools.equip(environment)
        finally:
            await tools.close()

    return asyncio.run(equip())


def made(tools: list[Any], environment: Any = ToolEnvironment) -> list[str]:
    """The names of the tools that an environment has with those of a config."""
    given = equipped(environment, tools=tools)
    return [tool.spec.name for tool in given(Task("a", "?")).tools]


def test_every_way_to_name_a_tool(folder: Path) -> None:
    assert made(["calculator"]) == ["calculator"]
    assert made([{"name": "sql", "options": {"path": "shop.db", "name": "shop"}}]) == ["shop"]
    assert made(["mytools.py"]) == ["double", "half"]
    assert made(["mytools.py:half", "mytools.py:thrice"]) == ["half", "thrice"]


def test_which_tools_of_a_file_of_servers_are_meant(folder: Path) -> None:
    both = [{"name": name, "config": "both.json"} for name in ("right", "left_count")]
    # in the order of the file; calculator stands where its entry stands
    assert made([both[0], "calculator", both[1]]) == ["left_count", "right_say", "right_count", "calculator"]


def test_a_name_is_a_tool_a_server_or_a_label() -> None:
    two = {"a": "left", "b": "left", "left": "right"}
    assert choose_names("b", two, "", "") == {"b"}
    assert choose_names("left", two, "", "") == {"left"}  # a tool goes before a server
    assert choose_names("right", two, "", "") == {"left"}
    assert choose_names("any label", {"a": "left", "b": "left"}, "", "") == {"a", "b"}
    with pytest.raises(
        ValueError,
        match=r"tools.0.name is 'c', but x.json has no tool or server.*: left, right;.*: a, b, left",
    ):
        choose_names("c", two, "tools.0", "x.json")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("nothing.py", "there is no file nothing.py"),
        ("mytools.py:nothing", "'nothing'"),
        ("tasks.py", "defines no tool: put @tool"),
        ({"name": "mytools.py", "options": {"x": 1}}, "tools.0.options are for built-in tools"),
        ({"name": "left", "config": "left.json", "options": {"x": 1}}, "tools.0.options are for built-in"),
        ({"name": "sql"}, "tools.0: .*path"),
        ({"name": "x", "config": "nothing.json"}, "nothing.json"),
        ({"name": "sql", "options": {"path": "${NO_SUCH_VARIABLE}"}}, "variable NO_SUCH_VARIABLE is not set"),
        ({"name": "sql", "options": {"api_key": "hunter2"}}, r"holds a secret.*api_key: \$\{NAME\}"),
    ],
)
def test_entries_that_name_no_tool(folder: Path, entry: Any, expected: str) -> None:
    Path("tasks.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=expected) as caught:
        made([entry])
    assert "hunter2" not in str(caught.value)


def test_variables_are_filled_in_and_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_SHOP", "shop")
    entry = {"name": "sql", "options": {"path": "${THE_SHOP}.db"}}
    assert made([entry]) == ["sql"]
    assert TrainingConfig(tools=[entry]).tools[0].options == {"path": "${THE_SHOP}.db"}


def test_a_tool_that_the_environment_brings_is_not_added_again() -> None:
    assert made(["search", "calculator"], SearchEnvironment) == ["search", "calculator"]


class OnlyTask(ToolEnvironment):
    def __init__(self, task: Task) -> None:
        super().__init__(task)


class NoToolEnvironment:
    """Some object with the right methods."""

    def __init__(self, task: Task) -> None: ...


def test_environments_are_given_tools_and_a_prompt() -> None:
    task = Task("a", "2*3?", "6")
    both = equipped(SearchEnvironment, tools=["calculator"], environment={"system_prompt": "Be brief."})
    assert [t.spec.name for t in both(task).tools] == ["search", "calculator"]
    assert both.__name__ == "SearchEnvironment" and asyncio.run(both(task).reset())[0].content == "Be brief."
    assert SearchEnvironment.system_prompt != "Be brief."
    assert equipped(SearchEnvironment) is SearchEnvironment
    assert equipped(OnlyTask, environment={"system_prompt": "x"})(task).system_prompt == "x"
    for environment, given, says in (
        (OnlyTask, {"tools": ["calculator"]}, "OnlyTask takes no tools: its __init__"),
        (NoToolEnvironment, {"tools": ["calculator"]}, "NoToolEnvironment does not"),
        (NoToolEnvironment, {"environment": {"system_prompt": "x"}}, "system_prompt needs a class"),
    ):
        with pytest.raises(ValueError, match=says):
            equipped(environment, **given)


RECORDED = (
    '{"step": 9, "task": "a", "member": 0, "batch": 0, "call": 0, "tool": "double", "arguments": {}, '
    '"result": {"content": "x"}}\n'
)
PLAIN = """
tools: [calculator, "mytools.py:double"]
environment: {system_prompt: "Be brief."}
data: {tasks: tasks.jsonl}
training: {max_steps: 1, batch_size: 1, group_size: 2}
sampling: {max_tokens: 4, deterministic: true}
"""


def test_tools_and_tasks_alone_make_a_run(folder: Path, tfactory: Run) -> None:
    Path("plain.yaml").write_text(PLAIN)
    status, out, err = tfactory("rollout", "plain.yaml", "logging.record_tools=true", "--out", "e.jsonl")
    assert status == 0, err
    assert "Be brief." in out and "calculator(expression), double(number)" in out
    assert tfactory("rollout", "plain.yaml", "--replay", "e.jsonl", "--out", "f.jsonl")[0] == 0
    assert Path("e.tools/tools.json").exists() and not Path("f.tools").exists()
    Path("e.tools/tool_calls.jsonl").write_text(RECORDED)
    status, _, err = tfactory(
        "rollout", "plain.yaml", "--replay", "e.jsonl", "--out", "e.jsonl", "logging.record_tools=true"
    )
    assert status == 2 and "cannot replay and record" in " ".join(err.split())
    assert Path("e.tools/tool_calls.jsonl").read_text() == RECORDED
    status, out, err = tfactory("train", "plain.yaml", "--name", "a")
    assert status == 0, err
    first, _ = load_trajectories("runs/a/trajectories.jsonl")
    assert [spec.name for spec in first.tools] == ["calculator", "double"] and first.reward == Reward(0.0)
    assert tfactory("train", "plain.yaml", "--name", "b", "--replay", "a")[0] == 0
    assert "evaluate it: tfactory eval a" in err
    status, out, err = tfactory("eval", "a")
    assert status == 0 and "tool calls" in out and "no held-out tasks" in err, err
    Path("more.csv").write_text("prompt,answer\n3*4?,12\n")
    status, out, err = tfactory("eval", "runs/a", "--tasks", "more.csv", "--out", "more.jsonl")
    assert status == 0 and "no held-out tasks" not in err, err
    assert [each.task.id for each in load_trajectories("more.jsonl")] == ["more-1"]
    for command, says in (
        (["rollout", "plain.yaml", "data.tasks=null"], "data.tasks=FILE.jsonl"),
        (["train", "plain.yaml", "data.tasks=null"], "data.tasks=FILE.jsonl"),
        (["train", "plain.yaml", "training.eval_every=1"], "data.heldout=FILE.jsonl"),
        (["train", "plain.yaml", "--replay", "zzz"], "there is no recording 'zzz' to replay"),
        (["train", "plain.yaml", "tools.0=search"], "tools.0: "),
    ):
        status, out, err = tfactory(*command)
        assert status == 2 and says in " ".join(err.split()) and "Traceback" not in err
    assert {path.name for path in Path("runs").iterdir()} <= {"a", "b", "rollouts"}


def test_a_run_of_an_environment_without_tasks_is_evaluated_on_its_file(folder: Path, tfactory: Run) -> None:
    Path("bare.py").write_text(
        "from TrainingFactory.envs import ToolEnvironment\n\nclass Bare(ToolEnvironment): pass\n"
    )
    Path("plain.yaml").write_text(PLAIN)
    assert tfactory("train", "plain.yaml", "--name", "a", "tools=[]", "environment=bare.py")[0] == 0
    status, _, err = tfactory("eval", "a")
    assert status == 0 and "no held-out tasks" in err, err


def test_a_run_of_python_objects_is_evaluated_with_files_in_their_place(folder: Path, tfactory: Run) -> None:
    @tool
    def double(number: int) -> str:
        """Twice a number."""
        return str(2 * number)

    options: dict[str, Any] = {
        "max_steps": 1,
        "watcher": Quiet(),
        "batch_size": 1,
        "group_size": 2,
        "sampling": {"max_tokens": 4},
    }
    tasks = [Task("a", "2*3?", "6")]
    GRPOTrainer(
        tools=[double], tasks=tasks, reward_function=lambda episode: 1.0, name="weather", **options
    ).train()
    status, _, err = tfactory("eval", "weather")
    said = " ".join(err.split())
    assert status == 2 and "run weather was started from Python" in said
    named = ['tools=["mytools.py:double"]', "data.tasks=tasks.jsonl"]
    assert named[1].replace("tasks.jsonl", "FILE") in said and 'tools=["FILE.py:NAME"]' in said
    status, _, err = tfactory("eval", "weather", *named)
    assert status == 0 and "cannot be restored here" in err, err
    assert "no such run or model: 'wether'; did you mean weather?" in " ".join(
        tfactory("eval", "wether")[2].split()
    )


def test_trainers_take_tools_of_every_kind(folder: Path) -> None:
    def plain(text: str) -> str:
        """A function without a mark."""
        return text

    class Bare:
        name, description = "bare", "As in qwen_agent."
        parameters: ClassVar[list[Any]] = [{"name": "text", "type": "string", "required": True}]

        def call(self, params: str, **kwargs: Any) -> str:
            return params

    tasks = [Task("a", "2*3?", "6")]
    config = small(folder, training={"max_steps": 1, "batch_size": 1, "group_size": 2})
    servers = MCPTools.load_from_config("left.json")
    handed = [servers, plain, Bare(), "calculator"]
    for tools, names in (
        (handed, ["calculator", "left_say", "left_count", "plain", "bare"]),
        (servers, ["left_say", "left_count"]),
    ):
        trainer = GRPOTrainer(tools=tools, tasks=tasks, config=config, name=names[0], watcher=Quiet())
        assert trainer.train().state == "finished"
        saved = next(load_trajectories(folder / names[0] / "trajectories.jsonl"))
        assert [spec.name for spec in saved.tools] == names
    # the caller's own servers are there again after two runs
    assert execute([servers], ToolCall("left_say", {"text": "x"}))[0].content == "x"
    assert [each.spec.name for each in GRPOTrainer(tools=plain, tasks=tasks).objects.tools] == ["plain"]
    with pytest.raises(ValueError, match="is not a tool"):
        GRPOTrainer(tools=[3], tasks=tasks)


# the cache


def test_the_cache_is_switched_on_by_the_config(folder: Path) -> None:
    calls = []

    @tool(pure=True)
    def pure(text: str) -> str:
        """Counts its calls."""
        calls.append(text)
        return text

    def hits(**config: Any) -> float:
        tools = RunTools(TrainingConfig(logging={"output_dir": "out"}, **config), [pure], None)
        try:
            environment = asyncio.run(tools.equip(ToolEnvironment))
            rollout(
                environment, lambda s, turn, p: call_text("pure", text="x") if turn < 2 else "ok", ("a", "b"),
                runtime=tools.runtime,
            )  # fmt: skip
            return tools.metrics()["tools/pure/cache_hits"]
        finally:
            asyncio.run(tools.close())

    assert hits() == 0 and len(calls) == 4 and not Path("out").exists()
    assert hits(optimization={"tool_cache": True}) == 3 and len(calls) == 5
    assert hits(optimization={"tool_cache": True}) == 4 and len(calls) == 5  # it outlives a run
    assert Path("out/tool_cache.sqlite").exists()
    assert hits(optimization={"tool_cache": "there/c.sqlite"}) == 3 and Path("there/c.sqlite").exists()
    with pytest.raises(ValueError, match=r"optimization\.tool_cache holds a secret") as caught:
        hits(optimization={"tool_cache": "redis://me:hunter2@127.0.0.1/0"})
    assert "hunter2" not in str(caught.value)


def test_a_trainer_takes_a_cache(folder: Path) -> None:
    cache = ToolCache("c.sqlite", ttl=60)
    trainer = GRPOTrainer(tools=["calculator"], tasks=[Task("a", "2*3?", "6")], tool_cache=cache)
    tools = RunTools(trainer.config, (), None, trainer.objects.cache)
    assert tools.runtime.cache is cache and not trainer.config.optimization.tool_cache
    asyncio.run(tools.close())
    cache.flush()  # it is the caller's, and still open
    cache.close()
    assert GRPOTrainer(tool_cache="c.sqlite").config.optimization.tool_cache == "c.sqlite"


def test_an_entry_marks_its_own_tools(folder: Path) -> None:
    entries = [{"name": "mytools.py:double", "cache_enabled": True}, {"name": "mytools.py:half"}]
    tools = RunTools(TrainingConfig(tools=entries, logging={"output_dir": "out"}), [], None)
    try:
        environment = asyncio.run(tools.equip(ToolEnvironment))

        def say(session: int, turn: int, prompt: str) -> str:
            return call_text("double" if turn < 2 else "half", number=4) if turn < 4 else "ok"

        rollout(environment, say, runtime=tools.runtime)
        metrics = tools.metrics()
    finally:
        asyncio.run(tools.close())
    assert (metrics["tools/double/cache_hits"], metrics["tools/half/cache_hits"]) == (1, 0)


def test_what_an_entry_says_of_its_tools() -> None:
    """Equal arguments do not mean equal answers where calls are taken in order."""
    for options, pure in (({}, True), ({"ordered": True}, False), ({"stateful": True}, False)):
        marked = mark_cacheable(tool(name="count", **options)(lambda: 1)).options  # type: ignore[call-overload]
        assert (marked.pure, marked.stateful) == (pure, not pure)
