"""Rewards that teach nothing stop a run, and what an algorithm takes off a reward can be seen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kits.run import Quiet, go_on, rows, small, train
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.training.guards import Guards
from TrainingFactory.training.source import StepGroups
from TrainingFactory.types import Completion, Group, Message, Reward, Sample, Task, Trajectory, Turn


def played(reward: Reward | None, turns: int = 3) -> Trajectory:
    """Of 2 sampled tokens a turn."""
    prompt, made = [1], list[Turn]()
    for _ in range(turns):
        made.append(Turn(list(prompt), Completion([2, 3], [0.0, 0.0], "stop"), Message("assistant", "x")))
        prompt += [2, 3]
    return Trajectory(Task("t", "?"), "g", turns=made, reward=reward)


def batch(groups: Sequence[Sequence[Trajectory]], algorithm: GRPO | None = None) -> StepGroups:
    """A step of these groups; without an algorithm, every one of them is said to teach something."""
    rows = [Sample([1], [False], [0.0], [0.0], [0.0], [0])]
    made = [Group(n, list(g), algorithm.samples(g) if algorithm else rows) for n, g in enumerate(groups)]
    return StepGroups(0, made, is_sampled=True)


def stopped(algorithm: GRPO | None, steps: int | None, *groups: Sequence[Trajectory]) -> str | None:
    """What is said after so many steps like this one, if so many are the limit; before that, nothing is."""
    guards, said = Guards(steps), None
    for number in range(steps or 3):
        assert said is None, number
        said = guards.check(batch(groups, algorithm), is_last=False).stop_reason
    return said


def test_what_teaches_does_not_stop_a_run():
    early, late = Reward(1.0, [0.5, 0.0, 0.0]), Reward(1.0, [0.0, 0.0, 0.5])
    assert stopped(GRPO(credit="turn"), 2, [played(early), played(late)]) is None  # +-0.25 on two turns
    assert (
        stopped(GRPO(), 2, [played(Reward(1.0)), played(Reward(0.0))], [played(early), played(early)]) is None
    )


def test_what_teaches_nothing_does():
    ones, zeros = [played(Reward(1.0)) for _ in range(2)], [played(Reward(0.0)) for _ in range(2)]
    said = stopped(GRPO(), 3, ones, zeros)
    assert said is not None and "within every group were equal for 3 consecutive steps" in said
    said = stopped(GRPO(), 2, zeros, zeros)
    assert said is not None and "all rewards were equal (0 " in said and "2 consecutive" in said
    # with credit by episode it does not matter which turn was paid
    early, late = Reward(1.0, [0.5, 0.0, 0.0]), Reward(1.0, [0.0, 0.0, 0.5])
    said = stopped(GRPO(credit="trajectory"), 1, [played(early), played(late)])
    assert said is not None and "max_equal_steps" in said
    # fewer turns without pay are the same
    assert stopped(GRPO(), 1, [played(Reward(1.0, [0.5, 0.0]), 2), played(Reward(1.0, [0.5, 0.0, 0.0]))])
    assert stopped(None, 1, ones)  # an algorithm without groups, such as ppo
    assert stopped(GRPO(), 1, [played(Reward(1.0)), played(None)]) is None  # one alone says nothing
    assert stopped(GRPO(), None, ones) is None


def test_a_step_that_teaches_starts_the_count_again():
    guards, ones = Guards(2), [[played(Reward(1.0)), played(Reward(1.0))]]
    differ = [[played(Reward(1.0)), played(Reward(0.0))]]
    said = [
        guards.check(batch(groups, GRPO()), is_last=False).stop_reason
        for groups in (ones, differ, ones, ones)
    ]
    assert said[:3] == [None] * 3 and said[3] is not None


def test_a_run_that_has_learned_something_ends_as_usual():
    lost, scored = batch([[played(None)]]), batch([[played(Reward(1.0)), played(Reward(0.0))]])
    lost.problem = "none of 1 episodes could be scored"
    assert "no episode of the run could be scored" in str(Guards(None).check(lost, is_last=True).stop_reason)
    guards = Guards(None)
    guards.check(scored, is_last=False)
    assert guards.check(lost, is_last=True).stop_reason is None and guards.unusable_steps == 1


def test_what_overlong_episodes_lose_is_seen():
    """In the parts, which are logged and kept; the outcome stays what the reward said."""
    shared = Reward(1.0, parts={"right": 1.0})
    group = [played(shared, turns) for turns in (1, 3, 5)]
    before = [copy.deepcopy(each) for each in group]
    algorithm = GRPO(overlong_length=8, overlong_buffer=4, overlong_penalty=0.5)
    algorithm.samples(group)
    adjusted = algorithm.adjusted(algorithm.adjusted(group))  # asked twice it is the same
    assert group == before  # what was given stays as it was
    group = adjusted
    found = [trajectory.reward.parts for trajectory in group if trajectory.reward]
    assert found == [{"right": 1.0, "overlong_penalty": each} for each in (0.0, -0.25, -0.5)]
    assert (
        rollout_metrics(group)["reward/overlong_penalty"] == -0.25 and rollout_metrics(group)["reward"] == 1.0
    )
    assert shared.parts == {"right": 1.0}
    plain = GRPO().adjusted([played(Reward(1.0)), played(Reward(0.0))])
    assert [trajectory.reward for trajectory in plain] == [Reward(1.0), Reward(0.0)]


def test_a_run_shows_it(tmp_path: Path):
    sizes = {"overlong_length": 2, "overlong_buffer": 1, "overlong_penalty": 0.5}
    train(small(tmp_path, training={"max_steps": 1}, grpo=sizes), "run")
    [row] = rows(tmp_path / "run" / "metrics.jsonl")
    kept = list(load_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    lost = [trajectory.reward.parts["overlong_penalty"] for trajectory in kept if trajectory.reward]
    for trajectory, loss in zip(kept, lost, strict=True):
        tokens = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
        assert loss == -0.5 * min(max(tokens - 1, 0), 1)
    assert min(lost) == -0.5 and row["reward/overlong_penalty"] == pytest.approx(sum(lost) / len(lost))


def test_a_sampler_that_is_not_the_model_warns_then_stops():
    guards = Guards(None, max_mismatch=0.1)
    assert guards.check_update({"mismatch": 0.1}, is_last=False) == guards.check_update({}, is_last=False)
    for figures in (
        {"mismatch": 0.2},
        {},
        {"mismatch": float("nan")},
    ):  # one that measured nothing does not count
        found = guards.check_update(figures, is_last=False)
        assert (
            not found.saves_checkpoint
            and found.stop_reason is None
            and (found.warning is not None) == bool(figures)
        )
    assert guards.check_update({"mismatch": 0.3}, is_last=True).stop_reason is None  # it is over anyway
    found = guards.check_update({"mismatch": 0.25}, is_last=False)
    assert (
        found.saves_checkpoint
        and "after 4 steps" in str(found.stop_reason)
        and "0.25 per token" in str(found.stop_reason)
    )
    guards.check_update({"mismatch": 0.01}, is_last=False)
    assert guards.check_update({"mismatch": 0.3}, is_last=False).stop_reason is None


def test_a_run_stops_with_a_checkpoint_and_goes_on(tmp_path: Path):
    """Sampler and learner add up in another order, which is over a bound of next to nothing."""
    watcher, strict = Quiet(), {"importance_cap": 2.0, "max_mismatch": 1e-12}
    logging = {"output_dir": str(tmp_path), "checkpoint_every": 100}
    config = small(tmp_path, training={"max_steps": 4}, optimization=strict, logging=logging)
    with pytest.raises(ValueError, match=r"after 3 steps .*max_mismatch=1e-12 .*tfactory runs resume"):
        train(config, "run", watcher)
    warned = [text.partition(":")[0] for text in watcher.said if "WARNING" in text]
    assert warned == ["WARNING step 1", "WARNING step 2"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("max_mismatch: 1.0e-12", "max_mismatch: 0.1"))
    assert go_on(tmp_path / "run").state == "finished"
    made = rows(tmp_path / "run" / "metrics.jsonl")
    assert len(made) == 4 and not any("staleness_gap" in row for row in made)
    assert all(row["mismatch"] <= row["mismatch_max"] < 1e-4 for row in made)
    assert all(row["importance_weight"] == pytest.approx(1, abs=1e-4) for row in made)
