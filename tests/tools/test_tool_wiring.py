"""Tools from a config, a file, a server or Python reach the episodes; rewards call them; the cache is switched on."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.kits.cli import Run
from tests.kits.rollout import FakeChat, call_text, rollout
from tests.kits.run import Quiet, small
from tests.tools.test_recording import no_turn_is_cut
from TrainingFactory import catalog
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.envs import SearchEnvironment, ToolEnvironment
from TrainingFactory.protocols import Episode
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.services.build.run_tools import RunTools
from TrainingFactory.services.build.tools import cacheable, choose_names
from TrainingFactory.services.build.training import Training
from TrainingFactory.services.evaluation.rollouts import Rollouts, check_tools
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.services.training.dataset import Objects
from TrainingFactory.services.training.interrupts import Interrupts
from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.recording import CALLS
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Message, Reward, Step, Task, ToolCall, ToolFailure, ToolResult

ROOT = Path(__file__).resolve().parents[2]
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
SERVER = '''
from mcp.server.mcpserver import MCPServer
server = MCPServer("{name}")

@server.tool()
async def {name}_one(text: str) -> str:
    """The first."""
    return "one " + text

@server.tool()
async def {name}_two(text: str) -> str:
    """The second."""
    return "two " + text

server.run()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mytools.py").write_text(FILE)
    Path("tasks.jsonl").write_text('{"id": "a", "prompt": "2*3?", "answer": "6"}\n')
    for name in ("left", "right"):
        Path(f"{name}.py").write_text(SERVER.format(name=name))
    servers = {name: {"command": sys.executable, "args": [f"{name}.py"]} for name in ("left", "right")}
    Path("both.json").write_text(json.dumps({"mcpServers": servers}))
    Path("left.json").write_text(json.dumps({"mcpServers": {"left": servers["left"]}}))
    with sqlite3.connect("shop.db") as database:
        database.execute("create table sales (name text)")
    return tmp_path


async def equip(environment: Any, /, **config: Any) -> Any:
    tools = RunTools(TrainingConfig(**config), (), None)
    try:
        return await tools.equip(environment)
    finally:
        await tools.close()


def equipped(environment: Any, /, **config: Any) -> Any:
    return asyncio.run(equip(environment, **config))


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
    both = [{"name": name, "config": "both.json"} for name in ("right", "left_two")]
    # in the order of the file; calculator stands where its entry stands
    assert made([both[0], "calculator", both[1]]) == ["left_two", "right_one", "right_two", "calculator"]
    with pytest.raises(ValueError, match=r"tools.0.options are for built-in tools"):
        made([{"name": "left", "config": "left.json", "options": {"x": 1}}])


def test_a_name_is_a_tool_a_server_or_a_label() -> None:
    two = {"a": "left", "b": "left", "left": "right"}
    assert choose_names("b", two, "", "") == {"b"}
    assert choose_names("left", two, "", "") == {"left"}  # a tool goes before a server
    assert choose_names("right", two, "", "") == {"left"}
    assert choose_names("any label", {"a": "left", "b": "left"}, "", "") == {"a", "b"}
    with pytest.raises(
        ValueError, match=r"tools.0.name is 'c', and x.json has neither.*: left, right;.*: a, b, left"
    ):
        choose_names("c", two, "tools.0", "x.json")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("calculatr", "did you mean calculator?"),
        ("nothing.py", "there is no file nothing.py"),
        ("mytools.py:nothing", "has no 'nothing'"),
        ("tasks.py", "defines no tool: put @tool"),
        ({"name": "mytools.py", "options": {"x": 1}}, "tools.0.options are for built-in tools"),
        ({"name": "sql"}, "tools.0: .*path"),
        ({"name": "sql", "options": {"pth": "shop.db"}}, "did you mean path"),
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
    for environment, says in (
        (OnlyTask, "OnlyTask takes no tools: its __init__"),
        (NoToolEnvironment, "is none"),
    ):
        with pytest.raises(ValueError, match=says):
            equipped(environment, tools=["calculator"])
    assert equipped(OnlyTask, environment={"system_prompt": "x"})(task).system_prompt == "x"
    with pytest.raises(ValueError, match=r"environment.system_prompt can be given to a class"):
        equipped(NoToolEnvironment, environment={"system_prompt": "x"})


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
    assert status == 2 and "cannot be replayed and written at the same time" in " ".join(err.split())
    assert Path("e.tools/tool_calls.jsonl").read_text() == RECORDED
    status, out, err = tfactory("train", "plain.yaml", "--name", "a")
    assert status == 0, err
    first, _ = load_trajectories("runs/a/trajectories.jsonl")
    assert [spec.name for spec in first.tools] == ["calculator", "double"] and first.reward == Reward(0.0)
    assert tfactory("train", "plain.yaml", "--name", "b", "--replay", "a")[0] == 0
    status, out, err = tfactory("eval", "runs/a", "data.tasks=tasks.jsonl")
    assert status == 0 and "tool calls" in out, err
    for command, says in (
        (["rollout", "plain.yaml", "data.tasks=null"], "its tasks come from a file: data.tasks=FILE.jsonl"),
        (["train", "plain.yaml", "data.tasks=null"], "its tasks come from a file: data.tasks=FILE.jsonl"),
        (["train", "plain.yaml", "training.eval_every=1"], "data.heldout=FILE.jsonl"),
        (["train", "plain.yaml", "--replay", "zzz"], "there is no recording 'zzz' to replay"),
        (["train", "plain.yaml", "tools.0=search"], "tools.0: "),
    ):
        status, out, err = tfactory(*command)
        assert status == 2 and says in " ".join(err.split()) and "Traceback" not in err
    assert {path.name for path in Path("runs").iterdir()} <= {"a", "b", "rollouts"}


def test_trainers_take_tools_of_every_kind(folder: Path) -> None:
    from TrainingFactory.tools import MCPTools

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
    for number, (tools, names) in enumerate(
        [
            (servers, ["left_one", "left_two"]),
            (
                [servers, plain, Bare(), "calculator"],
                ["calculator", "left_one", "left_two", "plain", "bare"],
            ),
            (plain, ["plain"]),
            ("calculator", ["calculator"]),
        ]
    ):
        trainer = GRPOTrainer(tools=tools, tasks=tasks, config=config, name=str(number), watcher=Quiet())
        assert trainer.train().state == "finished"
        saved = next(load_trajectories(folder / str(number) / "trajectories.jsonl"))
        assert [spec.name for spec in saved.tools] == names
    # the caller's own servers are there again after two runs
    [result] = asyncio.run(AsyncToolExecutor([servers]).batch_execute([ToolCall("left_one", {"text": "x"})]))
    assert result.content == "one x"
    with pytest.raises(ValueError, match="is no tool"):
        GRPOTrainer(tools=[3], tasks=tasks)


class Process:
    """A source with something to end."""

    started: ClassVar[list[Process]] = []
    ended: ClassVar[list[Process]] = []
    closed: ClassVar[list[str]] = []  # sessions

    async def open(self) -> None:
        self.started.append(self)

    def session(self) -> Any:
        return Process.Session()

    async def close(self) -> None:
        self.ended.append(self)

    class Session:
        tools: ClassVar[list[Any]] = []

        async def close(self) -> None:
            Process.closed.append("session")


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_an_environment_that_does_not_close_gives_its_sessions_back(how: str) -> None:
    closed = Process.closed
    closed.clear()

    class Broken(ToolEnvironment):
        def __init__(self, task: Task) -> None:
            super().__init__(task, [Process()])

        async def close(self) -> None:
            if how == "raises":
                raise RuntimeError("no")
            await asyncio.sleep(600)

    [[played]] = rollout(Broken, lambda *_: "ok", episode_timeout=60 if how == "raises" else 2)
    assert played.status == "done" and closed == ["session"]
    if how == "raises":
        with pytest.raises(ValueError, match="no"):
            asyncio.run(check_tools(Broken, Task("a", "?"), FakeChat()))
        assert closed == ["session"] * 2


def test_what_a_run_started_ends_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog._CATALOG["tool"], "process", f"{__name__}:Process")
    Process.started.clear()
    Process.ended.clear()
    config = small(folder, training={"max_steps": 2, "batch_size": 1, "group_size": 2})
    config = TrainingConfig(**config.model_dump() | {"tools": ["process"], "data": {"tasks": "tasks.jsonl"}})
    Training(config, name="fine", watcher=Quiet()).train()
    with pytest.raises(RuntimeError, match="broken off"):
        Training(config, name="broken", watcher=Quiet(fail_at=1)).train()
    with pytest.raises(ValueError, match=r"\./nothing"):
        missing = TrainingConfig(**config.model_dump() | {"model": "./nothing"})
        Training(missing, name="c", watcher=Quiet()).train()
    with pytest.raises(ValueError, match="exists already"):
        Training(config, name="fine", watcher=Quiet())
    with pytest.raises(ValueError, match="did you mean calculator"):
        wrong = TrainingConfig(**config.model_dump() | {"tools": ["process", "calculato"]})
        Training(wrong, name="d", watcher=Quiet()).train()
    Rollouts(config).run()
    assert len(Process.started) == 4 and Process.ended == Process.started
    assert not (folder / "c").exists() and not (folder / "d").exists()


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


def test_a_tool_with_a_state_is_cached_by_the_calls_before(tmp_path: Path) -> None:
    """Equal arguments do not mean equal answers where calls are taken in order."""
    made = 0

    @tool(ordered=True)
    def count() -> int:
        """How often it was called."""
        nonlocal made
        made += 1
        return made

    async def episode(cache: ToolCache) -> list[str]:
        executor = AsyncToolExecutor([cacheable(count)])
        executor.attach(ToolRuntime(cache=cache), "episode", "task")
        calls = [ToolCall("count"), ToolCall("count")]
        return [result.content for result in await executor.batch_execute(calls)]

    cache = ToolCache(tmp_path / "cache.sqlite")
    assert asyncio.run(episode(cache)) == asyncio.run(episode(cache)) == ["1", "2"]
    assert made == 2  # the second episode was answered from the cache
    cache.close()


# rewards that call tools


class Checked(ToolEnvironment):
    """`verify` waits until all episodes of the batch are verifying."""

    running: ClassVar[int] = 0
    most: ClassVar[int] = 0
    all_here: ClassVar[asyncio.Event]

    @tool(timeout=20)
    async def verify(self, answer: str) -> str:
        cls = type(self)
        cls.running += 1
        cls.most = max(cls.most, cls.running)
        if cls.running == 6:
            cls.all_here.set()
        await asyncio.wait_for(cls.all_here.wait(), 15)
        cls.running -= 1
        return "right"

    @tool(timeout=0.05)
    async def slow(self) -> str:
        await asyncio.sleep(30)
        return ""

    @tool
    async def gone(self) -> str:
        raise ToolFailure("the server is gone")

    @tool
    async def broken(self) -> str:
        raise RuntimeError("a wrong query")

    @tool
    async def echo(self, text: str) -> str:
        return text


def test_rewards_call_tools_side_by_side() -> None:
    async def reward(episode: Episode) -> float:
        result = await episode.call("verify", answer=episode.trajectory.answer)
        return float(result.content == "right")

    Checked.running = Checked.most = 0
    Checked.all_here = asyncio.Event()
    runtime = ToolRuntime()
    groups = rollout(Checked, lambda *_: "ok", ("a", "b"), group_size=3, reward=reward, runtime=runtime)
    assert Checked.most == 6  # serial calls would wait for the others in vain
    assert all(played.reward == Reward(1.0) for group in groups for played in group)
    assert runtime.snapshot()["tools/verify/calls"] == 6


def test_a_verification_that_cannot_be_made_is_no_zero() -> None:
    async def reward(episode: Episode) -> float:
        name = {"a": "slow", "b": "gone", "c": "broken", "d": "echo"}[episode.task.id]
        result = await episode.call(name, **({"text": "x"} if name == "echo" else {}))
        return float(result.ok)

    groups = rollout(Checked, lambda *_: "ok", ("a", "b", "c", "d"), reward=reward, runtime=ToolRuntime())
    played = [trajectory for group in groups for trajectory in group]
    assert [t.reward for t in played] == [None, None, Reward(0.0), Reward(1.0)]
    assert "took longer" in str(played[0].error) and "the server is gone" in str(played[1].error)
    assert all(trajectory.status == "done" for trajectory in played)
    assert rollout_metrics(played)["episodes/unscored"] == 2


class Down(Checked):
    @tool
    async def gone(self) -> ToolResult:
        return ToolResult("it is down", ok=False, error="unavailable")


def test_an_episode_ends_where_a_server_is_down() -> None:
    [[played]] = rollout(Down, lambda *_: call_text("gone"))
    assert played.status == "tool_failure" and played.reward is None and played.error == "it is down"
    assert played.turns[0].tool_results[0].error == "unavailable"


class Alone(Down):
    """Whatever the model says, it calls the tool that is down."""

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> list[Task]:
        return [Task(str(number), "?") for number in range(3)]

    async def step(self, message: Message) -> Step:
        return await super().step(Message("assistant", tool_calls=[ToolCall("gone")]))


def test_a_run_waits_for_its_tools_and_then_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_turn_is_cut(monkeypatch)
    pauses: list[float] = []

    async def paused(interrupts: Interrupts, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(Interrupts, "pause", paused)
    watcher = Quiet()
    run = Training(
        small(tmp_path, training={"max_steps": 20}),
        name="a",
        objects=Objects(environment=Alone),
        watcher=watcher,
    )
    with pytest.raises(ValueError, match=r"stopped after 8 steps.*it is down.*tfactory runs resume"):
        run.train()
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert [row["episodes/tool_failure"] for row in RunFolder(tmp_path / "a").metrics()] == [12.0] * 7
    assert sum("WARNING" in text for text in watcher.said) == 8


class Flip(Alone):
    """Two calls an episode, and the server is down at times."""

    down: ClassVar[bool] = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.steps = 0

    @tool
    async def gone(self) -> ToolResult:
        return ToolResult("it is down", ok=False, error="unavailable") if Flip.down else ToolResult("up")

    async def step(self, message: Message) -> Step:
        self.steps += 1
        return Step(done=True) if self.steps > 2 else await super().step(message)

    def reward(self, episode: Episode) -> float:
        return float(sum(episode.trajectory.turns[-1].completion.token_ids) % 5)


def test_calls_of_a_step_that_is_not_done_are_in_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_turn_is_cut(monkeypatch)

    class Until(Quiet):
        def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
            Flip.down = True

    async def killed(interrupts: Interrupts, seconds: float) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(Flip, "down", False)
    monkeypatch.setattr(Interrupts, "pause", killed)
    objects = Objects(environment=Flip)
    with pytest.raises(RuntimeError, match="killed"):
        Training(
            small(tmp_path, training={"max_steps": 2}), name="a", objects=objects, watcher=Until()
        ).train()
    run = RunFolder(tmp_path / "a")
    assert len(run.checkpoints()) == 1
    Flip.down = False
    Training(run.config, run=run, objects=objects, watcher=Quiet()).train()
    calls = [json.loads(line) for line in (run.path / CALLS).read_text().splitlines()]
    keys = [tuple(call[name] for name in ("step", "task", "member", "batch", "call")) for call in calls]
    assert {key[0] for key in keys} == {0, 1} and len(set(keys)) == len(keys)


def test_the_file_that_the_printed_config_names(tmp_path: Path) -> None:
    from TrainingFactory.tools import MCPTools

    [entry] = load_config(ROOT / "configs" / "qwen3_grpo.yaml").tools
    data = json.loads((ROOT / str(entry.config)).read_text())
    program, argument = data["mcp_server"].split()
    assert program == "python"  # here: this one, which may have to be told where the package is
    server = {"command": sys.executable, "args": [argument], "env": {"PYTHONPATH": str(ROOT)}}
    servers = MCPTools.from_dict(data | {"mcp_server": server}, folder=ROOT / "tools")

    async def search() -> ToolResult:
        async with servers:
            assert [spec.name for spec in servers.specs] == [entry.name]
            call = ToolCall(entry.name, {"query": "replay a recording"})
            return (await AsyncToolExecutor([servers]).batch_execute([call]))[0]

    found = asyncio.run(search())
    assert found.ok and "TOOLS.md" in found.content
