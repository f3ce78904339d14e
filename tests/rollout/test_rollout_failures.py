"""Whatever goes wrong in one episode stays in it; what is wrong with us is raised."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kits.rollout import (
    PARAMS,
    STOP,
    Echo,
    FakeChat,
    FakeSampler,
    call_text,
    rollout,
    say_echo_then_ok,
    tasks,
)
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.tools import timeouts as waiting
from TrainingFactory.types import Completion, Message, Reward, SamplingParams, Step, Task, ToolFailure, Turn


class Broken(Echo):
    """Fails as its task's id says."""

    def __init__(self, task: Task) -> None:
        if task.id == "init":
            raise RuntimeError("no room")
        super().__init__(task)

    async def reset(self) -> list[Message]:
        if self.task.id == "reset":
            raise KeyError("reset")
        if self.task.id == "reset_type":
            return "hello"  # type: ignore[return-value]
        return await super().reset()

    async def step(self, message: Message) -> Step:
        if self.task.id == "step":
            raise RuntimeError("step broke")
        if self.task.id == "step_exit":
            raise SystemExit(3)
        if self.task.id == "step_type":
            return None  # type: ignore[return-value]
        if self.task.id == "cancelled":
            raise asyncio.CancelledError
        if self.task.id == "gone":
            raise ToolFailure("the server died")
        if self.task.id == "hangs":
            await asyncio.sleep(100)
        return await super().step(message)

    async def close(self) -> None:
        await super().close()
        if self.task.id == "close":
            raise RuntimeError("close broke")
        if self.task.id == "close_exit":
            raise SystemExit(4)


BROKEN = ("init", "reset", "reset_type", "step", "step_exit", "step_type", "cancelled", "gone", "hangs")


def test_no_failing_episode_touches_another():
    names = (*BROKEN, "close", "close_exit", "fine")
    sampler = FakeSampler(say_echo_then_ok)
    groups = rollout(Broken, names=names, group_size=2, sampler=sampler, episode_timeout=1)
    by_name = dict(zip(names, groups, strict=True))
    assert all(len(group) == 2 for group in groups)
    for name in ("fine", "close", "close_exit"):
        assert [t.status for t in by_name[name]] == ["done"] * 2 and by_name[name][0].reward == Reward(1.0)
        assert by_name[name][0].error is None
    for name in BROKEN:
        assert [t.status for t in by_name[name]] == ["tool_failure" if name == "gone" else "error"] * 2
        assert all(t.reward is None for t in by_name[name])
    errors = {name: str(by_name[name][0].error) for name in BROKEN}
    assert re.fullmatch(
        r"making the environment \(test_rollout_failures.py:\d+\) raised RuntimeError: no room",
        errors["init"],
    )
    assert "KeyError" in errors["reset"] and "list of Message" in errors["reset_type"]
    assert re.fullmatch(
        r"the environment's step \(test_rollout_failures.py:\d+\) raised RuntimeError: step broke",
        errors["step"],
    )
    assert "SystemExit" in errors["step_exit"] and "must return a Step" in errors["step_type"]
    assert "cancelled its own episode" in errors["cancelled"]
    assert "the server died" in errors["gone"]
    assert "longer than 1 s" in errors["hangs"]
    # Nothing sampled is lost, every environment that was made is closed once, every session once.
    assert len(by_name["step"][0].turns) == 1 and len(by_name["reset"][0].turns) == 0
    assert Echo.closed == {name: 2 for name in names if name != "init"}
    assert [session.closed for session in sampler.sessions] == [1] * len(sampler.sessions)


def test_bad_calls_are_answered_and_the_episode_goes_on():
    said = [
        "!echo {bad",
        call_text("ecko"),
        call_text("echo", text=3),
        call_text("echo", text="a", x=1),
        "ok",
    ]
    [[played]] = rollout(say=lambda session, turn, prompt: said[turn])
    assert played.status == "done" and played.reward == Reward(1.0)
    assert [turn.tool_results[0].error for turn in played.turns[:4]] == [
        "malformed",
        "unknown",
        "schema",
        "schema",
    ]


async def test_an_environment_that_ignores_its_cancelling_cannot_change_the_trajectory(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("TrainingFactory.tools.timeouts.GRACE_SECONDS", 0.05)
    came_back = asyncio.Event()

    class Stubborn(Echo):
        async def step(self, message: Message) -> Step:
            deadline = time.perf_counter() + 0.6
            while (left := deadline - time.perf_counter()) > 0:
                try:
                    await asyncio.sleep(left)
                except asyncio.CancelledError:
                    continue
            came_back.set()
            return await super().step(message)

    sampler = FakeSampler(say_echo_then_ok)
    engine = RolloutEngine(Stubborn, FakeChat(), PARAMS, episode_timeout=0.2)
    [[played]] = await engine.rollout_batch(tasks("a"), sampler)
    assert played.status == "error" and len(played.turns) == 1
    await came_back.wait()
    await asyncio.sleep(0.05)
    assert len(played.turns) == 1 and played.turns[0].replies == [] and len(sampler.requests) == 1


async def test_cancelling_a_batch_closes_everything():
    started = 0

    class Waits(Echo):
        async def step(self, message: Message) -> Step:
            nonlocal started
            started += 1
            await asyncio.sleep(100)
            return Step()

        async def close(self) -> None:
            await asyncio.sleep(0.02)  # closing takes a moment too
            await super().close()

    Echo.closed.clear()
    sampler = FakeSampler(say_echo_then_ok)
    engine = RolloutEngine(Waits, FakeChat(), PARAMS, max_concurrency=3)
    batch = asyncio.create_task(engine.rollout_batch(tasks("a", "b", "c", "d"), sampler))
    while started < 3:
        await asyncio.sleep(0.01)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    await asyncio.sleep(0)
    assert Echo.closed == {"a": 1, "b": 1, "c": 1}  # d was never let in
    assert [session.closed for session in sampler.sessions] == [1] * 4
    assert len(asyncio.all_tasks()) == 1


def test_a_failing_sampler_is_our_own_fault_and_is_raised():
    def say(session: int, turn: int, prompt: str) -> str:
        if session == 1 and turn == 1:
            raise MemoryError("out of memory")
        return say_echo_then_ok(session, turn, prompt)

    sampler = FakeSampler(say)
    with pytest.raises(MemoryError):
        rollout(names=("a", "b", "c"), sampler=sampler)
    assert Echo.closed == {"a": 1, "b": 1, "c": 1}
    assert [session.closed for session in sampler.sessions] == [1] * 3


@pytest.mark.parametrize(
    ("said", "finish"),
    [([65], "stop"), ([65, STOP], "length"), ([], "stop")],
    ids=["forges a stop", "hides a stop", "says nothing"],
)
def test_what_a_sampler_must_not_do_is_noticed(said: list[int], finish: Any):
    class Faulty(FakeSampler):
        def session(self) -> Any:
            session = super().session()

            async def sample(prompt_ids: Any, params: SamplingParams) -> Completion:
                return Completion(said, [0.0] * len(said), finish)

            session.sample = sample  # type: ignore[method-assign]
            return session

    with pytest.raises(AssertionError):
        rollout(sampler=Faulty(say_echo_then_ok))


def test_a_sampler_that_writes_into_its_prompt_changes_no_row():
    class Scribbles(FakeSampler):
        def session(self) -> Any:
            session = super().session()
            sample = session.sample

            async def scribbling(prompt_ids: Any, params: SamplingParams) -> Completion:
                found = await sample(prompt_ids, params)
                prompt_ids.append(7)
                return found

            session.sample = scribbling  # type: ignore[method-assign]
            return session

    prompts = [
        [turn.prompt_ids for turn in rollout(sampler=kind(say_echo_then_ok))[0][0].turns]
        for kind in (FakeSampler, Scribbles)
    ]
    assert prompts[0] == prompts[1]


def test_a_chat_format_that_rewrites_history_is_noticed():
    class Rewrites(FakeChat):
        def extend(self, turn: Turn, replies: Sequence[Message]) -> list[int]:
            turn.completion.token_ids[0] = 99
            return super().extend(turn, replies)

    with pytest.raises(AssertionError, match="must extend the sampled tokens"):
        rollout(chat=Rewrites())


def test_a_template_that_refuses_a_message_ends_its_own_episode():
    class Strict(FakeChat):
        def render(self, messages: Any, tools: Any = ()) -> list[int]:
            if any("ask b" in message.content for message in messages):
                raise ValueError("roles must alternate")
            return super().render(messages, tools)

    [[fine], [refused]] = rollout(names=("a", "b"), chat=Strict())
    assert (fine.status, refused.status) == ("done", "error")
    assert "roles must alternate" in str(refused.error)


@pytest.mark.parametrize("pauses", [True, False])
def test_an_episode_uses_no_time_while_its_clock_is_paused(
    pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds pass only where the test says so: an hour while the sampler is being restarted."""
    seconds = [0.0]
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    clock = waiting.PausableClock()

    class Restarts(FakeSampler):
        def session(self) -> Any:
            session = super().session()
            sample = session.sample

            async def restarting(prompt_ids: Any, params: SamplingParams) -> Completion:
                if pauses:
                    clock.pause()
                seconds[0] += 3600
                await asyncio.sleep(0.03)
                clock.resume()
                return await sample(prompt_ids, params)

            session.sample = restarting  # type: ignore[method-assign]
            return session

    found = rollout(sampler=Restarts(say_echo_then_ok), episode_timeout=0.01, clock=clock)[0][0]
    assert found.status == ("done" if pauses else "error")
    assert pauses == (found.error is None) and (pauses or "longer than 0.01 s" in str(found.error))
