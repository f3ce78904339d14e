"""The programs of the project's own first document, as printed there apart from a literal `...`.

The names that only exist elsewhere lead to something by the test's own `factories.yaml` and packages, which is what
those are for. Where the document itself is not here, our copy of its names and signatures is still checked.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kits.keyword_types import common_keywords
from tests.kits.mcp import SERVERS, free_port, running, start_server
from tests.kits.seeds import Block, blocks
from tests.kits.siblings import COMPUTE, DATA, ENVIRONMENTS
from TrainingFactory.assembly.local_judge import LocalJudge
from TrainingFactory.common.endpoints.messages import ModelReply, ModelRequest
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.runs.notebook_view import make_default_watcher
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import Message, Task, ToolCall, Trajectory

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = [block for block in blocks("000") if block.language]
absent = pytest.mark.skipif(
    not BLOCKS, reason="the document is not beside this checkout: shared/seeds/000_*.txt"
)
SMALL = {
    "training": {"max_steps": 1, "group_size": 2},
    "sampling": {"max_tokens": 4},
    "data": {"count": 2},
}
LIMITS: dict[str, Any] = {"max_steps": 1, "group_size": 2, "batch_size": 1} | {"sampling": SMALL["sampling"]}
PROJECT = {
    "models": dict.fromkeys(("Qwen3-4B", "Qwen/Qwen3-4B-Instruct", "QwQ-32B"), "builtin:tiny"),
    "environments": {
        name: {"environment": {"environment_id": "search", "max_turns": 2}, **SMALL}
        for name in ("env_search", "env_search_v1")
    },
    "datasets": {"ds_tool_calling_v1": {"dataset": "ds_tool_calling_v1", "count": 8}},  # that of the package
}
SEARCH = {
    "name": "web_search",
    "description": "Search the web",
    "parameters": {"query": {"type": "string", "description": "Search query"}},
}
# where the document has a class or function, its parameters, and those with a default
SIGNATURES = {
    "services.async_executor:AsyncToolExecutor": {},
    "services.async_executor:AsyncToolExecutor.batch_execute": {"calls": ...},
    "services.async_executor:AsyncRolloutEngine": {"num_workers": 8},
    "services.async_executor:AsyncRolloutEngine.rollout_batch": {"prompts": ...},
    "services.process_reward:calculate_process_reward": {"trajectory": ...},
    "services.reward_model:DistributedRewardModel": {"model": ..., "num_workers": 4},
    "services.reward_model:DistributedRewardModel.compute_rewards": {"trajectories": ...},
    "tools.tool_cache:ToolCache": {},
    "tools.tool_cache:ToolCache.execute_with_cache": {"call": ...},
    "tools:MCPTools.load_from_config": {"path": ...},
    "rewards:ProcessReward": {"outcome_weight": 1.0, "step_rewards": ...},
}
TRAINERS = {
    "SFTTrainer": ["model", "dataset_id", "learning_rate", "epochs"],
    "GRPOTrainer": [
        "model", "environment", "environment_id", "reward_function", "num_epochs", "batch_size", "async_rollout",
        "tools", "allocation_id",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_names_and_signatures_are_there(name: str) -> None:
    module, _, path = name.partition(":")
    found: Any = import_module(f"TrainingFactory.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters
    for parameter, default in SIGNATURES[name].items():
        assert parameter in parameters
        assert default is ... or parameters[parameter].default == default
    needed = {each.name for each in parameters.values() if each.default is each.empty and each.kind < 2}
    assert needed - {"self"} <= SIGNATURES[name].keys()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_trainers_take_the_keywords(trainer: str) -> None:
    assert set(TRAINERS[trainer]) <= {*common_keywords(), "model", "environment"}


@pytest.fixture(scope="module")
def search_server() -> Iterator[str]:
    port = free_port()
    with running(start_server([sys.executable, str(SERVERS / "web_search.py"), str(port)], port)):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the document's names lead to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "factories.yaml").write_text(json.dumps(PROJECT))
    (tmp_path / "tools").mkdir()
    return tmp_path


def as_printed(block: Block) -> str:
    """The block without its literal `...`: an argument, or all that a dictionary holds."""
    return re.sub(r"^\s*\.\.\.\s*\n", "", block.text.replace("{...}", "{}"), flags=re.MULTILINE)


def names(number: int) -> dict[str, Any]:
    """What the document has shown or taken for granted before a block."""
    if number == 1:
        from TrainingFactory.services import GRPOTrainer

        return {"TrainingConfig": TrainingConfig, "trainer": GRPOTrainer()}
    if number == 2:
        return {"List": list, "ToolCall": ToolCall}
    found: dict[str, Any] = {}
    if number in (13, 15, 16, 17):
        from TrainingFactory.services import GRPOTrainer, SFTTrainer

        found |= {"GRPOTrainer": GRPOTrainer, "SFTTrainer": SFTTrainer}
    if number == 15:
        found["ResourceSpec"] = import_module("ComputeFactory.services").ResourceSpec
    if number == 20:
        found["ProcessReward"] = import_module("TrainingFactory.rewards").ProcessReward
    return found


@absent
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_as_printed(
    block: Block, project: Path, install: Callable[..., None], search_server: str
) -> None:
    if block.number > 14:
        install(DataFactory=DATA, EnvironmentFactory=ENVIRONMENTS, ComputeFactory=COMPUTE)
    for file in ("search.json", "search_tool.json"):
        (project / "tools" / file).write_text(json.dumps(SEARCH | {"mcp_server": search_server}))
    if block.number > 14:  # where the other factories are to be asked
        (project / "factories.yaml").unlink()
    if block.language == "yaml":
        return train_yaml(block, project)
    if block.language == "bash":
        files = re.findall(r"pytest (\S+)", block.text)
        assert all((ROOT / file).exists() for file in files) and (ROOT / "pyproject.toml").exists()
        return None
    if block.number == 12:  # a JSON file under a comment, which Python reads as well
        given = json.loads(block.text.partition("\n")[2])
        assert given == SEARCH | {"mcp_server": "http://mcp-search:8080"}
    space: dict[str, Any] = names(block.number)
    before = set(space)
    exec(compile(as_printed(block), str(block), "exec"), space)
    if check := CHECKS.get(block.number):
        check({name: value for name, value in space.items() if name not in before})
    return None


def train_yaml(block: Block, project: Path) -> None:
    (project / "config.yaml").write_text(block.text)
    report = Training(load_config(project / "config.yaml"), name="run").train()
    assert report.steps == 1 and "web_search" in (report.run / "tools.json").read_text()


def last_run(steps: int, *words: str) -> None:
    """The block has trained, with what it named in the config."""
    [run] = Path("runs").glob("*/config.yaml")
    text = run.read_text()
    assert all(word in text for word in ("builtin:tiny", *words))
    assert len((run.parent / "metrics.jsonl").read_text().splitlines()) >= steps


def episode() -> Trajectory:
    from TrainingFactory.services.async_executor import AsyncRolloutEngine

    async def play() -> list[Trajectory]:
        engine = AsyncRolloutEngine(num_workers=8, sampling={"max_tokens": 4})
        try:
            return await engine.rollout_batch([Task("one", "2 + 2?", "4"), "hello"])
        finally:
            await engine.close()

    first, second = asyncio.run(play())
    assert first.reward is not None and (second.task.prompt, second.reward) == ("hello", None)
    return first


def executes(space: dict[str, Any]) -> None:
    from TrainingFactory.services.async_executor import AsyncToolExecutor

    same_methods(space["AsyncToolExecutor"], AsyncToolExecutor, "batch_execute")
    calls = [ToolCall("calculator", {"expression": f"{n} + 1"}) for n in range(3)]
    found = asyncio.run(AsyncToolExecutor().batch_execute(calls))
    assert [result.content for result in found] == ["1", "2", "3"]


def rewards_steps(space: dict[str, Any]) -> None:
    from TrainingFactory.services.process_reward import calculate_process_reward

    printed = inspect.signature(space["calculate_process_reward"]).parameters
    assert [*printed] == [*inspect.signature(calculate_process_reward).parameters][:1]
    trajectory = episode()
    assert trajectory.reward is not None
    trajectory.reward.outcome = 1.0
    assert calculate_process_reward(trajectory).outcome == 1.0
    # The document's own steps, and its own function on them.
    steps = [SimpleNamespace(tool_call_correct=True, reasoning_clear=number == 1) for number in range(3)]
    ours = calculate_process_reward(steps, outcome=1.0)
    space["calculate_process_reward"].__globals__["outcome_reward"] = 1.0
    assert ours.outcome + sum(ours.steps) == pytest.approx(space["calculate_process_reward"](steps))
    assert ours.steps == pytest.approx([0.5, 0.8, 0.5]) and ours.parts["correct_tool"] == pytest.approx(1.5)
    assert calculate_process_reward([vars(steps[1])], {"clear_reasoning": 2.0}).steps == [2.0]
    with pytest.raises(ValueError, match="step 0 has no tool_call_correct"):
        calculate_process_reward([object()])
    with pytest.raises(ValueError, match="pass a Trajectory from a rollout"):
        calculate_process_reward(1)  # pyright: ignore[reportArgumentType]


def supports(space: dict[str, Any]) -> None:
    from TrainingFactory.models import SUPPORTED_MODELS

    assert space["SUPPORTED_MODELS"].items() <= SUPPORTED_MODELS.items()


def scores(space: dict[str, Any]) -> None:
    from TrainingFactory.services.reward_model import DistributedRewardModel

    same_methods(space["DistributedRewardModel"], DistributedRewardModel, "compute_rewards")

    async def compute(**model: str) -> Any:
        pool = DistributedRewardModel(**model, num_workers=4)
        assert len(pool.workers) == 4
        try:
            return await pool.compute_rewards([trajectory] * 5)
        finally:
            await pool.close()

    trajectory = episode()
    trajectory.status = "done"  # one that was cut off is worth nothing, and no judge is asked
    assert [reward.outcome for reward in asyncio.run(compute())] == [0.0] * 5
    with pytest.MonkeyPatch.context() as patched:  # the built-in model would not know what to say
        patched.setattr(LocalJudge, "ask", scored)
        rewards = asyncio.run(compute(model="QwQ-32B"))
    assert [reward.outcome for reward in rewards] == [0.4] * 5
    with pytest.raises(ValueError, match=r"no such run or model: 'QwQ-33B'[\s\S]*base_url="):
        DistributedRewardModel(model="QwQ-33B", num_workers=4)


async def scored(self: LocalJudge, request: ModelRequest) -> ModelReply:
    assert self.options.model == "QwQ-32B" and "2 + 2?" in request.messages[-1].content
    return ModelReply(Message("assistant", "Score: 4"), 1, 1)


def rolls_out(space: dict[str, Any]) -> None:
    from TrainingFactory.services.async_executor import AsyncRolloutEngine

    same_methods(space["AsyncRolloutEngine"], AsyncRolloutEngine, "rollout_batch")
    assert episode().turns


def caches(space: dict[str, Any]) -> None:
    from TrainingFactory.tools import ToolCache

    same_methods(space["ToolCache"], ToolCache, "execute_with_cache")

    async def twice() -> list[bool]:
        cache = ToolCache()
        call = ToolCall("calculator", {"expression": "6 * 7"})
        found = [await cache.execute_with_cache(call) for _ in range(2)]
        await cache.executor.close()
        cache.close()
        return [result.cached for result in found]

    assert asyncio.run(twice()) == [False, True]


def same_methods(printed: Any, ours: Any, method: str) -> None:
    """Both take as many arguments, and both are awaited."""
    counts = [len(inspect.signature(getattr(each, method)).parameters) for each in (printed, ours)]
    assert counts[0] == counts[1]
    assert inspect.iscoroutinefunction(getattr(printed, method)) and inspect.iscoroutinefunction(
        getattr(ours, method)
    )


def trains_with_servers(space: dict[str, Any]) -> None:
    report = space["trainer"].train({**LIMITS, "environment_id": "env_search_v1"})
    assert report.steps == 1 and "web_search" in (report.run / "tools.json").read_text()


def trains_on_machines(space: dict[str, Any]) -> None:
    said: list[str] = []
    watcher = make_default_watcher()
    watcher.say = said.append
    space["trainer"]._watcher = watcher
    assert space["trainer"].train({**LIMITS, "environment_id": "calculator"}).steps == 1
    assert any("allocation alloc-1" in text and "get_allocation" in text for text in said)


def trains_on_rows(space: dict[str, Any]) -> None:
    assert space["trainer"].train({"max_steps": 1}).rows[0]["loss"] > 0


def trains_in_a_scenario(space: dict[str, Any]) -> None:
    report = space["trainer"].train(LIMITS)
    assert "Where is the tea?" in (report.run / "trajectories.jsonl").read_text()


def trains_as_recommended(space: dict[str, Any]) -> None:
    from TrainingFactory.services import GRPOTrainer

    trainer = GRPOTrainer(environment="calculator", reward_function="rule_based", **LIMITS)
    assert trainer.train(space["config"]).steps == 1
    chosen = trainer.config
    assert chosen.optimization.async_rollout and chosen.optimization.distributed_reward
    assert chosen.optimization.tool_cache and chosen.environment.async_execution


CHECKS: dict[int, Callable[[dict[str, Any]], None]] = {
    1: lambda space: last_run(1, "calculator", "rule_based"),
    2: executes,
    3: rewards_steps,
    4: supports,
    5: scores,
    8: lambda space: last_run(3, "epochs: 3", "ds_tool_calling_v1"),
    9: lambda space: last_run(1, "async_rollout: true"),
    10: rolls_out,
    11: caches,
    13: trains_with_servers,
    15: trains_on_machines,
    16: trains_on_rows,
    17: trains_in_a_scenario,
    19: trains_as_recommended,
}
