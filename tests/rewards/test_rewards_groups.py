"""Rewards of whole groups, through rollouts and runs."""

from __future__ import annotations

import asyncio
import math
import runpy
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kits.judge import Judge, judging
from tests.kits.rollout import PARAMS, Echo, FakeChat, FakeSampler, rollout, tasks
from tests.kits.run import Parity, Quiet, rows, small, train
from TrainingFactory.assembly.rewards import (
    OWN_REWARD_TEXT,
    check_group_size,
    check_reward,
    get_heldout_reward,
    make_reward,
)
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.evaluation.evaluation import Evaluation
from TrainingFactory.evaluation.rollouts import Rollouts
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import as_reward, compares_episodes
from TrainingFactory.rewards.combined import Combined
from TrainingFactory.rewards.process_reward import ProcessReward
from TrainingFactory.rollout import RolloutEngine, group_scoring, play
from TrainingFactory.services import PPOTrainer
from TrainingFactory.tools.recording import CALLS_FILE, SPECS_FILE, Recorder
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Message, Reward, Task, Trajectory

GUARD = 30  # seconds; only a hang takes so long


def outcomes(group: Sequence[Trajectory]) -> list[float | None]:
    return [None if each.reward is None else each.reward.outcome for each in group]


def say_number(session: int, turn: int, prompt: str) -> str:
    return f"{session}"


def by_rank(trajectories: list[Trajectory]) -> list[float]:
    """The larger the answer the better; 0 to 1."""
    order = sorted(int(each.answer) for each in trajectories)
    return [order.index(int(each.answer)) / max(len(order) - 1, 1) for each in trajectories]


def hinted(group: Sequence[Trajectory]) -> list[Reward]:
    return [Reward(value, parts={"rank": value}) for value in by_rank(list(group))]


class ByEpisodes:
    async def __call__(self, episodes: Sequence[Episode]) -> list[float]:
        return by_rank([each.trajectory for each in episodes])


def in_trl(completions: list[str], **columns: Any) -> list[float]:
    order = sorted(map(int, completions))
    return [order.index(int(each)) / (len(order) - 1) for each in completions]


@pytest.mark.parametrize("reward", [by_rank, hinted, ByEpisodes(), in_trl, as_reward(by_rank)])
def test_a_group_is_scored_in_one_call(reward: Any):
    first, second = rollout(reward=reward, say=say_number, names=("a", "b"), group_size=3)
    assert outcomes(first) == outcomes(second) == [0.0, 0.5, 1.0]
    assert Echo.closed == {"a": 3, "b": 3}
    assert compares_episodes(reward) == (reward is not in_trl) and as_reward(reward).grouped


def test_groups_are_scored_while_others_run_and_hold_no_place_of_theirs():
    """One episode at a time, three in a group: an ended one must not keep the gate or its session from its siblings.
    The second group ends only when the first has been scored."""
    told: list[str] = []
    scored = threading.Event()

    class Waiting(Echo):
        async def reset(self) -> list[Message]:
            if self.task.id == "b":
                for _ in range(GUARD * 100):
                    if scored.is_set():
                        break
                    await asyncio.sleep(0.01)
                assert scored.is_set()
            return await super().reset()

    async def reward(episodes: Sequence[Episode]) -> list[float]:
        assert all(sampler.sessions[number].closed == 1 for number in range(3))
        assert not Echo.closed[episodes[0].task.id]  # the environments are open
        assert (await episodes[0].call("echo", text="still here")).content == "still here"
        scored.set()
        return [1.0] * len(episodes)

    sampler = FakeSampler(say_number)
    groups = rollout(
        Waiting, reward=reward, names=("a", "b"), group_size=3, sampler=sampler, max_concurrency=1,
        on_episode=lambda each: told.append(f"{each.group} {each.member} {each.reward is not None}"),
    )  # fmt: skip
    assert [outcomes(group) for group in groups] == [[1.0] * 3] * 2
    assert told == [f"0/{name} {member} True" for name in "ab" for member in range(3)]
    assert [session.closed for session in sampler.sessions] == [1] * 6 and Echo.closed == {"a": 3, "b": 3}


class Failing(Echo):
    async def reset(self) -> list[Message]:
        if Failing.left > 0:
            Failing.left -= 1
            raise OSError("no such place")
        return await super().reset()


def test_members_that_failed_are_not_shown():
    seen: list[int] = []

    def reward(episodes: Sequence[Episode]) -> list[float]:
        seen.append(len(episodes))
        return [0.5] * len(episodes)

    for failed, shown in ((1, [2]), (2, [1]), (3, [])):
        Failing.left = failed
        [group] = rollout(Failing, reward=reward, group_size=3)
        assert seen == shown and outcomes(group) == [None] * failed + [0.5] * (3 - failed)
        assert sum("no such place" in str(each.error) for each in group) == failed
        seen.clear()


async def hanging(episodes: Any) -> list[float]:
    await asyncio.sleep(600)
    return []


def raising(episodes: Any) -> list[float]:
    raise KeyError("lost")


def leaving(episodes: Any) -> list[float]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (raising, "raised KeyError: 'lost'"),
        (leaving, "tried to end the program"),
        (lambda episodes: [1.0], "a list with one number for each of the 3 episodes"),
        (lambda episodes: 1.0, "a list with one number for each"),
        (lambda episodes: "123", "a list with one number for each"),
        (hanging, "scoring the group took longer than 1 s"),
        (as_reward(hanging, timeout=0.1), "took longer than 0.1 s"),
    ],
)
def test_what_is_wrong_with_a_whole_group_leaves_all_of_it_unscored(reward: Any, says: str):
    [group] = rollout(reward=reward, group_size=3, episode_timeout=1)
    assert all(each.reward is None and says in str(each.error) and each.status == "done" for each in group)
    assert Echo.closed == {"a": 3}


def test_one_bad_entry_leaves_one_member_unscored():
    found = [0.5, None, math.nan, "1", Reward(1.0, [1.0]), ValueError("not this one"), Reward(1.0, [0.0] * 3)]
    [group] = rollout(reward=lambda episodes: found, group_size=7)
    assert outcomes(group) == [0.5, None, None, None, None, None, 1.0]
    for each, says in zip(group[1:6], ("None", "nan", "'1'", "1 step rewards", "not this one"), strict=True):
        assert says in str(each.error)


def test_a_batch_that_is_broken_off_closes_everything():
    async def broken() -> None:
        started = asyncio.Event()

        async def reward(episodes: Sequence[Episode]) -> list[float]:
            started.set()
            await asyncio.sleep(600)
            return []

        sampler = FakeSampler(say_number)
        engine = RolloutEngine(Echo, FakeChat(), PARAMS, reward=reward)
        batch = asyncio.ensure_future(engine.rollout_batch(tasks("a", "b"), sampler, 2))
        await started.wait()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        assert [session.closed for session in sampler.sessions] == [1] * 4

    Echo.closed.clear()
    asyncio.run(asyncio.wait_for(broken(), GUARD))
    assert Echo.closed == {"a": 2, "b": 2}


def test_single_parts_beside_a_ranking():
    def at_least_one(trajectory: Trajectory) -> float:
        if trajectory.answer == "3":
            raise ValueError("not a three")
        return float(int(trajectory.answer) > 0)

    both = Combined({"rank": (1.0, by_rank), "big": (0.5, at_least_one), "own": (2.0, "environment")})
    nested = Combined({"all": (1.0, both)})
    for reward in (both, as_reward(both), nested):
        [group] = rollout(reward=reward, say=say_number, group_size=4)
        assert outcomes(group) == [0.0, pytest.approx(1 / 3 + 0.5), pytest.approx(2 / 3 + 0.5), None]
        assert "raised ValueError: not a three" in str(group[3].error)
        assert group[1].reward is not None
        if reward is not nested:
            assert group[1].reward.parts == {"rank": pytest.approx(1 / 3), "big": 1.0, "own": 0.0}
    rest = both.without_comparisons()
    assert rest is not None and list(rest.rewards) == ["big", "own"] and not rest.grouped


def test_a_single_part_that_breaks_off_costs_its_own_episode_only():
    async def dying(trajectory: Trajectory) -> float:
        if trajectory.member == 1:
            raise asyncio.CancelledError  # as connections do
        return 1.0

    for timeout in (None, 20.0):
        reward = Combined({"rank": (1.0, by_rank), "dying": (1.0, dying)}, timeout=timeout)
        [group] = rollout(reward=reward, say=say_number, group_size=3)
        assert outcomes(group) == [1.0, None, 2.0] and "cancelled itself" in str(group[1].error)


def test_a_comparison_needs_others():
    """One episode alone, or a reward inside of a reward of single episodes: there is no reward, and that is said."""
    played = asyncio.run(
        play(Echo(Task("t", "x", "ok")), FakeChat(), [Message("assistant", "1")], reward=by_rank)
    )
    assert played.reward is None and "compares the episodes of a group" in str(played.error)
    [group] = rollout(reward=ProcessReward(outcome=by_rank), say=say_number, group_size=2)
    assert all("compares the episodes of a group" in str(each.error) for each in group)
    assert asyncio.run(
        play(Echo(Task("t", "x", "ok")), FakeChat(), [Message("assistant", "ok")], reward=lambda completions: [1])
    ).reward == Reward(1.0)  # fmt: skip


def test_tools_called_by_a_group_reward_are_replayed(tmp_path: Path):
    async def reward(episodes: Sequence[Episode]) -> list[float]:
        results = await asyncio.gather(
            *(each.call("echo", text=f"{each.trajectory.member}") for each in episodes)
        )
        again = [await each.call("echo", text="same") for each in reversed(episodes)]
        assert {each.content for each in again} == {"same"}
        return [float(result.content) for result in results]

    def played(recorder: Recorder) -> list[float | None]:
        runtime = ToolRuntime(recorder=recorder)
        [group] = rollout(reward=reward, group_size=3, runtime=runtime)
        recorder.commit()
        recorder.close()
        return outcomes(group)

    recorder = Recorder()
    (tmp_path / SPECS_FILE).write_text("{}")
    recorder.record_to(tmp_path)
    assert played(recorder) == [0.0, 1.0, 2.0]
    recorded = rows(tmp_path / CALLS_FILE)
    assert sum(row["batch"] == "reward" for row in recorded) == 6 and len(recorded) == 12
    assert played(Recorder(tmp_path)) == [0.0, 1.0, 2.0]


# by a config


def judge_section(judge: Judge, **options: Any) -> dict[str, Any]:
    given = {"base_url": judge.url, "api_key_env": None, "judge_unfinished": True, "retries": 0}
    return {"type": "model_judge", "model": "m", "options": given | options}


def test_a_run_with_a_ranking_judge(tmp_path: Path):
    """Three groups of four in a step. One has no verdict and is dropped as a whole; evaluations rank nothing."""

    def say(prompt: str, number: int) -> str:
        return "no idea" if number == 2 else "Ranking: " + " > ".join("ABCD" if number % 2 else "DCBA")

    watcher = Quiet()
    with judging(say) as judge:
        section = {
            "parts": {
                "rank": judge_section(judge, verdict="ranking"),
                "own": {"type": "environment", "weight": 0.1},
            }
        }
        config = small(
            tmp_path,
            training={"max_steps": 2, "eval_every": 2},
            data={"heldout_count": 3},
            reward=section,
        )
        report = train(config, "run", watcher)
    assert report.state == "finished" and len(judge.asked) == 6
    first, second = report.rows[1:]
    assert (first["episodes/unscored"], second["episodes/unscored"]) == (4, 0)
    assert first["reward/rank"] == second["reward/rank"] == pytest.approx(0.5)
    assert first["judge/requests"] == 3 and first["grad_norm"] > 0
    assert any("evaluation uses the parts own" in text for text in watcher.said)
    assert second["eval/reward/own"] >= 0 and "eval/reward/rank" not in second
    kept = list(load_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    lost = [each for each in kept if each.reward is None]
    assert len(kept) == 24 and len({each.group for each in lost}) == 1 and len(lost) == 4
    assert all("part rank" in str(each.error) for each in lost)
    ranks = [each.reward.parts["rank"] for each in kept if each.reward is not None]
    assert sorted(ranks)[::5] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])


def test_the_example(capsys: pytest.CaptureFixture[str]):
    path = Path(__file__).resolve().parents[2] / "examples" / "group_reward.py"
    runpy.run_path(str(path), run_name="__main__")
    said = [
        line for line in capsys.readouterr().out.splitlines() if "calculator-" in line and "shorter" in line
    ]
    assert len(said) == 16


def test_groups_of_the_wrong_size_are_refused_at_the_start(tmp_path: Path):
    ranking = {
        "type": "model_judge",
        "model": "m",
        "options": {"base_url": "http://127.0.0.1:9/v1", "api_key_env": None, "verdict": "ranking"},
    }
    for section in (ranking, {"parts": {"a": ranking, "b": {"type": "environment"}}}):
        config = small(tmp_path, training={"algorithm": "ppo", "group_size": 1}, reward=section)
        with pytest.raises(ValueError, match=r"group_size=1 is too small: the reward compares.*2 or more"):
            train(config, "run")
        plain = TrainingConfig(environment_id="calculator", output_dir=str(tmp_path), reward=section)
        with pytest.raises(ValueError, match="group_size=1"):
            Rollouts(plain)
        assert Evaluation(plain).scored_by == ("the parts b" if "parts" in section else OWN_REWARD_TEXT)
    with pytest.raises(ValueError, match="group_size=1 is too small: the reward"):
        PPOTrainer(environment=Parity, reward_function=by_rank, group_size=1)
    PPOTrainer(environment=Parity, reward_function=in_trl, group_size=1)
    check_group_size(check_reward(TrainingConfig(reward=ranking)), 2)
    said: list[str] = []
    assert get_heldout_reward(as_reward(by_rank), said.append) is None and len(said) == 1
    single = make_reward(TrainingConfig(reward="rule_based"))
    assert get_heldout_reward(single, said.append) is single and len(said) == 1


def test_the_time_of_scoring_a_group_counts_once(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 1200.0])
    monkeypatch.setattr(group_scoring, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    [group] = rollout(reward=lambda trajectories: [1.0] * len(trajectories), group_size=4)
    assert [each.reward for each in group] == [Reward(1.0)] * 4
    assert 1200 <= sum(each.seconds for each in group) < 2400
