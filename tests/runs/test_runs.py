"""Runs: what is in the folder, and what happens when something is wrong."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.kits.run import Parity, Quiet, assert_same_run, brief, go_on, rows, small, train
from TrainingFactory.assembly import trackers
from TrainingFactory.assembly.rewards import find_reward_model_folder
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.evaluation.evaluation import load_run_reward, wilson_interval
from TrainingFactory.runs.folder import RunFolder, list_runs
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.trainers.training_run import Training, resume
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.training.task_order import TaskOrder
from TrainingFactory.types import Trajectory

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello Oslo"}]


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    config = small(tmp_path, training={"max_steps": 3, "eval_every": 2}, data={"heldout_count": 4})
    report = train(config, "a")
    run = RunFolder(tmp_path / "a")
    assert run.config == config == TrainingConfig(**yaml.safe_load((run.path / "config.yaml").read_text()))
    assert run.run_info["versions"]["torch"] and run.run_info["objects"] == ["environment"]
    assert (run.state, run.status.step, run.status.steps) == ("finished", 3, 3)
    metrics = run.metrics()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert [row["step"] for row in metrics if "eval/success" in row] == [0, 2, 3]
    for key in (
        "steps_per_second", "reward", "accuracy", "seconds/generate", "seconds/tools", "tools_share",
        "seconds/reward", "seconds/update", "tokens_per_second", "tokens_saved", "episodes/unscored",
        "episodes/failed", "loss", "entropy", "grad_norm", "learning_rate", "length", "length_max",
    ):  # fmt: skip
        assert math.isfinite(metrics[1][key]), key
    saved = list(load_trajectories(run.path / "trajectories.jsonl"))
    assert len(saved) == (3 + 3 + 1) * 4
    taken = [task for row in rows(run.path / "consumed.jsonl") for task in row["tasks"]]
    assert list(dict.fromkeys(trajectory.task.id for trajectory in saved)) == taken
    first = [t for t in saved if t.group.startswith("0/") and t.reward is not None]
    outcomes = [t.reward.outcome for t in first if t.reward is not None]
    assert metrics[1]["accuracy"] == sum(outcome > 0 for outcome in outcomes) / 12
    assert metrics[1]["reward"] == pytest.approx(sum(outcomes) / 12)
    assert metrics[1]["reward_std"] == pytest.approx(np.std(outcomes))
    lengths = [sum(len(turn.completion.token_ids) for turn in t.turns) for t in first]
    assert metrics[1]["length"] == pytest.approx(np.mean(lengths)) and metrics[1]["length_max"] == max(
        lengths
    )
    assert report.checkpoint == run.path / "checkpoints" / "step-000003"
    assert [found.name for found in list_runs(tmp_path)] == ["a"]


def test_every_task_once_an_epoch() -> None:
    order = TaskOrder(10, 4, seed=1)
    epochs = [[n for step in range(3 * e, 3 * e + 3) for n in order.take_batch(step)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order.take_batch(4) == TaskOrder(10, 4, seed=1).take_batch(4)
    assert epochs[0] != [n for step in range(3) for n in TaskOrder(10, 4, seed=2).take_batch(step)]
    as_they_are = TaskOrder(10, 4, seed=1, shuffle=False)
    assert [as_they_are.take_batch(step) for step in (0, 2, 3)] == [[0, 1, 2, 3], [8, 9], [0, 1, 2, 3]]


def test_a_run_that_exists_is_left_alone(whole: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*"))
    with pytest.raises(ValueError, match=r"run whole already exists.*tfactory runs resume"):
        train(small(whole.parent), "whole")
    assert sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*")) == before


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", " "])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="invalid run name"):
        RunFolder.create(small(tmp_path), name, {})


def test_old_checkpoints_make_room(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in range(1, 8):
        run.checkpoint_folder(step).mkdir(parents=True)
    run.prune(keep_last=2, keep_every=3)
    assert [path.name[-1] for path in run.checkpoints()] == ["3", "6", "7"]


def test_a_run_keeps_the_checkpoints_of_keep_every(tmp_path: Path) -> None:
    logging = {"checkpoint_every": 1, "keep_checkpoints": 1, "keep_every": 2}
    run = train(small(tmp_path, training={"max_steps": 3}, logging=logging), "kept").run
    assert [path.name[-1] for path in RunFolder(run).checkpoints()] == ["2", "3"]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write run folder"):
        train(small(tmp_path / "file"), "a")


def test_a_kill_while_a_run_is_made_is_no_dead_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before each of the calls that write the folder; the name is free, or the run is whole."""
    names, ends = ("mkdir", "rename", "replace", "fsync"), []
    for moment in range(1, 30):
        calls = iter(range(1, 100))

        def dying(*given: Any, call: Any, calls: Any = calls, moment: int = moment, **options: Any) -> Any:
            if next(calls) == moment:
                raise Killed
            return call(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "lock", lambda self: None)  # the system frees that of a killed process
            for name in names:
                patch.setattr(os, name, functools.partial(dying, call=getattr(os, name)))
            try:
                RunFolder.create(small(tmp_path), f"a{moment}", {}, 6).unlock()
            except Killed:
                ends.append((tmp_path / f"a{moment}").exists())
            else:
                break
        assert [run.name for run in list_runs(tmp_path)] == [f"a{n}" for n, end in enumerate(ends, 1) if end]
        if ends[-1]:
            assert RunFolder.find(f"a{moment}", tmp_path).status.steps == 6
    assert len(ends) > 8 and True in ends and False in ends
    for moment, exists in enumerate(ends, 1):
        if not exists:
            assert RunFolder.create(small(tmp_path), f"a{moment}", {}).state == "running"
    assert not list(tmp_path.glob(".*"))


class Killed(BaseException):
    """The process ends here: nobody cleans up."""


def test_a_folder_that_is_no_run_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunFolder.create(small(tmp_path), "empty", {}).unlock()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"mine already exists in .*not a run"):
        RunFolder.create(small(tmp_path), "mine", {})
    with pytest.raises(ValueError, match=r"mine .*: config.yaml or environment.json is missing"):
        RunFolder.find("mine", tmp_path)


def test_one_process_writes_a_run(tmp_path: Path) -> None:
    first = Training(brief(tmp_path), name="a", objects=UserObjects(environment=Parity), watcher=Quiet())
    assert RunFolder(tmp_path / "a").state == "running"
    with pytest.raises(ValueError, match="another process"):
        go_on(tmp_path / "a")
    first.run.unlock()
    run = RunFolder(tmp_path / "a")
    assert (run.state, run.status.step, run.status.steps) == ("killed", 0, 4)
    assert go_on(tmp_path / "a").state == "finished"


def test_a_run_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\./nothing"):
        train(small(tmp_path, model={"name": "./nothing"}), "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"training": {"group_size": 1}}, "training.group_size=1.*2 or more"),
        ({"training": {"algorithm": "dpo"}}, "dpo needs a dataset.*data.dataset=FILE"),
        ({"training": {"minibatches": 2}}, "training.minibatches=2 does not divide.*=3"),
        ({"training": {"algorithm": "kto", "batch_size": 1}}, "training.batch_size=1 .*kto"),
        (
            {"training": {"algorithm": "kto", "batch_size": 4, "minibatches": 4}},
            "training.batch_size=4 .*training.minibatches=4 .*kto",
        ),
        (  # 7 tasks in batches of 3: 3 steps
            {"training": {"algorithm": "ppo", "max_steps": None}, "ppo": {"critic_warmup": 3}},
            "ppo.critic_warmup=3 of 3 steps",
        ),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature=0"),
        ({"sampling": {"top_p": 0.9}}, "for evaluation"),
        ({"sampling": {"top_k": 5}}, "for evaluation"),
        ({"sampling": {"min_p": 0.1}}, "for evaluation"),
        ({"logging": {"trackers": ["wandb"]}}, r"pip install 'training-factory\[wandb\]'"),
        ({"data": {"demonstrations": "x.jsonl"}}, "data.dataset is for sft"),
        ({"training": {"algorithm": "sft"}, "data": {"demonstrations": "x.jsonl"}}, "data file not found"),
        ({"data": {"tasks": "x.jsonl"}}, "data file not found: x.jsonl"),
        (
            {"grpo": {"overlong_length": 8, "overlong_buffer": 9}},
            r"grpo\.overlong_buffer is 9; .*length \(8\)",
        ),
        (
            {"grpo": {"advantage": "reinforce_plus_plus", "scale_rewards": True}},
            r"grpo\.scale_rewards is true, .*false",
        ),
    ],
)
def test_what_a_run_cannot_do_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=expected):
        train(small(tmp_path, **sections), "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["dataset", "tasks"])
def test_a_run_goes_on_with_the_same_data_only(tmp_path: Path, key: str) -> None:
    rows = key == "dataset"
    made = [{"messages": CHAT, "n": n} if rows else {"prompt": f"{n}+1?", "answer": "Oslo"} for n in range(4)]
    path, lines = tmp_path / "d.jsonl", [json.dumps(row) for row in made]
    path.write_text("\n".join(lines))
    sections = (
        {"training": {"algorithm": "sft"}} if rows else {"environment": {"environment_id": "calculator"}}
    )
    Training(small(tmp_path, data={key: str(path)}, **sections), name="a", watcher=Quiet()).run.unlock()
    for changed, count in ([*lines[:3], lines[3].replace("Oslo", "Lima")], 4), (lines[:3], 3):
        path.write_text("\n".join(changed))
        with pytest.raises(ValueError, match=rf"run a: .* changed \(4 .*{count} now"):
            resume("a", tmp_path)
    path.write_text("\n".join(lines))
    resume("a", tmp_path).run.unlock()


def test_a_run_goes_on_with_the_reward_model_it_started_with(tmp_path: Path) -> None:
    model = RunFolder.create(small(tmp_path), "rm", {})
    model.unlock()
    for step in (1, 2):
        folder = model.path / "checkpoints" / f"step-00000{step}"
        folder.mkdir(parents=True)
        (folder / "reward_model.json").write_text(json.dumps({"kind": "outcome", "base": "builtin:tiny"}))
        (folder / "scalar_head.safetensors").touch()
        if step == 1:
            config = small(tmp_path, reward={"type": "learned", "model": str(model.path)})
            first = Training(config, name="a", objects=UserObjects(environment=Parity), watcher=Quiet())
            first.run.unlock()
    run = RunFolder(tmp_path / "a")
    again = Training(run.config, run=run, objects=UserObjects(environment=Parity), watcher=Quiet())
    again.run.unlock()
    assert find_reward_model_folder(run.config) == model.path / "checkpoints" / "step-000002"
    assert find_reward_model_folder(again.config) == model.path / "checkpoints" / "step-000001"
    scores = load_run_reward(run)  # an evaluation of the run
    assert scores is not None and scores.model == str(model.path / "checkpoints" / "step-000001")
    shutil.rmtree(model.path / "checkpoints" / "step-000001")
    with pytest.raises(
        ValueError, match=r"started with the reward model in .*step-000001, which does not exist"
    ):
        Training(run.config, run=run, objects=UserObjects(environment=Parity), watcher=Quiet())


def test_a_run_without_any_score_stops_and_can_go_on(whole: Path, tmp_path: Path) -> None:
    def reward(episode: Any) -> float:
        if not episode.trajectory.group.startswith("0/"):
            raise RuntimeError("the judge is down")
        return episode.environment.reward(episode)

    watcher = Quiet()
    with pytest.raises(ValueError, match=r"after 3 consecutive .*the judge is down.*tfactory runs resume"):
        train(brief(tmp_path), "a", watcher, environment=Parity, reward=reward)
    assert sum("WARNING" in text and "none of" in text for text in watcher.said) == 3
    run = RunFolder(tmp_path / "a")
    assert run.state == "failed" and [path.name for path in run.checkpoints()] == ["step-000001"]
    assert go_on(run.path).state == "finished"
    assert_same_run(whole, run.path)


def test_a_full_disk_while_appending(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunFolder.append

    def full(self: RunFolder, name: str, row: dict[str, Any]) -> None:
        if row["step"] == 3:
            with (self.path / name).open("a") as file:
                file.write('{"step": 3, "half of a li')
            raise OSError(28, "No space left on device")
        append(self, name, row)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", full)
        with pytest.raises(OSError, match=r"No space left on device.*tfactory runs resume"):
            train(brief(tmp_path), "a")
    assert RunFolder(tmp_path / "a").state == "failed"
    go_on(tmp_path / "a")
    assert_same_run(whole, tmp_path / "a")


class Recorder:
    """A tracker that notes what it is told, and fails in the end."""

    def __init__(self, run: Path, config: TrainingConfig) -> None:
        self.steps: list[int] = []
        made.append(self)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)
        if step == 2:
            raise ConnectionError("the server is gone")

    def episodes(self, step: int, episodes: Sequence[Trajectory]) -> None: ...
    def close(self) -> None: ...


made: list[Recorder] = []


def test_a_tracker_that_fails_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Recorder)
    report = train(small(tmp_path, training={"max_steps": 3}, logging={"trackers": ["wandb"]}), "a")
    assert report.state == "finished" and made[-1].steps == [1, 2]


class FakeWandB(types.ModuleType):
    """Notes what runs are begun with."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []

    def init(self, **options: Any) -> Any:
        self.begun.append(options)
        return types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    def Table(self, **given: Any) -> Any:
        return given


def test_where_runs_go_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    places = [{}, {}, {}, {"entity": "lab", "group": "g", "project": "mine"}]
    for number, place in enumerate(places):
        given = {"trackers": ["wandb"], "wandb": place, "output_dir": str(tmp_path / str(number))}
        config = small(tmp_path, logging=given)
        if number == 1:
            monkeypatch.setenv("WANDB_PROJECT", "theirs")
        run = RunFolder.create(config, "again", {})
        run.unlock()
        trackers.Trackers(run.path, config)
        trackers.Trackers(run.path, config)  # goes on
    assert [each["project"] for each in fake.begun[::2]] == ["training-factory", "theirs", "theirs", "mine"]
    assert (fake.begun[-1]["entity"], fake.begun[-1]["group"]) == ("lab", "g")
    assert "entity" not in fake.begun[0] and "group" not in fake.begun[0]  # W&B reads its own variables
    ids = [each["id"] for each in fake.begun]
    assert ids[::2] == ids[1::2] and len(set(ids)) == 4
    assert {each["name"] for each in fake.begun} == {"again"}


def test_sft_from_conversations_and_trajectories(tmp_path: Path) -> None:
    train(small(tmp_path, training={"max_steps": 2}), "rollouts")
    recorded = (tmp_path / "rollouts" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    stopped = [line for line in recorded if '"finish": "stop"' in line]
    call = {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'}
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}]
    rows_ = [
        {"messages": CHAT},
        {"prompt": "hi", "completion": "hello"},
        {"messages": [CHAT[0], call, {"role": "tool", "content": "2"}, CHAT[1]], "tools": tools},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows_), *stopped]), encoding="utf-8")
    config = small(
        tmp_path,
        training={"algorithm": "sft", "max_steps": 12, "batch_size": 4},
        data={"demonstrations": str(path)},
    )
    report = Training(config, name="a", watcher=Quiet()).train()
    assert report.rows[-1]["loss"] < report.rows[0]["loss"] - 1
    assert not [key for row in report.rows for key in row if key.startswith("tools/")]  # which nobody called


def test_a_run_from_python_goes_on_in_python(whole: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"environment": Parity, "config": brief(tmp_path), "name": "a"}
    with pytest.raises(RuntimeError):
        GRPOTrainer(**options, watcher=Quiet(fail_at=3)).train()
    with pytest.raises(ValueError, match=r"started from Python with its own environment.*resume=True"):
        resume("a", tmp_path)
    assert GRPOTrainer(**options, resume=True, watcher=(said := Quiet())).train().state == "finished"
    assert said.said[:2] == [f"run a in {tmp_path / 'a'}: 4 steps", "resuming after step 2 of 4"]
    assert_same_run(whole, tmp_path / "a")


def test_the_interval_of_a_share() -> None:
    assert wilson_interval(50, 100) == pytest.approx(
        (0.4038, 0.5962), abs=1e-4
    )  # Wilson's score interval, by hand
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
