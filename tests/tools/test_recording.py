"""Record and replay: the same episodes again, with no tool called."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.kits.rollout import Echo, call_text, rollout
from TrainingFactory.protocols import Episode
from TrainingFactory.tools import tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.recording import (
    CALLS_FILE,
    CallPosition,
    EpisodeKey,
    Recorder,
    ReplayMismatch,
    save_specs,
)
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Reward, Task, ToolCall, ToolFailure, ToolResult, ToolSpec

KEY = EpisodeKey(3, "a", 1)


def place(batch: int = 0, index: int = 0, key: EpisodeKey = KEY) -> CallPosition:
    return CallPosition(key, batch, index)


def recorded(folder: Path, *calls: tuple[CallPosition, ToolCall, ToolResult | ToolFailure]) -> Path:
    recorder = Recorder()
    save_specs(folder, [ToolSpec("sql")])
    recorder.record_to(folder)
    for entry in calls:
        recorder.record(*entry)
    recorder.commit()
    return folder


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    image = {"type": "image", "data": "x"}
    whole = ToolResult(
        "naïve \ud800 語", ok=False, error="exception", cached=True, seconds=0.25, attachments=[image]
    )
    entries: list[tuple[CallPosition, ToolCall, ToolResult]] = [
        (place(0, 1), ToolCall("sql", {"b": 1, "a": [None, 2.5]}), whole),
        (place(0, 0), ToolCall("sql", {}), ToolResult("")),
        (place(0, 0, EpisodeKey("eval-3", "a", 1)), ToolCall("sql", {}), ToolResult("evaluated")),
    ]
    recorder = Recorder(recorded(tmp_path, *entries))
    for where, call, result in entries:
        assert recorder.replay(where, call) == result
    # the order of arguments says nothing
    assert recorder.replay(place(0, 1), ToolCall("sql", {"a": [None, 2.5], "b": 1}, "another id")) == whole
    recorder.close()


def test_failures_are_raised_again(tmp_path: Path) -> None:
    recorder = Recorder(recorded(tmp_path, (place(), ToolCall("sql"), ToolFailure("the server is gone"))))
    with pytest.raises(ToolFailure, match=r"^the server is gone$"):
        recorder.replay(place(), ToolCall("sql"))
    recorder.check_replay()  # that is no departure from the recording


@pytest.mark.parametrize(
    ("where", "call", "says"),
    [
        (place(2, 1), ToolCall("sql", {"q": 1}), "turn 2, call 1: .* no such call was recorded"),
        (place(), ToolCall("sql", {"q": 2}), 'sql {"q": 2}, but .* is sql {"q": 1}'),
        (place(), ToolCall("python", {"q": 1}), 'python {"q": 1}, but .* is sql {"q": 1}'),
        (place(key=EpisodeKey(3, "a", 0)), ToolCall("sql", {"q": 1}), "member 0"),
        (place(key=EpisodeKey(3, "b", 1)), ToolCall("sql", {"q": 1}), "task b"),
        (place(key=EpisodeKey("eval-3", "a", 1)), ToolCall("sql", {"q": 1}), "step eval-3"),
    ],
)
def test_a_call_that_was_never_recorded(
    tmp_path: Path, where: CallPosition, call: ToolCall, says: str
) -> None:
    recorder = Recorder(recorded(tmp_path, (place(), ToolCall("sql", {"q": 1}), ToolResult("x"))))
    recorder.check_replay()
    with pytest.raises(ReplayMismatch, match=says) as caught:
        recorder.replay(where, call)
    assert str(tmp_path) in str(caught.value) and "sampling.deterministic=true" in str(caught.value)
    with pytest.raises(ValueError, match=says):  # however the caller took it
        recorder.check_replay()


def test_what_is_not_committed_is_not_written(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.record_to(tmp_path)
    recorder.record(place(), ToolCall("sql"), ToolResult("x"))
    assert (tmp_path / CALLS_FILE).read_text() == ""


def test_half_a_line_of_a_process_that_was_killed_is_left_out(tmp_path: Path) -> None:
    path = recorded(tmp_path, (place(), ToolCall("sql"), ToolResult("x"))) / CALLS_FILE
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    assert Recorder(tmp_path).replay(place(), ToolCall("sql")) == ToolResult("x")


def test_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    for text in ("first", "second"):
        recorded(tmp_path, (place(), ToolCall("sql"), ToolResult(text)))
    assert Recorder(tmp_path).replay(place(), ToolCall("sql")) == ToolResult("second")


# episodes


touched: list[str] = []


@tool
async def slow(text: str) -> str:
    """Answers by chance and after a random while, but "wait" after all others."""
    touched.append(text)
    await asyncio.sleep(0.1 if text == "wait" else random.random() * 0.02)
    return f"{text} {random.random()}"


class Busy(Echo):
    """Two calls a turn, whose latencies differ every time."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, [slow])


def say(session: int, turn: int, prompt: str) -> str:
    calls = [call_text("slow", text=f"{session}.{turn}.{n}") for n in range(2)]
    return "\n".join(calls) if turn < 2 else prompt[-40:]  # the answer depends on what the tools said


async def verified(episode: Episode) -> float:
    first, second = await asyncio.gather(episode.call("slow", text="one"), episode.call("slow", text="two"))
    return float(first.content.split()[1]) - float(second.content.split()[1])


def play(recorder: Recorder | None, **options: Any) -> list[Any]:
    groups = rollout(
        Busy, options.pop("say", say), ("a", "b", "a"), group_size=3, reward=options.pop("reward", verified),
        runtime=ToolRuntime(recorder=recorder), **options,
    )  # fmt: skip
    if recorder is not None:
        recorder.commit()
    return [(t.group, t.member, t.turns, t.reward, t.status) for group in groups for t in group]


def test_replayed_episodes_are_the_same_and_call_nothing(tmp_path: Path) -> None:
    save_specs(tmp_path, [])
    recorder = Recorder()
    recorder.record_to(tmp_path)
    first = play(recorder)
    assert len((tmp_path / CALLS_FILE).read_text().splitlines()) == 9 * (2 * 2 + 2)  # those of the reward too
    touched.clear()
    again = Recorder(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    again.record_to(copy)
    assert play(again) == first
    assert not touched
    assert (copy / CALLS_FILE).read_text() == (tmp_path / CALLS_FILE).read_text()
    assert play(None) != first and touched  # the comparison is not blind


def test_leaving_the_recording_ends_all_episodes(tmp_path: Path) -> None:
    save_specs(tmp_path, [])
    recorder = Recorder()
    recorder.record_to(tmp_path)
    play(recorder)

    def other(session: int, turn: int, prompt: str) -> str:
        return say(session, turn, prompt).replace("4.1.1", "4.1.7")

    with pytest.raises(ValueError, match=r"step 0, task b, member 1, turn 1, call 1.*4\.1\.7.*4\.1\.1"):
        play(Recorder(tmp_path), say=other)

    async def swallows(episode: Episode) -> float:
        try:
            await episode.call("slow", text="three")
        except Exception:
            return 0.0
        return 1.0

    with pytest.raises(ValueError, match=r"member \d, reward, call \w+#0: the run calls slow .*three"):
        play(Recorder(tmp_path), reward=swallows)


def both(folder: Path, environment: Any, say: Any, **options: Any) -> tuple[Any, Any]:
    """The episode as it was recorded, and as it is replayed from that."""
    save_specs(folder, [])
    ended = []
    for number in range(2):
        recorder = Recorder(folder if number else None)
        if not number:
            recorder.record_to(folder)
        [[played]] = rollout(environment, say, runtime=ToolRuntime(recorder=recorder), **options)
        recorder.commit()
        played.seconds = 0.0
        ended.append(played)
    return ended[0], ended[1]


class Safe(Echo):
    """The reward looks at what the tools have left on the environment."""

    runs = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task, [slow])
        self.seen: list[str] = []

    @tool
    async def turn(self, by: int) -> str:
        """A method that calls other tools, some of them at the same time."""
        type(self).runs += 1
        texts = [f"{by}", "wait"]
        calls = (self.executor.batch_execute([ToolCall("slow", {"text": text})]) for text in texts)
        self.seen += [result.content for [result] in await asyncio.gather(*calls)]
        [heard] = await self.executor.batch_execute([ToolCall("echo", {"text": f"{by} heard"})])
        return f"{len(self.seen)} {heard.content}"

    @tool(timeout=0.05)
    async def hang(self) -> str:
        type(self).runs += 1
        await asyncio.sleep(600)
        return ""

    async def reward(self, episode: Episode) -> float:  # type: ignore[override]
        """Two chains of calls; how they mix depends on who is quicker."""

        async def chain(*texts: str) -> list[str]:
            return [(await episode.call("slow", text=text)).content for text in texts]

        found = await asyncio.gather(chain("wait", "b", "b"), chain("c", "d", "e"))
        numbers = [text.split()[1] for texts in (*found, self.seen) for text in texts]
        return sum(float(number) for number in numbers)


def test_state_on_the_environment_is_there_in_a_replay(tmp_path: Path) -> None:
    def say(session: int, turn: int, prompt: str) -> str:
        calls = [
            call_text("turn", by=1) + "\n" + call_text("turn", by=2),
            call_text("hang"),
            call_text("turn", by=1),
        ]
        return calls[turn] if turn < 3 else prompt[-40:]

    Safe.runs = 0
    touched.clear()
    first, again = both(tmp_path, Safe, say)
    assert first.reward is not None and len(touched) == 6 + 6  # in the replay none
    assert again == first
    assert Safe.runs == 4 + 3  # what has hung is not waited for again


@pytest.mark.parametrize(("adds", "total"), [([1, 2], 3.0), ([1], 0.0)])
def test_a_method_that_the_cache_answered_is_run_when_it_was_run(
    tmp_path: Path, adds: list[int], total: float
) -> None:
    class Adder(Echo):
        total = 0

        @tool(stateful=True)
        def add(self, by: int) -> str:
            self.total += by
            return str(self.total)

        def reward(self, episode: Episode) -> float:
            return float(self.total)

    def say(session: int, turn: int, prompt: str) -> str:
        return call_text("add", by=adds[turn]) if turn < len(adds) else "ok"

    save_specs(tmp_path, [])
    recorder, cache = Recorder(), ToolCache(tmp_path / "cache.sqlite")
    recorder.record_to(tmp_path)
    rollout(Adder, lambda _, turn, prompt: call_text("add", by=1) if turn < 1 else "ok",
            runtime=ToolRuntime(cache=cache))  # fmt: skip
    [[first]] = rollout(Adder, say, runtime=ToolRuntime(cache=cache, recorder=recorder))
    recorder.commit()
    cache.close()
    [[again]] = rollout(Adder, say, runtime=ToolRuntime(recorder=Recorder(tmp_path)))
    assert first.turns[0].tool_results[0].cached
    assert first.turns == again.turns and first.reward == again.reward == Reward(total)


def test_a_method_that_answers_differently_in_a_replay(tmp_path: Path) -> None:
    class Chance(Echo):
        @tool
        def throw(self) -> str:
            return str(random.random())

        @tool(pure=True)
        def look(self) -> str:
            return str(random.random())

    first, again = both(tmp_path, Chance, lambda _, turn, prompt: call_text("look") if turn < 1 else "ok")
    assert first == again  # a pure one leaves nothing behind, and is not run
    with pytest.raises(
        ValueError, match=r"turn 0, call 0: the run calls throw .*now returns '0\..*recorded .*'0\."
    ):
        both(tmp_path, Chance, lambda _, turn, prompt: call_text("throw") if turn < 1 else "ok")


class Hangs(Echo):
    @tool(timeout=600)
    async def hang(self) -> str:
        await asyncio.sleep(600)
        return ""

    async def reward(self, episode: Episode) -> float:  # type: ignore[override]
        try:
            return float((await asyncio.wait_for(episode.call("hang"), 0.2)).ok)
        except TimeoutError:
            return 0.5


def test_an_episode_that_was_broken_off_in_a_call(tmp_path: Path) -> None:
    """It is broken off again in the replay, though no tool is slow there."""
    first, again = both(tmp_path, Hangs, lambda *_: call_text("hang"), episode_timeout=1)
    assert again == first and len(first.turns) == 1
    assert first.status == "error" and "longer than 1 s" in str(first.error)


def test_a_call_that_a_reward_gave_up(tmp_path: Path) -> None:
    first, again = both(tmp_path, Hangs, lambda *_: "ok")
    assert again == first and first.reward == Reward(0.5)
