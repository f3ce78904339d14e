"""Environments of the real Gymnasium: observations and actions as text, tools and lists, and training in FrozenLake."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.kits.frozen_lake import (
    OPTIONS,
    lake,
    learn,
    needs_gymnasium,
    success_by_chance,
    warm_start,
)
from tests.kits.lessons import evaluations
from TrainingFactory.common import catalog
from TrainingFactory.types import Message, Step, ToolCall

pytestmark = [needs_gymnasium, pytest.mark.servers]


def made(name: str, **args: Any) -> Any:
    options = OPTIONS | {"args": args}
    return catalog.find("environment", f"gymnasium:{name}").from_options(options).as_environment()


def stepped(factory: Any, *messages: Message) -> tuple[list[Message], list[Step]]:
    async def main() -> tuple[list[Message], list[Step]]:
        [task] = await asyncio.to_thread(factory.tasks, "train", 0, 1)
        environment = factory(task)
        prompt = await environment.reset()
        steps = [await environment.step(message) for message in messages]
        await factory.pool.close()
        return prompt, steps

    return asyncio.run(main())


def text(content: str) -> Message:
    return Message("assistant", content)


def test_frozen_lake_is_a_board_with_named_actions() -> None:
    prompt, steps = stepped(lake(), text("I go down."), text("jump"))
    assert "left, down, right, up" in prompt[0].content
    assert prompt[1].content == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert steps[0].replies[0].content == "SFFF\n[F]HFH\nFFFH\nHFFG"
    assert "'jump' is no action" in steps[1].replies[0].content and steps[1].signals["invalid_actions"] == 1


def test_an_action_is_a_tool_call() -> None:
    calls = [ToolCall("act", {"action": action}, f"c{n}") for n, action in enumerate(("right", "down"))]
    _, [step] = stepped(
        made("FrozenLake-v1", actions="tools", is_slippery=False), Message("assistant", tool_calls=calls)
    )
    assert [reply.tool_call_id for reply in step.replies] == ["c0", "c1"]
    assert step.done and step.signals["stop/terminated"] == 1  # a hole


def test_box_actions_are_lists_within_limits() -> None:
    prompt, steps = stepped(made("Pendulum-v1"), text("torque [0.5]"), text("[9]"))
    assert len(prompt[1].content.split(",")) == 3 and "from [-2.0] to [2.0]" in prompt[0].content
    assert steps[0].signals["invalid_actions"] == 0 and steps[1].signals["invalid_actions"] == 1


def test_an_unknown_environment_is_named() -> None:
    with pytest.raises(ValueError, match="FrozenLak"):
        made("FrozenLak-v1").tasks("train", 0, 1)


def test_tasks_of_the_splits_differ_and_are_made_again() -> None:
    train, again, heldout = (
        [task.metadata["seed"] for task in lake().tasks(split, 3, 4)]
        for split in ("train", "train", "heldout")
    )
    assert train == again and not set(train) & set(heldout)


@pytest.mark.training
def test_grpo_trains_in_frozen_lake(tmp_path: Path) -> None:
    report = learn(tmp_path, "builtin:tiny", 2, batch_size=1, group_size=4, eval_every=None)
    assert [row["episodes"] for row in report.rows] == [4, 4]
    assert all(row["environment/crashes"] == 0 and row["environment/processes"] == 1 for row in report.rows)


@pytest.mark.slow
def test_grpo_learns_frozen_lake(tmp_path: Path) -> None:
    by_chance = success_by_chance()
    success = evaluations(learn(tmp_path, warm_start(tmp_path), 30))
    assert success[-1] >= by_chance + 0.3 and success[-1] >= success[0] + 0.1, (by_chance, success)
