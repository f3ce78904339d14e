"""Episodes that fork: members, seeds, budgets, environments, limits and failures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from tests.kits.rollout import PARAMS, Echo, FakeChat, FakeSampler, call_text, tasks
from TrainingFactory.data.trajectories import load_trajectories, save_trajectories
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.rollout import RolloutEngine, rollout_metrics
from TrainingFactory.rollout.branching import Branching
from TrainingFactory.tools import tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.recording import Recorder
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Completion, Message, SamplingParams, Task, Trajectory, Turn


class Counting(ToolEnvironment):
    """Counts its calls, in the environment."""

    made: ClassVar[list[Counting]] = []

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.count, self.closed = 0, False
        self.made.append(self)

    @tool
    def add(self, number: int) -> str:
        self.count += number
        return f"sum {self.count}"

    def reward(self, episode: Any) -> float:
        return float(self.count)

    async def close(self) -> None:
        self.closed = True


class Forking(Counting):
    async def fork(self) -> Self:
        forked = type(self)(self.task)
        forked.count = self.count
        return forked


def say_add(session: int, turn: int, prompt: str) -> str:
    """Three calls, then an answer; forked sessions add other numbers."""
    return call_text("add", number=session + 1) if prompt.count("!add") < 3 else "ok"


def rollout(
    environment: Any = Forking,
    group_size: int = 1,
    say: Any = say_add,
    sampler: FakeSampler | None = None,
    names: Sequence[str] = ("a",),
    branching: dict[str, Any] | None = None,
    **options: Any,
) -> list[Trajectory]:
    Counting.made.clear()
    rules = Branching(**{"at": "turns", "turns": [1], "max_forks": 1} | (branching or {}))
    engine = RolloutEngine(environment, FakeChat(), options.pop("params", PARAMS), branching=rules, **options)
    groups = asyncio.run(engine.rollout_batch(tasks(*names), sampler or FakeSampler(say), group_size))
    assert all(environment.closed for environment in Counting.made)
    return [trajectory for group in groups for trajectory in group]


def replies(trajectory: Trajectory) -> list[str]:
    return [reply.content for turn in trajectory.turns for reply in turn.replies]


@pytest.mark.parametrize("environment", [Forking, Counting])
def test_a_fork_shares_the_turns_and_the_state_before_it(environment: Any):
    """Once by `fork`, once by repeating the calls in a new environment."""
    root, child = rollout(environment)
    assert (child.parent, child.fork_turn, child.member) == (0, 1, 1)
    assert (root.parent, root.member) == (None, 0)
    assert child.turns[0] is root.turns[0]
    assert replies(root) == ["sum 1", "sum 2", "sum 3"]
    assert replies(child) == ["sum 1", "sum 3", "sum 5"]
    assert [t.reward.outcome for t in (root, child) if t.reward] == [3, 5]
    assert len(Counting.made) == 2


def test_members_name_the_path():
    """Two roots, three continuations, two forks: 2 x 9 leaves. A member is root + 2 x the digits of its forks."""
    played = rollout(group_size=2, branching={"turns": [1, 2], "continuations": 3, "max_forks": 2})
    assert [t.member for t in played] == list(range(18))
    parents = {t.member: (t.parent, t.fork_turn) for t in played}
    assert parents[0] == parents[1] == (None, 0)
    assert parents[2] == parents[4] == (0, 1)  # digits 1 and 2 of root 0's first fork
    assert parents[6] == (0, 2) and parents[2 + 6] == (2, 2) and parents[1 + 4 + 12] == (5, 2)


def test_seeds_follow_the_member():
    sampler = FakeSampler(say_add)
    rollout(sampler=sampler)
    seeds = {(number, len(ids)): params.seed for number, ids, params in sampler.requests}
    assert len(set(seeds.values())) == 4 + 3  # the shared turn is sampled once


def test_where_episodes_fork():
    def turn(results: int = 0, logprob: float = -0.5) -> Turn:
        message = Message("assistant")
        return Turn([1], Completion([5, 1], [logprob] * 2, "stop"), message, tool_results=[None] * results)  # type: ignore[list-item]

    def after(played: list[Turn], **options: Any) -> bool:
        return Branching(**options).forks_after(played)

    assert after([turn(1)]) and not after([turn(1), turn(0)])
    assert after([turn(1)] * 2, every=2) and not after([turn(1)] * 3, every=2)
    assert after([turn()] * 3, at="turns", turns=[3]) and not after([turn()] * 2, at="turns", turns=[3])
    assert after([turn(logprob=-1.2)], at="entropy", entropy=1.0)
    assert not after([turn(logprob=-0.8)], at="entropy", entropy=1.0)
    assert after([turn(2)], at="function", function=lambda turns: len(turns[-1].tool_results) == 2)


@pytest.mark.parametrize(("limit", "leaves"), [(None, 16), (16, 16), (9, 9), (5, 5), (3, 3), (2, 2)])
def test_the_episode_budget_is_divided_equally(limit: int | None, leaves: int):
    """Two roots with up to 8 leaves each. A path forks while its share is at least two."""
    options = {"at": "tool_result", "max_forks": 3, "max_episodes": limit}
    played = rollout(group_size=2, branching=options)
    assert len(played) == leaves
    roots = Counter(t.member % 2 for t in played)
    assert abs(roots[0] - roots[1]) <= 1


def test_the_token_budget_ends_forks_and_no_episode():
    sampled = len(call_text("add", number=1)) + 1
    params = SamplingParams(max_tokens=50)
    options = {"at": "tool_result", "max_forks": 3}
    enough = rollout(branching=options | {"max_tokens": sampled + 100}, params=params)
    assert len(enough) == 2
    assert len(rollout(branching=options | {"max_tokens": sampled + 99}, params=params)) == 1
    assert all(t.status == "done" for t in enough)


def test_no_fork_before_a_turn_that_cannot_be_sampled():
    assert len(rollout(max_turns=1)) == 1
    assert len(rollout(max_turns=2)) == 2
    assert len(rollout(sampler=FakeSampler(say_add, max_length=35))) == 1


@pytest.mark.parametrize("in_waves", [False, True])
def test_fewer_places_than_leaves(in_waves: bool):
    """One episode at a time: a parent that has forked ends before its forks begin, and none waits for ever."""
    running = most = 0

    class Busy(Forking):
        async def step(self, message: Message) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await super().step(message)

    options = {"at": "tool_result", "max_forks": 3, "in_waves": in_waves}
    played = rollout(Busy, group_size=2, names=("a", "b"), branching=options, max_concurrency=1)
    assert len(played) == 32 and most == 1
    assert {t.status for t in played} == {"done"}


def test_waves_open_sessions_in_a_fixed_order():
    """Whatever the latencies, session numbers belong to the same paths."""

    def paths(slow: str) -> list[tuple[int, str]]:
        class Slow(Forking):
            async def step(self, message: Message) -> Any:
                await asyncio.sleep(0.02 * (self.task.id == slow))
                return await super().step(message)

        sampler = FakeSampler(say_add)
        options = {"at": "tool_result", "max_forks": 2, "in_waves": True}
        rollout(Slow, 2, sampler=sampler, names=("a", "b"), branching=options)
        first = {number: FakeChat().decode(ids) for number, ids, _ in reversed(sampler.requests)}
        return sorted(first.items())

    assert paths("a") == paths("b")
    assert len(paths("a")) == 16


def test_a_pure_environment_forks_without_repeating_calls():
    calls: Counter[int] = Counter()

    class Pure(ToolEnvironment):
        @tool(pure=True)
        @staticmethod
        async def add(number: int) -> str:
            calls[number] += 1
            return str(number)

        def reward(self, episode: Any) -> float:
            return 1.0

    _, child = rollout(Pure)
    assert calls == {1: 3, 2: 2}
    assert replies(child) == ["1", "2", "2"]


class Notebook:
    """A tool source whose sessions have a state of their own, like an interpreter per episode."""

    opened: ClassVar[list[Notebook.Session]] = []

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    def session(self) -> Notebook.Session:
        self.opened.append(Notebook.Session())
        return self.opened[-1]

    class Session:
        def __init__(self) -> None:
            self.total = self.closed = 0

            @tool
            async def add(number: int) -> str:
                self.total += number
                return f"total {self.total}"

            self.tools = [add]

        async def close(self) -> None:
            self.closed += 1


def test_tools_with_a_session_per_episode_are_replayed():
    """Also if the environment has a `fork`, which does not copy the session."""

    class Writing(ToolEnvironment):
        def __init__(self, task: Task) -> None:
            super().__init__(task, [Notebook()])

        async def fork(self) -> Self:
            return type(self)(self.task)

        def reward(self, episode: Any) -> float:
            return 1.0

    Notebook.opened.clear()
    root, child = rollout(Writing)
    assert (replies(root)[-1], replies(child)) == ("total 3", ["total 1", "total 3", "total 5"])
    assert [session.closed for session in Notebook.opened] == [1, 1]


def test_random_tools_drop_the_fork(caplog: pytest.LogCaptureFixture):
    numbers = iter(range(100))

    class Random(Counting):
        @tool
        def add(self, number: int) -> str:
            return str(next(numbers))

    Counting.made.clear()
    engine = RolloutEngine(
        Random, FakeChat(), PARAMS, branching=Branching(at="turns", turns=[1], max_forks=1)
    )
    with caplog.at_level(logging.INFO):
        [a], [b] = asyncio.run(engine.rollout_batch(tasks("a", "b"), FakeSampler(say_add)))
    assert a.status == b.status == "done" and engine.dropped_forks == 2
    levels = [record.levelname for record in caplog.records if "turn 1 differ" in record.getMessage()]
    assert levels == ["WARNING", "INFO"]  # announced once
    assert all(environment.closed for environment in Counting.made)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", "Faulty.fork (test_branching.py:"),
        ("hangs", "took longer than 0.05 s"),
        ("itself", "no independent environment"),
        ("nothing", "no independent environment"),
        ("shallow", "no independent environment"),
    ],
)
def test_a_faulty_fork_costs_one_continuation(fault: str, text: str, caplog: pytest.LogCaptureFixture):
    class Faulty(Counting):
        async def fork(self) -> Any:
            if fault == "raises":
                raise RuntimeError("no copy")
            if fault == "hangs":
                await asyncio.sleep(60)
            if fault == "shallow":
                forked = object.__new__(type(self))
                forked.__dict__ |= self.__dict__
                return forked
            return self if fault == "itself" else None

    [root] = rollout(Faulty, branching={"timeout": 0.05})
    assert root.status == "done" and replies(root) == ["sum 1", "sum 2", "sum 3"]
    assert text in caplog.text


@pytest.mark.parametrize("case", ["excluded", "replay=false"])
def test_an_environment_that_cannot_fork_is_not_branched(case: str, caplog: pytest.LogCaptureFixture):
    class Excluded(Counting):
        fork = None

    environment = Excluded if case == "excluded" else Counting
    played = rollout(environment, 2, branching={"replay": case == "excluded"})
    assert [t.member for t in played] == [0, 1]
    assert caplog.text.count("cannot fork") == 1


def test_a_faulty_function_forks_nothing(caplog: pytest.LogCaptureFixture):
    def function(turns: Sequence[Turn]) -> bool:
        return turns[99].fold is None

    assert len(rollout(branching={"at": "function", "function": function})) == 1
    assert "training.branching.function (test_branching.py" in caplog.text


def test_a_group_reward_sees_the_forks():
    seen: list[int] = []

    def ranks(episodes: Sequence[Any]) -> list[float]:
        seen.append(len(episodes))
        return [float(episode.environment.count) for episode in episodes]

    for in_waves in (False, True):
        played = rollout(group_size=2, reward=ranks, branching={"in_waves": in_waves})
        assert [t.reward.outcome for t in played if t.reward] == [float(replies(t)[-1][4:]) for t in played]
    assert seen == [4, 4]


def test_cancelling_closes_waiting_forks():
    """The fork waits for the only place, with an environment of its own, while the root hangs."""

    class Hangs(Forking):
        async def step(self, message: Message) -> Any:
            if self.count:
                await asyncio.sleep(60)
            return await super().step(message)

    async def cancel() -> FakeSampler:
        Counting.made.clear()
        sampler = FakeSampler(say_add)
        rules = Branching(at="turns", turns=[1])
        engine = RolloutEngine(Hangs, FakeChat(), PARAMS, branching=rules, max_concurrency=1)
        batch = asyncio.create_task(engine.rollout_batch(tasks("a"), sampler))
        while len(sampler.sessions) < 2:
            await asyncio.sleep(0)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        return sampler

    sampler = asyncio.run(cancel())
    assert [session.closed for session in sampler.sessions] == [1, 1]
    assert len(Counting.made) == 2 and all(environment.closed for environment in Counting.made)


def timeless(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    def without_seconds(turn: Turn) -> Turn:
        results = [dataclasses.replace(result, seconds=0.0) for result in turn.tool_results]
        return dataclasses.replace(turn, tool_results=results)

    return [
        dataclasses.replace(t, seconds=0.0, turns=[without_seconds(turn) for turn in t.turns])
        for t in trajectories
    ]


@pytest.mark.parametrize("environment", [Forking, Counting])
def test_a_recorded_run_replays(environment: Any, tmp_path: Path):
    """Each call is recorded once, under the episode that made it; calls that a fork repeats are not."""
    options = {"at": "tool_result", "max_forks": 2}
    recorder = Recorder()
    (tmp_path / "tools.json").write_text("[]")
    recorder.record_to(tmp_path)
    recorded = rollout(environment, 2, branching=options, runtime=ToolRuntime(recorder=recorder))
    recorder.commit()
    rows = [json.loads(line) for line in (tmp_path / "tool_calls.jsonl").read_text().splitlines()]
    assert len(rows) == sum(len(t.own_turns) - 1 for t in recorded) == rollout_metrics(recorded)["tool_calls"]
    assert {(row["member"], row["batch"]) for row in rows} == {
        (t.member, t.fork_turn + n) for t in recorded for n in range(len(t.own_turns) - 1)
    }
    again = rollout(environment, 2, branching=options, runtime=ToolRuntime(recorder=Recorder(tmp_path)))
    assert timeless(again) == timeless(recorded)


def test_a_dropped_fork_is_dropped_in_a_replay(tmp_path: Path):
    numbers = iter(range(100))

    @tool
    def draw() -> str:
        return str(next(numbers))

    class Drawing(ToolEnvironment):
        def __init__(self, task: Task) -> None:
            super().__init__(task, [draw])

        def reward(self, episode: Any) -> float:
            return 1.0

    recorder = Recorder()
    (tmp_path / "tools.json").write_text("[]")
    recorder.record_to(tmp_path)
    say = lambda session, turn, prompt: call_text("draw") if turn < 2 else "ok"  # noqa: E731
    recorded = rollout(Drawing, say=say, runtime=ToolRuntime(recorder=recorder))
    recorder.commit()
    again = rollout(Drawing, say=say, runtime=ToolRuntime(recorder=Recorder(tmp_path)))
    assert len(recorded) == 1 and timeless(again) == timeless(recorded)


def test_cached_calls_of_a_stateful_tool(tmp_path: Path):
    """The cache answers the second root's calls, so its environment lags behind; its fork must not."""

    class Cached(Forking):
        @tool(stateful=True)
        def add(self, number: int) -> str:
            self.count += number
            return f"sum {self.count}"

    runtime = ToolRuntime(cache=ToolCache())
    say = lambda session, turn, prompt: say_add(0, turn, prompt)  # noqa: E731
    first = rollout(Cached, say=say, runtime=runtime)
    second = rollout(Cached, say=say, runtime=runtime)
    for played in (first, second):
        assert [replies(t) for t in played] == [["sum 1", "sum 2", "sum 3"]] * 2
    assert any(result.cached for t in second for turn in t.turns for result in turn.tool_results)


def test_stored_and_read_again(tmp_path: Path):
    played = rollout(group_size=2)
    save_trajectories(tmp_path / "episodes.jsonl", played)
    assert list(load_trajectories(tmp_path / "episodes.jsonl")) == played


def test_metrics_count_shared_turns_once_and_weigh_leaves():
    """One root forks, the other answers at once: its two leaves count half each."""
    say = lambda session, turn, prompt: "ok" if session == 1 else say_add(session, turn, prompt)  # noqa: E731
    played = rollout(group_size=2, say=say)
    assert [len(t.turns) for t in played] == [4, 1, 4]
    metrics = rollout_metrics(played)
    tokens = [[len(turn.completion.token_ids) for turn in t.turns] for t in played]
    assert metrics["sampled_tokens"] == sum(map(sum, tokens)) - tokens[0][0]
    assert metrics["tool_calls"] == 5
    assert metrics["episodes"] == 3
    assert (metrics["branching/forks"], metrics["branching/episodes"]) == (1, 1)
    assert metrics["branching/shared"] == pytest.approx(tokens[0][0] / sum(map(sum, tokens)))
    assert metrics["reward"] == pytest.approx(((3 + 7) / 2 + 0) / 2)
    assert not [name for name in rollout_metrics(played[1:2]) if name.startswith("branching")]


def test_plain_environments_of_the_kit_do_not_fork():
    """Without `branching`, nothing is recorded in the episodes."""
    engine = RolloutEngine(Echo, FakeChat(), PARAMS)
    [[played]] = asyncio.run(engine.rollout_batch(tasks("a"), FakeSampler(lambda *_: "ok")))
    assert (played.parent, played.fork_turn, played.own_turns) == (None, 0, played.turns)
