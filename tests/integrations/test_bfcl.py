"""BFCL's own multi-turn tasks, played through our executor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.gyms import gyms, needs_gyms
from tests.kits.rollout import FakeChat
from tests.kits.run import rows, small, train
from TrainingFactory.common import catalog
from TrainingFactory.integrations import bfcl
from TrainingFactory.rollout.scripted import play
from TrainingFactory.types import Message, Step, Task, ToolCall, Trajectory

pytestmark = needs_gyms
__all__ = ["gyms"]


def named(name: str) -> Any:
    return catalog.find("environment", f"bfcl/{name}")


def task_of(category: str, number: int) -> Task:
    return next(task for task in named(category).tasks("all", 0, 200) if task.id == f"{category}_{number}")


def played(category: str, number: int, script: Iterable[Message] | None = None) -> Trajectory:
    environment = named(category)(task_of(category, number))
    return asyncio.run(play(environment, FakeChat(), environment.expert() if script is None else script))


async def steps(environment: Any, script: Iterable[Message]) -> float:
    last = Step()
    for message in script:
        last = await environment.step(message)
    assert last.done
    return environment.reward(None).outcome


async def scores(category: str, split: str = "all") -> tuple[float, float, float]:
    """How many tasks are solved by the ground truth, by all of it but its last call, and by doing nothing."""
    truth = partly = nothing = 0.0
    for task in named(category).tasks(split, 0, 1000):
        environment = named(category)
        script = list(environment(task).expert())
        last = max(i for i, message in enumerate(script) if message.tool_calls)
        truth += await steps(environment(task), script)
        partly += await steps(environment(task), script[:last] + script[last + 1 :])
        nothing += await steps(environment(task), [m for m in script if not m.tool_calls])
    return truth, partly, nothing


def test_the_ground_truth_solves_all_and_nothing_solves_none() -> None:
    assert asyncio.run(scores("multi_turn_base", "heldout")) == (41, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("category", bfcl.CATEGORIES)
def test_the_same_for_all_tasks(category: str) -> None:
    assert asyncio.run(scores(category)) == (200, 0, 0)


def test_requests_come_one_after_another() -> None:
    episode = played("multi_turn_base", 0)
    assert episode.status == "done" and episode.reward is not None
    assert (episode.reward.outcome, episode.reward.parts) == (1.0, {"requests": 1.0})
    said = [reply.content for turn in episode.turns for reply in turn.replies if reply.role == "user"]
    assert len(said) == 3 and said[0].startswith("Perform a detailed search using grep")
    assert episode.turns[0].tool_results[0].content == '{"current_working_directory": "document"}'


def test_a_wrong_state_and_an_early_end_are_no_success() -> None:
    extra = Message("assistant", tool_calls=[ToolCall("mkdir", {"dir_name": "more"})])
    environment = named("multi_turn_base")(task_of("multi_turn_base", 0))
    spoilt = played("multi_turn_base", 0, [extra, *environment.expert()])
    assert spoilt.reward is not None and spoilt.reward.outcome == 0
    stopped = asyncio.run(play(environment, FakeChat(), environment.expert(), max_turns=5))
    assert stopped.status == "max_turns" and stopped.reward is not None
    assert (stopped.reward.outcome, stopped.reward.parts) == (0.0, {"requests": 0.25})


def test_arguments_are_checked_by_the_docs() -> None:
    environment = named("multi_turn_base")(task_of("multi_turn_base", 0))
    calls = [
        ToolCall("cd", {"folder": 3}),
        ToolCall("cd", {}),
        ToolCall("cd", {"folder": "nowhere"}),
        ToolCall("_load_scenario", {}),
    ]
    step = asyncio.run(environment.step(Message("assistant", tool_calls=calls)))
    assert [result.error for result in step.tool_results] == ["schema", "schema", "exception", "unknown"]
    [limited] = [spec for spec in bfcl._specs("MathAPI") if spec.name == "power"]
    assert limited.parameters["properties"]["exponent"]["maximum"] == 1000


def test_a_function_that_comes_later() -> None:
    episode = played("multi_turn_miss_func", 0)
    assert "sort" not in {spec.name for spec in episode.tools}
    told = [reply.content for turn in episode.turns for reply in turn.replies if reply.role == "user"]
    assert '"name": "sort"' in told[2] and episode.reward is not None and episode.reward.outcome == 1


def test_splits_are_the_same_tasks_in_every_category() -> None:
    def numbers(category: str, split: str) -> set[str]:
        return {task.id.rpartition("_")[2] for task in named(category).tasks(split, 5, 200)}

    train_, heldout = numbers("multi_turn_base", "train"), numbers("multi_turn_base", "heldout")
    assert not train_ & heldout and len(train_ | heldout) == 200 and len(heldout) > 20
    assert numbers("multi_turn_miss_param", "heldout") == heldout


def test_calls_of_the_ground_truth_are_literals() -> None:
    assert bfcl.parse_call("sort('a.txt')", ["GorillaFileSystem"]) == ("sort", {"file_name": "a.txt"})
    for text in ("sort(open('a'))", "__import__('os')", "sort('a').b()", "rmtree('a')", "_load_scenario({})"):
        with pytest.raises(ValueError):
            bfcl.parse_call(text, ["GorillaFileSystem"])


def test_wrong_names() -> None:
    with pytest.raises(
        ValueError, match=r"no environment bfcl/multi_turn_bse; did you mean multi_turn_base\?"
    ):
        named("multi_turn_bse")
    with pytest.raises(ValueError, match="has no task 'x'"):
        named("multi_turn_base")(Task("x", "?"))


@pytest.mark.slow  # the docs of the tools are long for a model on a CPU
def test_a_step_of_training(tmp_path: Path) -> None:
    training = {"max_steps": 1, "batch_size": 1, "group_size": 2}
    config = small(tmp_path, training=training)

    def by_chance(episode: Any) -> float:  # an untrained model solves nothing
        return float(sum(episode.trajectory.turns[0].completion.token_ids))

    run = train(config, "run", environment=named("multi_turn_base/short"), reward=by_chance).run
    [row] = rows(run / "metrics.jsonl")
    assert row["trained_episodes"] == 2 and row["row_tokens"] > 2000  # the docs of the tools are in them
