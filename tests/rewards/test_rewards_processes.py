"""Functions of a user's file as rewards, rewards in processes, and pools of judges."""

from __future__ import annotations

import asyncio
import math
import os
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import finished, judging, scored_by
from tests.kits.rollout import rollout
from tests.kits.run import Parity, Quiet, small, train
from TrainingFactory.assembly.rewards import (
    check_reward,
    close_reward,
    judge_metrics,
    make_reward,
    move_to_workers,
    open_reward,
)
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.rewards import ProcessReward
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.rewards.rules.code import ToolRule
from TrainingFactory.rewards.rules.rule_based import RULES
from TrainingFactory.rewards.workers.distributed import RewardWorkerPool
from TrainingFactory.rewards.workers.process import FinishedEpisode, RewardProcess
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.trainers.notices import list_notices
from TrainingFactory.types import Reward, Trajectory

ONE = {"distributed_reward": True, "reward_workers": 1}
FILE = """
import os
import re
from helper import HALF

def score(trajectory):
    return HALF if trajectory.answer == "ok" else 0.0

async def tools(episode):
    return float(len((await episode.call("echo", text="four")).content))

def shortest(trajectories):
    best = min(len(each.answer) for each in trajectories)
    return [float(len(each.answer) == best) for each in trajectories]

def slow(trajectory):
    return float(re.match(r"(a+)+$", trajectory.answer) is not None)

def who(trajectory):
    return float(os.getpid())

def parity(completions, completion_ids):
    return [float(sum(ids) % 3) for ids in completion_ids]

"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("HALF = 0.5\n")
    (tmp_path / "rewards.py").write_text(FILE)
    return tmp_path / "rewards.py"


def scored(section: Any, optimization: Any = None, **options: Any) -> list[Trajectory]:
    config = TrainingConfig(reward=section, optimization=optimization or {})
    check_reward(config)
    with ExitStack() as held:
        reward: Any = make_reward(config)
        held.callback(lambda: asyncio.run(close_reward(reward)))
        groups = rollout(reward=reward, **options)
    for worker in getattr(reward, "workers", []):
        assert not isinstance(worker.model, RewardProcess) or not worker.model.alive
    return [each for group in groups for each in group]


def function(name: str, **options: Any) -> dict[str, Any]:
    return {"type": "function", "options": {"function": name, **options}}


def outcomes(trajectories: list[Trajectory]) -> list[float | None]:
    return [None if each.reward is None else each.reward.outcome for each in trajectories]


def say_ok_or_more(session: int, turn: int, prompt: str) -> str:
    return "ok" if session == 0 else f"ok {session}"


def test_a_function_of_a_file(file: Path):
    for name, found in ((f"{file}:score", [0.5, 0.0]), (f"{file}:shortest", [1.0, 0.0])):
        for processes in (0, 1):
            played = scored(function(name, processes=processes), say=say_ok_or_more, group_size=2)
            assert outcomes(played) == found, played[0].error
    assert outcomes(scored(function(f"{file}:tools"))) == [4.0]
    [closed] = scored(function(f"{file}:tools", processes=1))
    assert "environment of this episode is closed" in str(closed.error)
    assert outcomes(scored(function("tests.rewards.test_rewards_processes:seven"))) == [7.0]


def seven(episode: Any) -> float:
    return 7.0


def test_a_pattern_that_never_ends_holds_up_nobody(file: Path):
    """The matching holds the interpreter of whoever does it; here that is a process of its own, which is ended."""
    told: list[int] = []

    def say(session: int, turn: int, prompt: str) -> str:
        return "a" * 60 + "b" if session == 0 else "aaa"

    with ExitStack() as held:
        config = TrainingConfig(reward=function(f"{file}:slow", timeout=2, processes=2))
        reward: Any = make_reward(config)
        held.callback(lambda: asyncio.run(close_reward(reward)))
        [group] = rollout(
            reward=reward, say=say, group_size=6, on_episode=lambda each: told.append(each.member)
        )
        assert outcomes(group) == [None] + [1.0] * 5 and told[-1] == 0
        assert "slow took longer than 2 s" in str(group[0].error)
        again = rollout(reward=reward, say=lambda *_: "aa", group_size=6)  # in a new process
        assert outcomes(again[0]) == [1.0] * 6
        assert reward.metrics["pool/dropped"] == 1 and all(
            worker.num_failed == 0 for worker in reward.workers
        )


async def test_a_call_that_nobody_waits_for_ends_its_process(file: Path):
    process = RewardProcess(f"{file}:slow", timeout=600)

    def call(*texts: str) -> asyncio.Future[list[Any]]:
        episodes = [FinishedEpisode(finished(text)) for text in texts]
        return asyncio.ensure_future(asyncio.wait_for(process.group(episodes), 60))

    assert await call("aa", "ab") == [Reward(1.0), Reward(0.0)]
    given_up = call("a" * 60 + "b")
    await asyncio.sleep(0.1)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert not process.alive and await call("aa") == [Reward(1.0)]  # in another process
    under_way = call("a" * 60 + "b")
    await asyncio.sleep(0.1)
    await process.close()
    with pytest.raises(ConnectionError, match="was killed"):
        await under_way
    with pytest.raises(ConnectionError, match="was closed"):
        await call("aa")
    assert not process.alive


def test_rewards_go_to_processes_where_that_is_asked_for(file: Path):
    many = {"distributed_reward": True, "reward_workers": 2}
    pids = outcomes(scored(function(f"{file}:who"), many, group_size=6))
    assert os.getpid() not in pids and len(set(pids)) == 2
    assert set(outcomes(scored(function(f"{file}:who", processes=0), many))) == {float(os.getpid())}

    def made(section: Any) -> Any:
        return make_reward(TrainingConfig(reward=section, optimization=many))

    rule = {"type": "rule_based", "options": {"rule": "contains"}}
    assert [each.model.adapted_reward.name for each in made(rule).workers] == ["ContainsRule"] * 2
    verifier = {"type": "tool_verified", "options": {"verify": "calculated"}}
    assert [each.model.adapted_reward.name for each in made(verifier).workers] == ["CalculatedRule"] * 2
    here, there = scored(rule, None, group_size=2), scored(rule, many, group_size=2)
    assert [each.reward for each in here] == [each.reward for each in there] != [None, None]
    for name in [name for name, kind in RULES.items() if issubclass(kind, ToolRule)]:
        assert not isinstance(made({"type": "rule_based", "options": {"rule": name}}), RewardWorkerPool)


STEPS_FILE = """
import os

def thirds(trajectory, turn):
    return (turn + 1) / 3

def breaks(trajectory, turn):
    raise KeyError(f"process {os.getpid()}")
"""


def steps_section(file: Path, *rules: str, **options: Any) -> dict[str, Any]:
    file.write_text(STEPS_FILE)
    seeds = {"correct_tool": 0.5, "clear_reasoning": 0.3, "efficient_path": 0.2}
    options["rules"] = {name: f"{file}:{name}" for name in rules}
    return {"type": "process_reward", "step_rewards": seeds | dict.fromkeys(rules, 0.1), "options": options}


def test_process_rewards_are_scored_in_processes_to_the_bit(file: Path):
    section = steps_section(file, "thirds", claw_back="wrong", cap=math.inf)
    here, there = (scored(section, where, say=say_ok_or_more, group_size=2) for where in (None, ONE))
    assert [each.reward for each in here] == [each.reward for each in there]
    assert there[0].reward and there[1].reward
    assert there[0].reward.steps == [pytest.approx(0.2 + 0.1 / 3)] and there[1].reward.steps == [0.0]


def test_a_step_rule_that_fails_in_a_process_drops_the_episode_and_is_counted(file: Path):
    reward: Any = make_reward(TrainingConfig(reward=steps_section(file, "breaks"), optimization=ONE))
    with ExitStack() as held:
        held.callback(lambda: asyncio.run(close_reward(reward)))
        [[played]] = rollout(reward=reward)
    assert not any(worker.model.alive for worker in reward.pool.workers)
    assert played.reward is None and "the rule breaks at turn 0" in str(played.error)
    assert "process " in str(played.error) and f"process {os.getpid()}" not in str(played.error)
    assert judge_metrics(reward)["pool/dropped"] == 1


def test_a_run_says_how_many_processes_score(file: Path):
    said: list[str] = []

    async def opened(section: Any) -> None:
        async with AsyncExitStack() as held:
            made = make_reward(TrainingConfig(reward=section, optimization=ONE))
            await open_reward(made, held, said.append)

    for section in (steps_section(file, outcome="exact"), "process_reward", "environment"):
        asyncio.run(opened(section))  # a rule as the outcome has processes of its own
    assert said == [
        "rewards: 2 worker processes",
        "rewards: 1 worker process; the environment's own reward runs in this process",
    ]


def test_a_process_reward_that_is_an_object_gets_processes_too():
    config = TrainingConfig(optimization=ONE)
    seeds = ProcessReward(outcome_weight=1.0, step_rewards={"correct_tool": 0.5})
    moved: Any = move_to_workers(as_reward(seeds), config)
    assert moved.function.pool is not None and seeds.pool is None
    own = as_reward(ProcessReward(step_rewards={"mine": 1.0}, rules={"mine": lambda *_: 1.0}))
    assert move_to_workers(own, config) is own and move_to_workers(None, config) is None
    for reward, count in ((seeds, 0), (own, 1)):
        trainer = GRPOTrainer(environment=Parity, reward_function=reward, distributed_reward=True)
        assert sum("distributed_reward" in line for line in trainer.notices) == count


def test_what_stays_in_this_process_is_said():
    def said(reward: Any, **optimization: Any) -> list[str]:
        return list_notices(TrainingConfig(reward=reward, optimization=optimization))

    for section in ("environment", {"parts": {"a": {"type": "environment"}, "b": {"type": "rule_based"}}}):
        [line] = said(section, distributed_reward=True)
        assert line.startswith("optimization.distributed_reward: rewards of the type environment stay")
    tested = {"type": "rule_based", "options": {"rule": "code_tests"}}
    assert "rule_based" in said({"parts": {"a": tested}}, distributed_reward=True)[0]
    judge = {"type": "model_judge", "model": "m", "options": {"base_url": "http://127.0.0.1:9/v1"}}
    assert (
        "rewards of the type model_judge stay in the run's process"
        in said(judge, distributed_reward=True, reward_workers=6)[0]
    )
    assert said(function("rewards.py:score"), distributed_reward=True) == []
    assert said("rule_based", distributed_reward=True) == said("environment") == []
    assert said("process_reward", distributed_reward=True) == []
    for verify, count in (("calculated", 0), ("sql_execution", 1)):
        verified = {"type": "tool_verified", "options": {"verify": verify}}
        assert len(said(verified, distributed_reward=True)) == count
    assert said("environment", reward_workers=2) == [
        "optimization.reward_workers: only used with optimization.distributed_reward=true"
    ]
    made = GRPOTrainer(environment=Parity, reward_function=seven, distributed_reward=True)
    assert any("name it: reward.type=function" in line for line in made.notices)


def test_a_run_with_functions_in_processes(file: Path, tmp_path: Path):
    section = {"parts": {"parity": function(f"{file}:parity", processes=2, timeout=60)}}
    report = train(small(tmp_path, training={"max_steps": 2}, reward=section), "run")
    kept = list(load_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    expected = [float(sum(each.turns[0].completion.token_ids) % 3) for each in kept]
    assert outcomes(kept) == expected and len(set(expected)) > 1
    assert [row["pool/worker_0_done"] + row["pool/worker_1_done"] for row in report.rows] == [3, 3]  # groups


# judges at several addresses


def test_a_judge_at_several_addresses(tmp_path: Path):
    def dying(prompt: str, number: int) -> str | None:
        return "Score: 5" if number < 2 else None

    with judging("Score: 5") as good, judging(dying) as bad:
        options = {
            "base_url": [bad.url, good.url],
            "api_key_env": None,
            "judge_unfinished": True,
            "retries": 0,
        }
        section = {"type": "model_judge", "model": "m", "options": options | {"concurrency": 1}}
        report = train(small(tmp_path, training={"max_steps": 2}, reward=section), "run", Quiet())
    assert [row["episodes/unscored"] for row in report.rows] == [0, 0]
    assert report.rows[0]["reward"] == report.rows[1]["reward"] == pytest.approx(4 / 9, abs=0.2)
    assert sum(row["judge/requests"] for row in report.rows) == len(good.asked) + len(bad.asked)
    assert sum(row["pool/moved"] for row in report.rows) >= 1 and len(good.asked) == 22


def test_the_words_of_the_seed(tmp_path: Path):
    with judging("Score: 5") as one, judging("Score: 5") as other:
        budget, cache = {"max_requests": 6}, tmp_path / "judged.sqlite"
        pool = RewardWorkerPool(
            model="QwQ-32B", num_workers=4, base_url=[one.url, other.url], api_key_env=None,
            budget=budget, cache=cache,
        )  # fmt: skip
        rewards = scored_by(pool, [finished(f"answer {n}") for n in range(8)])
        assert {body["model"] for body in one.asked + other.asked} == {"QwQ-32B"}
        assert len(pool.workers) == 4 and len({id(each.model) for each in pool.workers}) == 2
        assert len(one.asked + other.asked) == sum(reward is not None for reward in rewards) == 6
    with pytest.raises(ValueError, match=r"'QwQ-32B'.*base_url"):
        RewardWorkerPool(model="QwQ-32B", num_workers=4)
    with pytest.raises(ValueError, match=r"rubric: .*base_url"):
        RewardWorkerPool(model=seven, rubric="x")
    with pytest.raises(ValueError, match="num_workers is 1, but base_url has 2 addresses"):
        RewardWorkerPool(model="m", num_workers=1, base_url=["http://a/v1", "http://b/v1"])
    with pytest.raises(ValueError, match="rubrik is not an option of a model judge; did you mean rubric"):
        RewardWorkerPool(model="m", base_url="http://127.0.0.1:9/v1", rubrik="x")


def test_rankings_by_a_pool():
    with judging("Ranking: B > A") as one, judging("Ranking: B > A") as other:
        pool = RewardWorkerPool(model="m", base_url=[one.url, other.url], api_key_env=None, verdict="ranking")
        assert pool.grouped and pool.compares
        rewards = scored_by(pool, [finished(f"answer {n}", name=f"t{n // 2}") for n in range(8)])
    assert [reward and reward.outcome for reward in rewards] == [0.0, 1.0] * 4
    assert len(one.asked) + len(other.asked) == 4 and one.asked and other.asked
