"""Runs whose episodes fork: resumed and replayed to the bit, sampled ahead, and refused."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.rollout import Echo
from tests.kits.run import EXACT, Quiet, assert_same_run, go_on, rows, small
from tests.kits.tools import no_turn_is_cut
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.problems import ConfigError
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.tools import tool
from TrainingFactory.trainers.notices import list_unused_options
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.training.ledger import find_ledger_errors
from TrainingFactory.training.preflight import check_options
from TrainingFactory.types import Message, Step, Task, ToolCall


@pytest.fixture(scope="module", autouse=True)
def turns_end() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        no_turn_is_cut(monkeypatch)
        yield


class Tally(Echo):
    """Whatever the model says, its length is noted, twice. It has no `fork`: a fork repeats the calls."""

    def __init__(self, task: Task, tools: Any = ()) -> None:
        super().__init__(task, tools)
        self.said: list[int] = []

    @tool
    async def note(self, number: int) -> str:
        await asyncio.sleep(random.random() * 0.01)
        self.said.append(number)
        return f"{self.said}"

    async def step(self, message: Message) -> Step:
        if len(self.said) == 2:
            return Step(done=True)
        calls = [ToolCall("note", {"number": len(message.content)}, "call")]
        step = await super().step(Message("assistant", tool_calls=calls))
        step.tool_results = [dataclasses.replace(result, seconds=0.0) for result in step.tool_results]
        return step

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> list[Task]:
        return [Task(f"{split}-{n}", f"Say {n}.") for n in range(min(count, 4))]

    def reward(self, episode: Any) -> float:
        return float(sum(episode.trajectory.turns[-1].completion.token_ids) % 7)


def config(folder: Path, **sections: Any) -> TrainingConfig:
    training = {"max_steps": 2, "batch_size": 1, "group_size": 2, "branching": {"max_forks": 2}}
    training |= sections.pop("training", {})
    logging = {"output_dir": str(folder), "checkpoint_every": 1}
    sections["sampling"] = {"slots": 4} | sections.get("sampling", {})
    return small(folder, training=training, data={"heldout_count": 1}, logging=logging, **sections)


def train(chosen: TrainingConfig, name: str, fail_at: int | None = None, **options: Any) -> RunFolder:
    watcher, objects = Quiet(fail_at), UserObjects(environment=Tally)
    training = Training(chosen, name=name, objects=objects, watcher=watcher, **options)
    return RunFolder(training.train().run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, to the bit the same every time."""
    folder = tmp_path_factory.mktemp("whole")
    return train(config(folder, sampling=EXACT, training={"eval_every": 2}), "a").path


def test_a_run_that_forks(whole: Path) -> None:
    episodes = list(load_trajectories(whole / "trajectories.jsonl"))
    assert len(episodes) == 2 * 2 * 4  # steps, roots, leaves of a root
    assert [each.member for each in episodes[:8]] == list(range(8))
    [first, *others] = [row for row in rows(whole / "metrics.jsonl") if "reward" in row]
    assert all(row["branching/forks"] == 6 and row["branching/episodes"] == 6 for row in (first, *others))
    assert first["branching/dropped"] == 0 and 0 < first["branching/shared"] < 1
    assert first["sampled_tokens"] == sum(
        len(turn.completion.token_ids) for each in episodes[:8] for turn in each.own_turns
    )
    evaluated = [row for row in rows(whole / "metrics.jsonl") if "eval/episodes" in row]
    assert {row["eval/episodes"] for row in evaluated} == {1}  # evaluations never fork
    calls = [row for row in rows(whole / "tool_calls.jsonl") if isinstance(row["step"], int)]
    assert len(calls) == 2 * 2 * 3  # a tree calls once before its first fork, and once on each path after it


def test_resumed_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    chosen = config(tmp_path, sampling=EXACT, training={"eval_every": 2})
    with pytest.raises(RuntimeError, match="broken off"):
        train(chosen, "a", fail_at=2)
    go_on(tmp_path / "a", Tally)
    assert_same_run(whole, tmp_path / "a")


@pytest.mark.slow
def test_replayed_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    chosen = config(tmp_path, sampling=EXACT, training={"eval_every": 2})
    again = train(chosen, "again", replay=whole)
    assert_same_run(whole, again.path)


def test_sampled_ahead(tmp_path: Path) -> None:
    """Groups are whole, each once, and a replay trains them again."""
    chosen = config(tmp_path, optimization={"async_rollout": True, "max_staleness": 1})
    run = train(chosen, "a")
    assert run.state == "finished" and find_ledger_errors(run.read_ledger()) == []
    episodes = list(load_trajectories(run.path / "trajectories.jsonl"))
    members: dict[str, list[int]] = {}
    for each in episodes:
        members.setdefault(each.group, []).append(each.member)
    assert len(members) == 2 and all(numbers == list(range(8)) for numbers in members.values())
    metrics = [row for row in rows(run.path / "metrics.jsonl") if "reward" in row]
    assert all(row["staleness/max"] <= 1 and "branching/dropped" in row for row in metrics)
    again = train(run.config, "b", replay="a")
    assert rows(again.path / "trajectories.jsonl") == rows(run.path / "trajectories.jsonl")


@pytest.mark.parametrize(
    ("overrides", "key", "texts"),
    [
        (["algorithm=ppo"], "training.branching", ["training.algorithm=ppo", "grpo"]),
        (["algorithm=rft"], "training.branching", ["training.algorithm=rft"]),
        (["grpo.advantage=reinforce_plus_plus"], "training.branching", ["grpo.advantage", "rloo"]),
        (["grpo.ratio=sequence"], "training.branching", ["grpo.ratio=token"]),
        (["environment.command=cat"], "training.branching", ["environment.command"]),
        (["training.branching.at=turns"], "training.branching.turns", ["is empty"]),
        (["training.branching.at=function"], "training.branching.function", ["forks.py:uncertain"]),
        (["environment.max_turns=1"], "training.branching.every", ["max_turns=1"]),
        (
            ["training.branching.at=turns", "training.branching.turns=[9, 8]"],
            "training.branching.turns",
            ["max_turns=8"],
        ),
        (["training.branching.max_episodes=8"], "training.branching.max_episodes", ["Use 9 or more"]),
        (["training.branching.max_tokens=1000"], "training.branching.max_tokens", ["max_tokens=256"]),
        (["training.branching.max_forks=9"], "training.branching.max_forks", ["4096 episodes"]),
        (["training.branching.continuations=1"], "training.branching.continuations", ["2"]),
        (["training.branching.att=turns"], "training.branching.att", ["training.branching.at"]),
    ],
)
def test_where_nothing_can_fork(overrides: list[str], key: str, texts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_options(load_config(None, ["training.branching.max_forks=2", *overrides]), False)
    [problem] = error.value.problems
    assert ".".join(map(str, problem.key)) == key
    assert all(text in str(problem) for text in texts), str(problem)


def test_options_of_another_kind_of_fork_are_noticed() -> None:
    config = load_config(None, ["training.branching.at=turns", "training.branching={at: turns, turns: [1]}"])
    assert list_unused_options(config) == []
    config = load_config(None, ["training.branching={at: turns, turns: [1], entropy: 2.0}"])
    assert list_unused_options(config) == [
        "training.branching.entropy: only used with training.branching.at=entropy"
    ]


@pytest.mark.parametrize("limit", ["max_episodes=9", "max_tokens=4089"])
def test_the_smallest_budgets(limit: str) -> None:
    """8 episodes and one fork; or 256 tokens for each of two continuations of one of 8 roots."""
    check_options(load_config(None, [f"training.branching.{limit}"]), False)


def test_a_function_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "forks.py"
    file.write_text("limit = 1\ndef first(turns):\n    return len(turns) == limit\n")
    rules = {"at": "function", "function": f"{file}:first"}
    run = train(config(tmp_path, training={"branching": rules, "max_steps": 1}), "a")
    episodes = list(load_trajectories(run.path / "trajectories.jsonl"))
    assert [each.fork_turn for each in episodes] == [0, 0, 1, 1]
    for name, text in ((f"{file}:limit", "is not a function"), (f"{file}", "name a function")):
        with pytest.raises(ConfigError, match=text):
            train(config(tmp_path, training={"branching": rules | {"function": name}}), "b")
