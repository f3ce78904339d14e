"""RFT: what is kept, how it weighs, what is written down, and what it teaches."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.algorithm import made
from tests.kits.engine import tiny
from tests.kits.learner import far, gradients, make_learner, row_logprobs, words
from tests.kits.preference import Group, dialogue, model_gradients, random_prompt
from tests.kits.run import EXACT, Quiet, assert_same_run, go_on, rows, small, train
from tests.kits.warm import lift
from TrainingFactory.algorithms.rft import RFT
from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.trajectories import load_trajectories, trajectory_to_dict
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import Completion, Message, Reward, Status, Task, ToolCall, Trajectory, Turn


def did(answer: str, *calls: dict[str, Any], reward: float = 1.0, status: Status = "done") -> Trajectory:
    """An episode that made these calls, each in a turn of its own, and then said this."""
    messages = [
        Message("assistant", tool_calls=[ToolCall("f", call, id=f"c{n}")]) for n, call in enumerate(calls)
    ]
    turns, prompt = [], [1, 2]
    for message in (*messages, Message("assistant", answer)):
        turns.append(Turn(list(prompt), Completion([5, 6], [0.0, 0.0], "stop"), message))
        prompt = [*prompt, 5, 6, 7]
    return Trajectory(Task("t", "p"), "g", turns=turns, status=status, reward=Reward(reward))


# -- what is kept


def test_the_threshold_is_on_outcome_and_steps() -> None:
    group = [did(name, reward=reward) for name, reward in (("a", 1.0), ("b", 0.9), ("c", 2.0), ("d", -1.0))]
    group += [did("e", {}, reward=0.5), replace(did("f"), reward=None)]
    group[4].reward = Reward(0.5, [0.25, 0.25])
    assert [each.answer for each in RFT().accepted(group)] == ["c", "a", "e"]
    assert [each.answer for each in RFT(threshold=-1.0).accepted(group)] == ["c", "a", "e", "b", "d"]
    assert RFT(threshold=3.0).accepted(group) == [] and RFT(threshold=3.0).samples(group) == []
    assert RFT().accepted([]) == []


def test_the_best_of_those_that_differ() -> None:
    group = [did("a", reward=1.0), did("b", reward=3.0), did("b", reward=3.0), did("c", reward=2.0)]
    assert [each.answer for each in RFT(best_of=2).accepted(group)] == ["b", "c"]
    assert [each.answer for each in RFT(best_of=2, dedupe=False).accepted(group)] == ["b", "b"]
    assert RFT(best_of=1).accepted(group)[0] is group[1]  # of equals the first
    with pytest.raises(ValueError, match="best_of"):
        made("rft", best_of=0)


def test_the_same_calls_and_answer_are_kept_once() -> None:
    same = [did("x", {"a": 1, "b": 2}), did(" x\n", {"b": 2, "a": 1})]
    same[1].turns[0].message.content = "Let me see."  # what is said on the way does not matter
    other = [
        did("y", {"a": 1, "b": 2}), did("x", {"a": 1}), did("x"), did("x", {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        did("x", {"a": "1", "b": 2}),
    ]  # fmt: skip
    assert RFT().accepted([*same, *other]) == [same[0], *other]
    assert len(RFT(dedupe=False).accepted([*same, *other])) == 7


def test_cut_episodes_are_kept_only_if_asked_for() -> None:
    group = [did("a", status="truncated"), did("b"), did("c", status="max_turns")]
    assert RFT().accepted(group) == group[1:]
    assert RFT(train_truncated=True).accepted(group) == group


# -- how it weighs


def kept_groups(seed: int) -> list[Group]:
    """Tasks with one to four good episodes of random length, and some bad ones."""
    rng = random.Random(seed)
    head, groups = words(rng, 30), []
    for good in (1, 4, 2, 0, 3):
        prompt = random_prompt(rng, head)
        rewards = [1.0] * good + [0.0] * 2
        groups.append([dialogue(rng, prompt, rng.randrange(1, 4), reward) for reward in rewards])
    return groups


def mean_logprob(model: Any, group: Group) -> torch.Tensor:
    """Over the sampled tokens of the good episodes of a task."""
    good = SFT().samples([each for each in group if each.reward and each.reward.outcome])
    return torch.cat([row_logprobs(model, row) for row in good])


@pytest.mark.parametrize("balance", [True, False])
def test_every_task_weighs_the_same(balance: bool) -> None:
    """Against one row at a time, for each mini-batch by itself."""
    algorithm, minibatches = RFT(balance=balance, dedupe=False), 2
    groups, model = kept_groups(2), tiny()
    samples = [row for group in groups for row in algorithm.samples(group)]
    weights = [max(row.advantages) for row in samples]
    assert (len(set(weights)) > 2) is balance
    for part in range(minibatches):
        batch = make_batch(samples[part::minibatches], 120)
        algorithm.prepare([batch], 0)
        every = list(zip(samples, weights, strict=True))[part::minibatches]
        logprobs = [weight * row_logprobs(model, row) for row, weight in every]
        whole = sum(weight * sum(row.loss_mask) for row, weight in every)
        wanted = -torch.cat(logprobs).sum() / whole
        learner = make_learner(model)
        assert learner.evaluate(batch, algorithm.loss)["loss"] == pytest.approx(wanted.item(), rel=1e-5)
        assert far(gradients(learner, batch, algorithm.loss), model_gradients(model, wanted)) < 1e-5


def test_tasks_weigh_the_same_in_the_mean() -> None:
    """The mean over tasks of the mean over tokens, written down without weights."""
    groups, model = kept_groups(2), tiny()
    algorithm = RFT(dedupe=False)
    parts = [mean_logprob(model, group) for group in groups[:3] + groups[4:]]
    batch = make_batch([row for group in groups for row in algorithm.samples(group)], 120)
    algorithm.prepare([batch], 0)
    wanted = -torch.stack([part.mean() for part in parts]).mean()
    found = make_learner(model).evaluate(batch, algorithm.loss)
    assert found["loss"] == pytest.approx(wanted.item(), rel=1e-5)


# -- runs


def test_the_kept_set_is_cut_back_on_resume(tmp_path: Path) -> None:
    # An untrained model reaches the length limit in every turn.
    options = {"threshold": 1.0, "dedupe": False, "train_truncated": True}
    config = small(
        tmp_path,
        training={"algorithm": "rft", "max_steps": 3},
        logging={"output_dir": str(tmp_path), "checkpoint_every": 1},
        rft=options,
        sampling=EXACT,
    )
    train(config, "whole")
    with pytest.raises(RuntimeError, match="broken off"):
        train(config, "broken", Quiet(fail_at=2))
    assert go_on(tmp_path / "broken").state == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    ours, theirs = (rows(tmp_path / name / "kept.jsonl") for name in ("whole", "broken"))
    assert ours == theirs and len(ours) > 3


def test_it_lifts_success_and_writes_down_what_it_learned_from(warm: Path, tmp_path: Path) -> None:
    options = {"max_steps": 2, "batch_size": 16, "group_size": 4, "update_epochs": 2, "minibatches": 2}
    before, after, report = lift(
        warm,
        tmp_path,
        training={"algorithm": "rft", "learning_rate": 1e-3} | options,
        logging={"output_dir": str(tmp_path), "save_trajectories": True},
    )
    assert after - before >= 0.25
    run = tmp_path / "run"
    every = list(load_trajectories(run / "trajectories.jsonl"))
    kept = list(load_trajectories(run / "kept.jsonl"))
    groups = [every[start : start + 4] for start in range(0, len(every), 4)]
    wanted = [each for group in groups for each in RFT().accepted(group)]
    assert list(map(trajectory_to_dict, kept)) == list(map(trajectory_to_dict, wanted))
    assert all(each.reward and each.reward.outcome == 1 for each in kept)
    figures = [row for row in report.rows if "kept" in row]
    assert sum(row["kept"] * 64 for row in figures) == pytest.approx(len(kept))
    tasks = sum(bool(RFT().accepted(group)) for group in groups)
    assert sum(row["kept_tasks"] * 16 for row in figures) == pytest.approx(tasks)
    config = small(
        tmp_path,
        model={"name": str(warm)},
        training={"algorithm": "sft", "max_steps": 1},
        data={"dataset": str(run / "kept.jsonl")},
    )
    again = Training(config, name="sft", watcher=Quiet()).train()
    assert again.state == "finished" and again.metrics["rows"] == 3
