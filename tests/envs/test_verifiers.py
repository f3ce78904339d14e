"""Environments of the real verifiers: v1, and v0 with a function `load_environment`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.envs.test_adapters import SUMS, SUMS_V0, call, played, stepped, text
from tests.kits.guessing import factory_of, needs
from TrainingFactory.types import Message

pytestmark = [pytest.mark.servers, pytest.mark.slow]


# -- v1


@needs("verifiers")
def test_a_taskset_of_verifiers() -> None:
    factory = factory_of(SUMS, args={"size": 10})
    tasks = {split: list(factory.tasks(split, 0, 99)) for split in ("train", "heldout")}
    assert [len(rows) for rows in tasks.values()] == [8, 2]
    assert {task.answer for rows in tasks.values() for task in rows} == {str(n) for n in range(1, 11)}
    task = tasks["train"][0]
    right = played(factory_of(SUMS), task, text(str(task.answer)))
    wrong = played(factory_of(SUMS), task, text("?"))
    assert right.reward is not None and wrong.reward is not None
    assert (right.reward.outcome, wrong.reward.outcome) == (1.0, 0.0)
    assert right.reward.parts == {"turns": 1.0, "right": 1.0}
    assert right.prompt[0] == Message("system", "Add up.")


@needs("verifiers")
def test_tool_servers_of_verifiers() -> None:
    factory = factory_of(SUMS, args={"calculator": True}, confined=False)
    task = next(iter(factory.tasks("train", 0, 1)))
    number = task.metadata["index"]

    async def main() -> None:
        environment = factory(task)
        await environment.reset()
        step = await environment.step(call("calculator_add", a=number, b=1))
        assert step.replies[0].content == task.answer
        left = await environment._request("score")  # the client ends the episode before an answer
        assert left["reward"] == 0 and left["parts"]["turns"] == 1
        await factory.pool.close()

    asyncio.run(main())


# -- v0


@needs("verifiers_v0")
@pytest.mark.parametrize("own_eval", [False, True])
def test_rows_of_v0_are_tasks(own_eval: bool) -> None:
    """Held out is the dataset for evaluation; without one, a fifth of the other."""
    factory = factory_of(SUMS_V0, args={"size": 10, "own_eval": own_eval})
    train, heldout = ([task.answer for task in factory.tasks(split, 0, 99)] for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == ((10, 10) if own_eval else (8, 2))
    assert {int(str(answer)) for answer in train + heldout} == set(range(1, 21 if own_eval else 11))
    again = [task.answer for task in factory.tasks("train", 0, 99)]
    assert again == train != [task.answer for task in factory.tasks("train", 1, 99)]


@needs("verifiers_v0")
def test_a_single_turn_of_v0() -> None:
    factory = factory_of(SUMS_V0)
    task = next(iter(factory.tasks("heldout", 0, 1)))
    right, wrong = played(factory, task, text(str(task.answer))), played(factory, task, text("?"))
    assert right.prompt == [Message("system", "Add up."), Message("user", str(task.prompt))]
    assert right.reward is not None and wrong.reward is not None
    assert (right.reward.outcome, wrong.reward.outcome) == (1.0, 0.0)
    assert right.reward.parts == {"right": 1.0, "length": 1.0, "num_turns": 1.0}
    assert right.turns[-1].signals == {"stop/max_turns_reached": 1.0}


@needs("verifiers_v0")
def test_tools_of_v0() -> None:
    factory = factory_of(SUMS_V0, args={"kind": "tools"})
    task = next(iter(factory.tasks("train", 0, 1)))
    answer = text(str(task.answer))
    environment, _, steps = stepped(
        factory, call("add", a=1, b=2), call("add", a=1, b=200), answer, task=task
    )
    [tool] = environment.tools
    parameters = tool.spec.parameters["properties"]
    assert tool.spec.name == "add" and {key: value["type"] for key, value in parameters.items()} == {
        "a": "integer",
        "b": "integer",
    }
    assert [step.replies[0].content for step in steps[:2]] == ["3", "too large"]
    assert steps[2].done and steps[2].signals == {"stop/no_tools_called": 1.0}
    episode = played(factory, task, call("add", a=1, b=2), answer)
    assert episode.reward is not None and episode.reward.outcome == 1
    assert episode.reward.parts["total_tool_calls"] == episode.reward.parts["add_calls"] == 1
    cut = played(factory, task, call("add", a=1, b=2))  # our limit of turns is lower
    assert cut.status == "max_turns" and cut.reward is not None and cut.reward.outcome == 0


@needs("verifiers_v0")
def test_several_turns_of_v0() -> None:
    factory = factory_of(SUMS_V0, args={"kind": "guess"})
    task = next(iter(factory.tasks("train", 0, 1)))
    episode = played(factory, task, text("0"), text("99"), text(str(task.answer)))
    replies = [turn.replies[0].content for turn in episode.turns]
    assert replies == ["Higher.", "Lower.", "Right."]
    assert episode.turns[-1].signals == {"stop/has_final_env_response": 1.0}
    assert episode.reward is not None and episode.reward.outcome == 1
    gave_up = played(factory, task, text("stop"))
    assert gave_up.turns[-1].signals == {"stop/gave_up": 1.0}
    failed = played(factory, task, text("break"))
    assert failed.status == "error" and "the game broke" in str(failed.error) and failed.reward is None


@needs("verifiers_v0")
def test_a_reward_function_of_v0_that_raises_scores_nothing() -> None:
    """verifiers itself counts it as 0."""
    factory = factory_of(SUMS_V0, args={"kind": "failing"})
    episode = played(factory, next(iter(factory.tasks("train", 0, 1))), text("1"))
    assert episode.reward is None and "reward function broken" in str(episode.error)


@needs("verifiers_v0")
@pytest.mark.parametrize(
    ("name", "args", "part"),
    [
        (SUMS_V0, {"kind": "group"}, "compares the episodes of a group"),
        (SUMS_V0, {"no_such": 1}, "no_such"),
        (SUMS.replace("verifiers:", "verifiers_v0:"), {}, "write verifiers:NAME"),
        ("verifiers_v0:absent", {}, "Could not import 'absent'"),
    ],
)
def test_unusable_environments_of_v0_are_explained(name: str, args: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        factory_of(name, args=args).tasks("train", 0, 1)


@needs("verifiers")
def test_an_environment_of_v0_is_not_one_of_v1() -> None:
    with pytest.raises(ValueError, match="write verifiers_v0:NAME"):
        factory_of(SUMS_V0.replace("verifiers_v0:", "verifiers:")).tasks("train", 0, 1)
