"""Sampling ahead of the learner: the gate, the order, the sweep, refill, the ledger; and nothing is left running."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.kits.ahead import Learner, Scripted, Teaching
from TrainingFactory.training.ledger import Ledger, find_ledger_errors
from TrainingFactory.training.task_order import TaskOrder
from TrainingFactory.types import Group, SamplersLost


def numbers(batch: Any) -> list[int]:
    return [group.number for group in batch.groups]


@pytest.mark.parametrize(("bound", "ahead"), [(1, 1), (2, 2), (4, 4)])
async def test_the_gate_admits_the_groups_of_as_many_steps_as_the_bound(bound: int, ahead: int) -> None:
    """Of 5 tasks in batches of 2, an epoch has steps of 2, 2 and 1; every task is taken once an epoch."""
    learner = Learner(bound)
    for step in range(6):
        batch = await learner.step()
        assert numbers(batch) == [2 * step, 2 * step + 1][: 1 if step % 3 == 2 else 2]
        begun = {int(name.partition("/")[0]) for name in learner.script.begun}
        assert begun == set(range(min(step + ahead, 5) + 1))
        assert batch.metrics["staleness/max"] <= bound and batch.metrics["groups/stale"] == 0
        assert not learner.source._stale_groups
    tasks = [name.partition("/")[2] for name in learner.script.begun]
    assert tasks == 2 * [f"t{number}" for number in range(5)]
    assert find_ledger_errors(learner.rows) == [] and learner.script.running == 0


def test_a_slow_group_is_waited_for_by_number_and_overtaken_by_arrival() -> None:
    async def first_steps(by_arrival: bool) -> tuple[list[int], dict[str, float]]:
        slow = asyncio.Event()
        learner = Learner(1, script=Scripted({"t0": slow}), by_arrival=by_arrival)
        if not by_arrival:
            asyncio.get_running_loop().call_later(0.02, slow.set)
        batch = await learner.step()
        await learner.source.close()
        return numbers(batch), batch.metrics

    by_number, waited = asyncio.run(first_steps(False))
    assert by_number == [0, 1] and waited["groups/waiting"] == 2 and waited["groups/in_flight"] == 0
    assert waited["length/waiting"] == 4 and waited["seconds/waited"] > 0
    by_arrival, waited = asyncio.run(first_steps(True))
    assert by_arrival == [1, 2] and waited["groups/waiting"] + waited["groups/in_flight"] == 2


async def test_a_group_that_is_too_old_is_given_up_and_sampled_again() -> None:
    """Group 0 begins at version 0 and ends at version 2, when one version behind is allowed."""
    slow = asyncio.Event()
    learner = Learner(1, script=Scripted({"t0": slow}), by_arrival=True)
    assert numbers(await learner.step()) == [1, 2]
    assert numbers(await learner.step()) == [3, 4]
    slow.set()
    await asyncio.sleep(0.01)
    stale, batches = 0.0, []
    for _ in range(4):
        batches.append(await learner.step())
        stale += batches[-1].metrics["groups/stale"]
        assert batches[-1].metrics["staleness/max"] <= 1
    assert stale == 1 and batches[0].metrics["length/stale"] == 4
    assert "0/t0@1" in learner.script.begun
    [again] = [group for batch in batches for group in batch.groups if group.number == 0]
    trained = next(batch for batch in batches if again in batch.groups)
    assert again.attempt == 1 and again.trajectories[0].group == f"{trained.step}/t0@1#0"
    # Calls stand in the recording under the step and the name that the group was sampled by.
    assert batches[0].discarded_keys == {(0, "t0")} and trained.recorded_keys is not None
    assert (0, "t0@1") in trained.recorded_keys
    assert find_ledger_errors(learner.rows) == []


async def test_refill_takes_further_tasks_of_the_epoch() -> None:
    """Of 5 tasks, t1 and t3 teach nothing; the second step has taken t2 and t3 before the first one refills."""
    slow = {"t3": asyncio.Event()}
    algorithm = Teaching({"t1", "t3"}, refill=1)
    learner = Learner(1, total=3, algorithm=algorithm, script=Scripted(slow))
    batches = [await learner.step()]
    slow["t3"].set()
    batches += [await learner.step(), await learner.step()]
    assert [batch.metrics["groups/refilled"] for batch in batches] == [1, 0, 1]
    assert [batch.metrics["groups/dropped"] for batch in batches] == [1, 1, 1]
    assert find_ledger_errors(learner.rows) == []
    assert [row["groups"] for row in learner.rows] == [
        [[0, 0, 0], [1, 0, 1], [1, 1, 4]],
        [[2, 0, 2], [3, 0, 3]],  # the epoch has no more
        [[4, 0, 5], [5, 0, 6], [5, 1, 7]],
    ]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_task_is_trained_once(seed: int) -> None:
    """Groups take as long as chance will have it, and the run is broken off now and then and goes on."""
    chance = random.Random(seed)
    bound, by_arrival, refill = chance.randint(1, 4), bool(seed % 2), chance.choice([0, 0, 2])
    algorithm = Teaching({"t1", "t4", "t8"}, refill)
    options: dict[str, Any] = {"size": 11, "batch_size": 3, "total": 24, "by_arrival": by_arrival}

    async def part(before: Learner | None, steps: int) -> Learner:
        script = Scripted(chance=chance)
        learner = Learner(bound, algorithm=algorithm, script=script, before=before, **options)
        while learner.done < 24 and steps:
            batch = await learner.step(updating=chance.choice([0, 2, 30]))
            assert batch.metrics["staleness/max"] <= bound
            assert by_arrival or batch.metrics["groups/stale"] == 0
            steps -= 1
        await learner.source.close()
        assert script.running == 0
        return learner

    learner = None
    while learner is None or learner.done < 24:
        learner = asyncio.run(part(learner, chance.randint(1, 9)))
        assert find_ledger_errors(learner.rows, is_finished=False) == []
    # What a refill had taken is free again after a break, and there may be no step left to take it.
    assert (
        find_ledger_errors(learner.rows, is_finished=not refill) == []
        and not learner.ledger.unfinished_groups
    )
    trained = [number for row in learner.rows for number, *_ in row["groups"]]
    if not refill:
        assert sorted(trained) == [
            3 * step + n for step in range(24) for n in range(2 if step % 4 == 3 else 3)
        ]


async def test_what_fails_in_any_group_ends_the_step_and_nothing_goes_on() -> None:
    lost = SamplersLost("none is left")
    learner = Learner(2, script=Scripted({"t0": asyncio.Event()}, {"t3": lost}))
    with pytest.raises(SamplersLost, match="none is left"):
        await learner.step()
    assert learner.script.running == 1  # t0, which nobody ends
    await learner.source.close()
    assert learner.script.running == 0 and len(asyncio.all_tasks()) == 1
    cancelled = asyncio.create_task(Learner(1, script=Scripted({"t0": asyncio.Event()})).step())
    await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert cancelled.cancelled()


def test_states_of_earlier_versions_and_of_another_batch_size() -> None:
    order = TaskOrder(7, 3, 0)
    assert Ledger.from_state(order, {"step": 2, "taken": 8, "consumed": [[0, 6]]}).next_position == 8
    assert Ledger.from_state(order, {"step": 4}).next_position == order.get_start_position(4) == 10
    for state in ({"taken": 8, "consumed": [[0, 8]]}, {"batch_size": 4, "consumed": [[0, 8]]}):
        with pytest.raises(ValueError, match="8 groups in 2 steps"):
            Ledger.from_state(order, {"step": 2} | state)
    ledger = Ledger(order)
    assert ledger.start_step(0) + ledger.start_step(1) == [0, 1, 2, 3, 4, 5]
    assert ledger.num_left == 1 and ledger.take_in_same_epoch(0) == 6 and ledger.take_in_same_epoch(0) is None
    ledger.mark_trained([Group(4, [], position=4), Group(1, [], position=1), Group(0, [], position=0)])
    state = ledger.make_state()
    assert state == {
        "batch_size": 3, "consumed": [[0, 2], [4, 5]], "ahead": [3],
        "under_way": [[2, 0, 2], [3, 0, 3], [5, 0, 5]],
    }  # fmt: skip
    again = Ledger.from_state(order, {"step": 1} | state)
    assert again.make_state() == state and again.num_left == 1 and again.take_positions(3) == [6]


def test_a_ledger_shows_what_was_lost_or_trained_twice() -> None:
    rows = [{"step": 1, "groups": [[0, 0, 0], [1, 0, 1]]}, {"step": 2, "groups": [[2, 1, 2]]}]
    assert find_ledger_errors(rows) == []
    assert find_ledger_errors([*rows, {"step": 3, "groups": [[1, 0, 5]]}]) == [
        "group 1 (attempt 0) in the steps 1 and 3", "place 3 was never trained", "place 4 was never trained",
    ]  # fmt: skip
    assert find_ledger_errors([*rows, {"step": 3, "groups": [[3, 0, 2]]}]) == ["place 2 2 times"]
    assert find_ledger_errors([rows[0], rows[0]], is_finished=False)[0] == "step 1 2 times"
