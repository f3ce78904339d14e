"""Rewards by their names in a config, through a rollout or two steps of training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kits.judge import judging
from tests.kits.rollout import call_text, rollout
from tests.kits.run import Parity, Quiet, rows, small, train
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.assembly.rewards import check_reward, close_reward, make_reward
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.rewards.process_reward import PROCESS_RULES
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.trainers.notices import list_notices
from TrainingFactory.types import Reward, Trajectory

SEED_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen3_grpo.yaml"


def scored(section: Any, **options: Any) -> list[Trajectory]:
    """A group of one task, scored as the config says; `check_reward` first, as every command does."""
    config = TrainingConfig(reward=section)
    check_reward(config)
    reward = make_reward(config)
    [group] = rollout(reward=reward, **options)
    asyncio.run(close_reward(reward))
    return group


def paid(section: Any, **options: Any) -> Reward:
    [played] = scored(section, **options)
    assert played.reward is not None, played.error
    return played.reward


def answers(text: str) -> Any:
    return lambda session, turn, prompt: call_text("echo", text="ok") if turn == 0 else text


def test_process_rewards_as_the_seed_writes_them():
    config = load_config(SEED_CONFIG)
    check_reward(config)
    assert not any(line.startswith("reward.") for line in list_notices(config))
    reward = paid(config.reward.model_dump())  # two calls, then the answer
    assert reward.outcome == 1.0
    assert reward.steps == [0.5, 0.0, pytest.approx(0.2)]
    assert reward.parts["correct_tool"] == 0.5 and reward.parts["clear_reasoning"] == 0.0
    assert paid("process_reward") == reward  # the seed's amounts are what is paid where none are named


def test_options_of_process_rewards():
    section = {"type": "process_reward", "outcome_weight": 2.0, "step_rewards": {"correct_tool": 0.5}}
    assert paid(section | {"options": {"pay": "per_turn", "cap": 0.75}}).steps == [0.5, 0.25, 0.0]
    unfinished = paid(section | {"options": {"claw_back": False}}, max_turns=2)
    assert unfinished.steps == [0.5, 0.0] and paid(section, max_turns=2).steps == [0.5, -0.5]
    ruled = section | {"options": {"outcome": {"rule": "contains"}}}
    assert paid(ruled, say=answers("it is ok")).outcome == 2.0
    assert paid(section, say=answers("it is ok")).outcome == 0.0  # the environment wants the plain word
    [unscored] = scored(section | {"options": {"outcome": {"verify": "calculated"}}}, say=answers("3"))
    assert "its answer 'ok' is not one number" in str(unscored.error)  # so the verifier was asked


def test_several_rewards_as_parts():
    section = {
        "parts": {
            "answer": {"type": "rule_based", "weight": 2.0, "options": {"rule": "contains"}},
            "own": {"type": "environment", "weight": 0.25},
            "steps": {
                "type": "process_reward", "weight": 0.5, "outcome_weight": 0.0, "step_rewards": {"correct_tool": 1.0}
            },
        }
    }  # fmt: skip
    reward = paid(section, say=answers("it is ok"))
    assert reward.outcome == 2.0 and reward.steps == [0.5, 0.0]
    assert (reward.parts["answer"], reward.parts["own"], reward.parts["steps"]) == (1.0, 0.0, 1.0)
    assert paid(section, say=answers("ok")).outcome == 2.25


def test_step_rewards_reach_single_turns():
    """Two members answer alike; one of them calls its tool wrongly first. What differs is the first turn's pay."""

    def say(session: int, turn: int, prompt: str) -> str:
        if turn == 2:
            return "ok"
        return call_text("echo", text=f"{turn}") if session == 0 or turn == 1 else call_text("ecko")

    section = {
        "type": "process_reward",
        "step_rewards": {"correct_tool": 0.5},
        "options": {"pay": "per_turn", "cap": 1.0},
    }
    group = scored(section, say=say, group_size=2)
    assert [each.reward and each.reward.steps for each in group] == [[0.5, 0.5, 0.0], [0.0, 0.5, 0.0]]
    for credit, by_turn in (("turn", [0.25, 0.0, 0.0]), ("trajectory", [0.25, 0.25, 0.25])):
        [row, other] = GRPO(credit=credit).samples(group)
        trained = [value for value, on in zip(row.advantages, row.loss_mask, strict=True) if on]
        sizes = [len(turn.completion.token_ids) for turn in group[0].turns]
        assert trained == pytest.approx(
            [value for value, size in zip(by_turn, sizes, strict=True) for _ in range(size)]
        )
        assert min(other.advantages) == pytest.approx(-0.25)


def parity(trajectory: Trajectory, turn: int) -> float:
    return float(sum(trajectory.turns[turn].completion.token_ids) % 3)


def test_a_run_learns_from_step_rewards_and_logs_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An untrained model ends no episode: nothing but the step rewards can make a gradient."""
    monkeypatch.setitem(PROCESS_RULES, "parity", parity)
    steps = {"type": "process_reward", "outcome_weight": 0.0, "options": {"claw_back": False, "cap": 9.0}}
    config = small(
        tmp_path,
        training={"max_steps": 2},
        reward={
            "parts": {
                "steps": steps | {"step_rewards": {"parity": 0.5}},
                "short": {"type": "rule_based", "weight": 0.0},
            }
        },
    )
    report = train(config, "run")
    assert all(row["grad_norm"] > 0 for row in report.rows)
    for number, row in enumerate(rows(tmp_path / "run" / "metrics.jsonl")):
        assert {"reward/steps", "reward/short", "reward/steps/parity"} <= row.keys()
        assert (
            row["reward"] == pytest.approx(row["reward/steps"]) == pytest.approx(row["reward/steps/parity"])
        )
        kept = list(load_trajectories(tmp_path / "run" / "trajectories.jsonl"))[
            number * 12 : number * 12 + 12
        ]
        rewards = [each.reward for each in kept if each.reward is not None]
        assert sum(sum(reward.steps) for reward in rewards) / 12 == pytest.approx(row["reward"])
        assert all(reward.parts["steps"] == sum(reward.steps) for reward in rewards)


def test_a_callable_in_a_trainer(tmp_path: Path):
    async def by_trajectory(trajectory: Any) -> Reward:
        return Reward(parity(trajectory, 0))

    config = small(tmp_path, training={"max_steps": 1})
    made = GRPOTrainer(
        environment=Parity, reward_function=by_trajectory, config=config, name="run", watcher=Quiet()
    )
    report = made.train()
    kept = list(load_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    assert report.metrics["reward"] == pytest.approx(sum(parity(each, 0) for each in kept) / 12)
    assert report.metrics["episodes/unscored"] == 0


class Unreliable(Parity):
    """Scores every fourth episode only."""

    def reward(self, episode: Any) -> float:
        if episode.trajectory.member:
            raise RuntimeError("the scoring machine is away")
        return 1.0


def test_a_run_stops_where_too_much_is_unscored(tmp_path: Path):
    watcher = Quiet()
    config = small(tmp_path, training={"max_steps": 4}, reward={"max_unscored": 0.7})
    with pytest.raises(
        ValueError, match=r"after 3 consecutive .*3 of 4 .*max_unscored is 0.7.*machine is away"
    ):
        train(config, "run", watcher, environment=Unreliable)
    warned = [text for text in watcher.said if "episodes could not be scored" in text]
    assert [text.split(": ")[1][:7] for text in warned] == [
        "9 of 12",
        "9 of 12",
        "3 of 4 ",
    ]  # 7 tasks in batches of 3
    allowed = small(tmp_path, training={"max_steps": 4}, reward={"max_unscored": 0.75})
    report = train(allowed, "allowed", environment=Unreliable)
    assert report.state == "finished" and report.metrics["episodes/unscored"] in (3, 9)


def test_a_run_with_a_judge_counts_what_it_asks(tmp_path: Path):
    """Every step has an event loop of its own, which the judge must survive; where it fails nothing is paid."""

    def say(prompt: str, number: int) -> str:
        return "no idea" if number % 4 == 3 else f"Score: {number % 3 + 1}"

    with judging(say) as judge:
        options = {"base_url": judge.url, "api_key_env": None, "judge_unfinished": True, "retries": 0}
        section = {"parts": {"judged": {"type": "model_judge", "model": "m", "options": options}}}
        report = train(small(tmp_path, training={"max_steps": 2}, reward=section), "run")
    assert [row["judge/requests"] for row in report.rows] == [12, 12] and len(judge.asked) == 24
    assert [row["episodes/unscored"] for row in report.rows] == [3, 3]
    assert all(0 < row["reward/judged"] < 1 for row in report.rows)
    lost = [
        each for each in load_trajectories(tmp_path / "run" / "trajectories.jsonl") if each.reward is None
    ]
    assert len(lost) == 6 and all("part judged" in str(each.error) for each in lost)


def test_the_configs_in_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def right(completions, answer, **columns):\n    return []\n")
    (tmp_path / "rules.py").write_text("def asks_first(trajectory, turn):\n    return turn == 0\n")
    text = (SEED_CONFIG.parent.parent / "docs" / "REWARDS.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in text.split("```yaml\n")[1:]]
    assert len(blocks) >= 3
    for block in blocks:
        check_reward(TrainingConfig(**yaml.safe_load(block)))
