"""Rollouts over a see-through chat format and sampler; the real ones are in test_rollout_real.py."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import pairwise, product
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
from TrainingFactory.common.seeds import derive_seed
from TrainingFactory.rollout import RolloutEngine, play, rollout_metrics
from TrainingFactory.types import Message, Reward, SamplingParams, Step, ToolCall, Trajectory


def test_groups_in_order_and_in_tokens():
    sampler = FakeSampler(say_echo_then_ok)
    seen: list[Trajectory] = []
    groups = rollout(names=("a", "b"), group_size=2, step=4, sampler=sampler, on_episode=seen.append)
    members = [(t.task.id, t.group, t.member) for group in groups for t in group]
    assert members == [("a", "4/a", 0), ("a", "4/a", 1), ("b", "4/b", 0), ("b", "4/b", 1)]
    assert len(seen) == 4 and {id(t) for t in seen} == {id(t) for group in groups for t in group}
    chat = FakeChat()
    for number, played in enumerate(t for group in groups for t in group):
        assert played.status == "done" and played.answer == "ok" and played.reward == Reward(1.0)
        first, second, _ = played.turns
        assert [turn.replies[0].content for turn in (first, second)] == [f"{number}.0", f"{number}.1"]
        assert [turn.message.tool_calls[0].id for turn in (first, second)] == ["call_0_0", "call_1_0"]
        assert played.turns[0].replies[0].tool_call_id == "call_0_0"
        assert played.turns[0].prompt_ids == chat.render(played.prompt, played.tools)
        assert played.tools[0].name == "echo" and played.seconds > 0
        for turn, following in pairwise(played.turns):
            sampled = turn.prompt_ids + turn.completion.token_ids
            assert following.prompt_ids == sampled + chat.render(turn.replies)
    assert [session.closed for session in sampler.sessions] == [1] * 4
    assert all(params.stop_ids == (STOP,) for _, _, params in sampler.requests)


def test_seeds_are_keyed_by_run_step_task_member_and_turn():
    keys = list(product((0, 1), (0, 1), ("a", "b", "a,0"), (0, 1), (0, 1)))
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys) and all(0 <= seed < 2**64 for seed in seeds)

    def used(**options: Any) -> list[tuple[int, int]]:
        sampler = FakeSampler(say_echo_then_ok)
        rollout(names=("a", "b"), group_size=2, sampler=sampler, **options)
        return sorted((number, params.seed) for number, _, params in sampler.requests)

    first = used(seed=5, step=2)
    assert first == used(seed=5, step=2) and len({seed for _, seed in first}) == 12
    assert not {seed for _, seed in first} & {seed for _, seed in used(seed=5, step=3)}
    assert sorted(derive_seed(5, 2, "b", 1, turn) for turn in range(3)) == [
        s for number, s in first if number == 3
    ]


def test_a_task_that_comes_twice_is_two_groups():
    sampler = FakeSampler(say_echo_then_ok)
    groups = rollout(names=("a", "a"), sampler=sampler)
    assert [group[0].group for group in groups] == ["0/a", "0/a#2"]
    assert len({params.seed for _, _, params in sampler.requests}) == 6


def test_episodes_do_not_wait_for_each_other():
    """One episode's first tool returns only when the others have had all their turns."""
    steps: Counter[str] = Counter()
    others_done = asyncio.Event()

    class Slow(Echo):
        async def step(self, message: Message) -> Step:
            steps[self.task.id] += 1
            if steps["b"] == steps["c"] == 3:
                others_done.set()
            if self.task.id == "slow":
                await others_done.wait()
            return await super().step(message)

    groups = rollout(Slow, names=("slow", "b", "c"), episode_timeout=30)
    assert [played.status for [played] in groups] == ["done"] * 3


def test_max_concurrency():
    running, most = 0, 0

    class Counted(Echo):
        async def reset(self) -> list[Message]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            return await super().reset()

        async def close(self) -> None:
            nonlocal running
            running -= 1

    rollout(Counted, names=tuple("abcdef"), max_concurrency=2)
    assert most == 2
    rollout(Counted, names=tuple("abcdef"))
    assert most == 6


def test_max_turns():
    [[played]] = rollout(say=lambda *_: call_text("echo", text="x"), max_turns=3)
    assert played.status == "max_turns" and len(played.turns) == 3 and played.answer == ""
    assert played.turns[-1].replies[0].content == "x"  # the last call was still answered
    assert played.reward == Reward(0.0)


def test_a_model_that_never_stops():
    """A turn without a stop token ends the episode; its calls are not run and no stop token is made up."""
    endless = call_text("echo", text="x") + " and so on" * 100
    [[played]] = rollout(say=lambda *_: endless, params=SamplingParams(max_tokens=50))
    assert played.status == "truncated" and len(played.turns) == 1 and played.answer == ""
    turn = played.turns[0]
    assert len(turn.completion.token_ids) == 50 and STOP not in turn.completion.token_ids
    assert turn.replies == [] and turn.tool_results == []
    assert played.reward == Reward(0.0)


def test_a_conversation_that_no_longer_fits():
    sampler = FakeSampler(lambda *_: call_text("echo", text="y" * 40), max_length=200)
    [[played]] = rollout(sampler=sampler)
    assert played.status == "truncated" and len(played.turns) == 2
    # The second turn had less room than a turn may have, and got only that.
    assert sampler.requests[-1][2].max_tokens == 200 - len(sampler.requests[-1][1]) < PARAMS.max_tokens
    prompt = len(sampler.requests[0][1])
    [[played]] = rollout(sampler=FakeSampler(say_echo_then_ok, max_length=prompt + 1))
    assert played.status == "truncated" and len(played.turns[0].completion.token_ids) == 1
    [[played]] = rollout(sampler=FakeSampler(say_echo_then_ok, max_length=prompt))
    assert played.status == "truncated" and played.turns == []
    sampler = FakeSampler(say_echo_then_ok, max_length=5)
    [[played]] = rollout(sampler=sampler)
    assert played.status == "truncated" and played.turns == [] and "the limit is 5" in str(played.error)
    assert played.reward is None and sampler.requests == []


def test_long_replies_are_cut_before_they_become_tokens():
    [[played]] = rollout(
        say=lambda s, t, p: call_text("echo", text="z" * 90) if t == 0 else "ok", max_reply_tokens=20
    )
    assert played.turns[0].replies[0].content == "z" * 17 + "..."
    assert played.turns[0].tool_results[0].content == "z" * 90
    assert (
        FakeChat().decode(played.turns[1].prompt_ids).count("z") == 90 + 17
    )  # the call itself, and the cut reply


def test_metrics():
    class Fragile(Echo):
        async def reset(self) -> list[Message]:
            if self.task.id == "reset":
                raise KeyError("reset")
            return await super().reset()

    def say(session: int, turn: int, prompt: str) -> str:
        if session == 3:
            return "z" * 500
        return (
            call_text("echo" if turn else "ecko", text="x") if turn < 2 else ("ok" if session == 0 else "no")
        )

    groups = rollout(Fragile, say=say, names=("a", "b", "reset", "c"), reward=None)
    metrics = rollout_metrics([t for group in groups for t in group])
    assert metrics["episodes"] == 4 and metrics["episodes/done"] == 2
    assert metrics["episodes/error"] == 1 and metrics["episodes/truncated"] == 1
    assert metrics["episodes/max_turns"] == 0 and metrics["episodes/unscored"] == 1
    assert metrics["tool_calls"] == 4 and metrics["tool_success"] == 0.5
    assert metrics["turns"] == 7 / 4 and metrics["reward"] == pytest.approx(1 / 3)
    assert metrics["sampled_tokens"] == sum(
        len(t.completion.token_ids) for g in groups for p in g for t in p.turns
    )
    assert rollout_metrics([])["episodes"] == 0 and "reward" not in rollout_metrics([])


def test_scripts_take_the_same_way_as_samples():
    calls = [Message("assistant", tool_calls=[ToolCall("echo", {"text": f"0.{turn}"})]) for turn in range(2)]
    scripted = asyncio.run(play(Echo(tasks("a")[0]), FakeChat(), [*calls, Message("assistant", "ok")]))
    [[sampled]] = rollout()
    assert [turn.prompt_ids for turn in scripted.turns] == [turn.prompt_ids for turn in sampled.turns]
    assert [t.completion.token_ids for t in scripted.turns] == [t.completion.token_ids for t in sampled.turns]
    assert scripted.reward == sampled.reward and scripted.status == "done"
    assert all(value == 0 for turn in scripted.turns for value in turn.completion.logprobs)


def test_a_script_that_ends_too_early():
    with pytest.raises(ValueError, match="the script ended before the episode"):
        asyncio.run(play(Echo(tasks("a")[0]), FakeChat(), []))


def test_no_tasks_no_groups():
    assert rollout(names=()) == []


def test_the_tail_is_the_time_in_which_few_episodes_are_left():
    """Seven of eight episodes end at once and one goes on: from the end of the seventh on fewer than two are left."""
    ended: list[float] = []

    class Slow(Echo):
        async def step(self, message: Message) -> Step:
            if self.task.id == "h":
                while len(ended) < 7:
                    await asyncio.sleep(0)
                ended.append(time.perf_counter())
                await asyncio.sleep(0.05)
            return Step(done=True)

    def end(_: Trajectory) -> None:
        ended.append(time.perf_counter())

    engine = RolloutEngine(Slow, FakeChat(), PARAMS, reward=lambda episode: 1.0, on_episode=end)
    engine.rollout(tasks(*"abcdefgh"), FakeSampler(say_echo_then_ok))
    assert 0.04 < engine.tail_seconds < ended[-1] - ended[5]
    engine.tail_seconds = 0.0
    engine.rollout([], FakeSampler(say_echo_then_ok))
    engine.rollout(tasks("a"), FakeSampler(say_echo_then_ok))
    assert engine.tail_seconds == 0.0
