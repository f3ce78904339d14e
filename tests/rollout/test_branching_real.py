"""Forked episodes with the built-in model and the native engine."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Self

import pytest

from tests.rollout.test_rollout_real import (
    assert_logprobs_of_the_model,
    assert_token_exact,
    chat,
    forced_tasks,
    tiny,
    without_times,
)
from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.cluster.places import EngineHandle
from TrainingFactory.common.seeds import derive_seed
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.rollout.branching import Branching
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.tools import tool
from TrainingFactory.types import Completion, Message, SamplingParams, Step, Task, ToolCall, Trajectory

PARAMS = SamplingParams(max_tokens=24)
RULES: dict[str, Any] = {"at": "tool_result", "max_forks": 2}


class Tally(ToolEnvironment):
    """Whatever the model says, a call follows, three times. Replies take a random time and depend on the calls."""

    latency = random.Random(0)

    def __init__(self, task: Task, tools: Any = ()) -> None:
        super().__init__(task, tools)
        self.said: list[int] = []

    @tool
    async def note(self, length: int) -> str:
        await asyncio.sleep(Tally.latency.random() / 50)
        self.said.append(length)
        return f"So far {self.said}, and a few more words."

    async def step(self, message: Message) -> Step:
        if len(self.said) == 3:
            return Step(done=True)
        calls = [ToolCall("note", {"length": len(message.content)}, "c")]
        return await super().step(Message("assistant", tool_calls=calls))

    def reward(self, episode: Any) -> float:
        return float(sum(self.said))


class ForkingTally(Tally):
    async def fork(self) -> Self:
        forked = type(self)(self.task)
        forked.said = list(self.said)
        return forked


def engine(slots: int = 8, deterministic: bool = False) -> NativeEngine:
    return NativeEngine(tiny().model, slots=slots, max_length=1024, deterministic=deterministic)


def rollout(
    sampler: Any, environment: Any = ForkingTally, count: int = 1, group_size: int = 2, **options: Any
) -> list[Trajectory]:
    rules = Branching(**RULES | options.pop("branching", {}))
    rollouts = RolloutEngine(environment, chat(), PARAMS, branching=rules, seed=11, **options)
    groups = asyncio.run(rollouts.rollout_batch(forced_tasks(count), sampler, group_size))
    return [trajectory for group in groups for trajectory in group]


def test_a_forked_session_computes_only_new_tokens():
    """Its first turn shares the pages of its parent, also after the parent was closed; log-probs are those of a fresh
    session."""
    sampler, params = engine(), SamplingParams(max_tokens=8, seed=5, stop_ids=(0,))

    async def play() -> tuple[Completion, ...]:
        parent = sampler.session()
        prompt = list(range(2, 302))
        first = await parent.sample(prompt, params)
        prompt += [*first.token_ids, 7, 8, 9]
        before = sampler.stats.prefilled_tokens
        child = parent.fork()
        forked = await child.sample(prompt, params)
        assert sampler.stats.prefilled_tokens - before <= 4
        parent.close()
        late = parent.fork()
        await late.sample(prompt, params)
        assert sampler.stats.prefilled_tokens - before <= 8 and sampler.stats.shared_tokens >= 2 * 300
        fresh = await engine().sample(prompt, params)
        return forked, fresh

    forked, fresh = asyncio.run(play())
    assert forked.token_ids == fresh.token_ids
    assert forked.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_log_probs_and_tokens_of_forked_episodes():
    sampler = engine()
    played = rollout(sampler, group_size=1, branching={"continuations": 3})
    assert sum(t.parent is not None for t in played) >= 4
    for trajectory in played:
        assert_token_exact(trajectory)
        assert_logprobs_of_the_model(trajectory)
    prompts = sum(len(t.turns[-1].prompt_ids) for t in played if t.parent is not None)
    assert sampler.stats.prefilled_tokens < prompts / 2  # the shared turns are not prefilled again


def test_forks_differ_and_reproduce_when_played_alone():
    played = rollout(engine())
    for trajectory in played:
        if trajectory.parent is not None and trajectory.own_turns:
            parent = next(t for t in played if t.member == trajectory.parent)
            turn = trajectory.fork_turn
            assert parent.turns[turn].completion != trajectory.turns[turn].completion

    fresh = engine()

    async def again(trajectory: Trajectory) -> list[list[int]]:
        session, sampled = fresh.session(), []
        for number, turn in enumerate(trajectory.turns):
            if number < trajectory.fork_turn:
                continue
            seed = derive_seed(11, 0, trajectory.task.id, trajectory.member, number)
            params = SamplingParams(max_tokens=24, seed=seed, stop_ids=chat().stop_ids)
            sampled.append((await session.sample(turn.prompt_ids, params)).token_ids)
        return sampled

    forked = [t for t in played if t.parent is not None]
    assert forked
    for trajectory in forked:
        own = [turn.completion.token_ids for turn in trajectory.own_turns]
        assert asyncio.run(again(trajectory)) == own


def test_deterministic_whatever_the_latencies_and_the_kind_of_fork():
    """Fewer slots than leaves: the same tokens and log-probs, to the bit."""
    runs = []
    for latency, environment in ((1, ForkingTally), (2, Tally)):
        Tally.latency = random.Random(latency)
        sampler = engine(slots=3, deterministic=True)
        played = rollout(sampler, environment, 2, 1, branching={"in_waves": True}, max_concurrency=3)
        runs.append([without_times(trajectory) for trajectory in played])
    assert runs[0] == runs[1]
    assert any(t.parent not in (None, 0) for t in runs[0])  # a fork of a fork


class LocalPlaces:
    """Engines of a fleet, in this process."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []  # place and session

    async def launch_engine(self, number: int) -> EngineHandle:
        native, sessions, requests = engine(), {}, self.requests

        class Handle:
            name = f"engine {number}"

            async def call(self, method: str, *arguments: Any) -> Any:
                prompt, params, session = arguments
                requests.append((number, session))
                sessions.setdefault(session, native.session())
                return await sessions[session].sample(prompt, params)

            async def close(self) -> None: ...

        return Handle()  # type: ignore[return-value]

    async def close(self) -> None: ...


def test_a_fork_stays_on_the_engine_of_its_parent():
    """Two engines: every tree is sampled by one of them, whose cache has its turns."""
    places = LocalPlaces()
    fleet = Fleet(places, 2, 1024)  # type: ignore[arg-type]
    played = rollout(fleet, group_size=4, branching={"max_forks": 1})
    homes: dict[int, set[int]] = {}
    for place, session in places.requests:
        homes.setdefault(session, set()).add(place)
    assert all(len(home) == 1 for home in homes.values())
    forks = len([t for t in played if t.parent is not None])
    assert forks and len(homes) == 4 + forks
    assert sum(fleet._open_sessions.values()) == 0
