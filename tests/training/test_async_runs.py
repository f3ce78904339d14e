"""Runs that sample ahead, on the built-in model: broken off and resumed, evaluated, replayed, refused."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.kits.run import Offering, Quiet, assert_same_run, brief, go_on, rows, small, train
from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.learner import copy_model, make_trainable
from TrainingFactory.assembly.memory import estimate_model_memory
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories, trajectory_from_dict, trajectory_to_dict
from TrainingFactory.models import load_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.trainers.notices import list_notices, list_unused_options
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.training.ledger import find_ledger_errors
from TrainingFactory.types import (
    Completion,
    Message,
    SamplersLost,
    SamplingParams,
    Task,
    Trajectory,
    Turn,
    Weights,
)


class Calling(Offering):
    """The reward of an episode calls a tool, so that every episode has a recorded call; some take longer."""

    async def reward(self, episode: Any) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        await episode.call("calculator", expression="1 + 1")
        slow = episode.task.id.endswith("0") or episode.trajectory.member == 3
        await asyncio.sleep(0.01 if slow else 0)
        return float(sum(episode.trajectory.turns[0].completion.token_ids) % 3)


def ahead(folder: Path, bound: int = 1, order: str = "number", **sections: dict[str, Any]) -> TrainingConfig:
    options = {"async_rollout": True, "max_staleness": bound, "async_order": order}
    sampling = {"deterministic": False} | sections.pop("sampling", {})
    return small(folder, sampling=sampling, optimization=options, **sections)


def run(config: TrainingConfig, name: str, watcher: Quiet | None = None, **options: Any) -> RunFolder:
    objects = UserObjects(environment=options.pop("environment", Calling))
    training = Training(config, name=name, objects=objects, watcher=watcher or Quiet(), **options)
    return RunFolder(training.train().run)


def assert_whole(folder: RunFolder, bound: int) -> None:
    """Every task once an epoch; the files have the episodes and calls of the trained groups, and of no others."""
    assert folder.state == "finished" and find_ledger_errors(folder.read_ledger()) == []
    metrics = [row for row in rows(folder.path / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in metrics] == list(range(1, 7))
    assert all(row["staleness/max"] <= bound for row in metrics)
    assert any(row["staleness/max"] > 0 for row in metrics)
    assert [row["tools/calls"] for row in metrics] == [row["episodes"] for row in metrics]
    episodes = list(load_trajectories(folder.path / "trajectories.jsonl"))
    trained = [task for tasks in folder.read_consumed_tasks().values() for task in tasks]
    assert [each.task.id for each in episodes] == [task for task in trained for _ in range(4)]
    for step, tasks in folder.read_consumed_tasks().items():
        assert [each.task.id for each in folder.episodes(step)] == [task for task in tasks for _ in range(4)]
    calls = [row for row in rows(folder.path / "tool_calls.jsonl") if isinstance(row["step"], int)]
    assert len({(row["step"], row["task"], row["member"]) for row in calls}) == len(calls) == len(episodes)


class Counted(Calling):
    """Counts the environments that are open at the same time."""

    open: ClassVar[set[Any]] = set()
    most = 0

    async def reset(self) -> list[Message]:
        Counted.open.add(self)
        Counted.most = max(Counted.most, len(Counted.open))
        return await super().reset()

    async def close(self) -> None:
        Counted.open.discard(self)
        await super().close()


def test_no_more_environments_are_open_than_workers(tmp_path: Path) -> None:
    """Of all steps that are sampled ahead, and of an evaluation meanwhile, together."""
    Counted.most = 0
    steps, heldout = {"max_steps": 2, "eval_every": 1}, {"heldout_count": 4}
    config = ahead(tmp_path, training=steps, environment={"num_workers": 3}, data=heldout)
    run(config, "a", watcher := Quiet(), environment=Counted)
    assert Counted.most == 3 and not Counted.open
    assert "environment: at most 3 episodes at a time" in watcher.said


class Interrupting(Quiet):
    """A watcher in whose third step Ctrl-C comes to the main thread."""

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        main = threading.main_thread().ident
        if step == 3 and main is not None:
            signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("order", [pytest.param("number", marks=pytest.mark.slow), "arrival"])
def test_a_run_is_interrupted_and_goes_on_with_what_was_under_way(tmp_path: Path, order: str) -> None:
    first = run(ahead(tmp_path, 2, order), "a", Interrupting())
    assert first.state == "interrupted"
    state = json.loads((first.checkpoints()[-1] / "state.json").read_text())
    assert state["under_way"] and state["step"] in (3, 4)
    config = first.path / "config.yaml"
    written = config.read_text()
    config.write_text(written.replace("async_rollout: true", "async_rollout: false"))
    with pytest.raises(ValueError, match=r"run a used async rollouts and has \d+ unfinished groups"):
        go_on(first.path, Calling)
    config.write_text(written)
    go_on(first.path, Calling)
    assert_whole(first, 2)


def test_a_run_that_breaks_in_the_middle_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The files are cut back to the checkpoint at step 4, in whose state are the groups of steps 5 and 6."""
    with pytest.raises(RuntimeError, match="broken off"):
        run(ahead(tmp_path), "a", Quiet(fail_at=5))
    go_on(tmp_path / "a", Calling)
    assert_whole(RunFolder(tmp_path / "a"), 1)


def test_a_bound_of_0_is_the_synchronous_run(whole: Path, tmp_path: Path) -> None:
    optimization = {"async_rollout": True, "max_staleness": 0}
    train(brief(tmp_path, optimization=optimization), "a")
    assert_same_run(whole, tmp_path / "a")


def test_an_evaluation_sees_one_version(tmp_path: Path) -> None:
    seen: dict[int, set[int]] = {}

    class Watched(Calling):
        async def reward(self, episode: Any) -> float:
            if episode.heldout:
                versions = {turn.completion.policy_version for turn in episode.trajectory.turns}
                seen.setdefault(len(metrics()), set()).update(versions)
                await asyncio.sleep(0.005)  # groups that are under way go on meanwhile
            return await super().reward(episode)

    def metrics() -> list[dict[str, Any]]:
        return RunFolder(tmp_path / "a").metrics()

    training = {"eval_every": 2, "max_steps": 6}
    config = ahead(tmp_path, 2, training=training, data={"heldout_count": 5})
    assert_whole(run(config, "a", environment=Watched), 2)
    assert list(seen.values()) == [{0}, {2}, {4}, {6}], seen


def test_a_replay_trains_the_recorded_groups_in_their_order(tmp_path: Path) -> None:
    """Nothing is played, and the replay is broken off and goes on too."""
    recorded = run(ahead(tmp_path, 2, "arrival", training={"eval_every": 4, "max_steps": 4}), "a")

    class Untouched(Calling):
        async def reset(self) -> list[Message]:
            raise AssertionError("nothing is played")

    with pytest.raises(RuntimeError, match="broken off"):
        run(recorded.config, "b", Quiet(fail_at=3), environment=Untouched, replay="a")
    go_on(tmp_path / "b", Untouched)
    replayed = RunFolder(tmp_path / "b")
    for name in ("trajectories.jsonl", "consumed.jsonl"):
        assert (replayed.path / name).read_bytes() == (recorded.path / name).read_bytes()
    [*_, ours], [*_, theirs] = recorded.checkpoints(), replayed.checkpoints()
    assert ours.name == theirs.name == "step-000004"
    for name in ("model.safetensors", "learner/state.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    (recorded.path / "trajectories.jsonl").unlink()
    with pytest.raises(ValueError, match=r"logging.save_trajectories=false"):
        run(recorded.config, "c", replay="a")


@pytest.mark.parametrize(("where", "bound"), [("sample", 1), ("update", 0)])
def test_a_run_without_samplers_saves_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, bound: int
) -> None:
    submit, update = NativeEngine._submit_request, NativeEngine.update

    async def lost_sample(self: NativeEngine, *given: Any) -> Completion:
        if self.policy_version == 3:
            raise SamplersLost("no sampler is left")
        return await submit(self, *given)

    async def lost_update(self: NativeEngine, weights: Weights) -> None:
        if weights.version == 3:
            raise SamplersLost("no sampler is left")
        await update(self, weights)

    patched = {"sample": ("_submit_request", lost_sample), "update": ("update", lost_update)}[where]
    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, *patched)
        with pytest.raises(ValueError, match=r"no sampler is left.*run: tfactory runs"):
            run(ahead(tmp_path, bound, training={"eval_every": 3}), "a")
    folder = RunFolder(tmp_path / "a")
    assert folder.state == "failed" and folder.checkpoints()[-1].name == "step-000003"
    assert (folder.status.reason or "").endswith(folder.resume_command)
    assert [row["step"] for row in folder.read_ledger()] == [1, 2, 3]
    go_on(folder.path, Calling)
    assert folder.state == "finished" and find_ledger_errors(folder.read_ledger()) == []
    assert [row["step"] for row in folder.metrics() if "reward" in row] == list(range(1, 7))


@pytest.mark.parametrize("lora", [False, True])
async def test_the_sampler_has_weights_of_its_own(lora: bool) -> None:
    """The learner's change nothing until the update; what is not trained is the same tensor."""
    loaded = load_model("builtin:tiny")
    make_trainable(TrainingConfig(lora={"enabled": lora, "r": 4}), loaded)
    copied = copy_model(loaded.model)
    engine = NativeEngine(copied, slots=2, max_length=64, source=loaded.model)
    alone = NativeEngine(loaded.model, slots=2, max_length=64)
    params = SamplingParams(max_tokens=6, seed=3)

    async def logprobs(each: NativeEngine) -> list[float]:
        return (await each.sample([5, 6, 7], params)).logprobs

    before = await logprobs(engine)
    with torch.no_grad():
        for weight in loaded.model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.ones_like(weight).cumsum(-1) / weight.shape[-1])
    assert await logprobs(engine) == pytest.approx(before, abs=1e-5)
    pointers = [weight.data_ptr() for weight in copied.parameters()]
    await engine.update(Weights(1))
    await alone.update(Weights(1))
    after = await logprobs(engine)
    assert after != pytest.approx(before, abs=1e-2) and engine.policy_version == 1
    assert after == pytest.approx(await logprobs(alone), abs=1e-5)
    assert [weight.data_ptr() for weight in copied.parameters()] == pointers
    await engine.close()
    await alone.close()
    for own, trained in zip(copied.parameters(), loaded.model.parameters(), strict=True):
        assert (own is trained) == (not trained.requires_grad)


def test_what_does_not_go_together_is_refused_or_told(tmp_path: Path) -> None:
    config = ahead(tmp_path, sampling={"deterministic": True})
    with pytest.raises(ValueError, match=r"sampling.deterministic.*max_staleness=0"):
        run(config, "a")
    options = {"async_rollout": True, "async_order": "arrival"}
    assert list_unused_options(TrainingConfig(training={"algorithm": "sft"}, optimization=options)) == [
        "optimization.async_rollout, optimization.async_order: sft does not train on sampled episodes"
    ]
    [told] = list_unused_options(TrainingConfig(optimization={"max_staleness": 3}))
    assert told == "optimization.max_staleness: only used with optimization.async_rollout=true"
    assert list_notices(TrainingConfig(optimization=options)) == [] and KINDS["grpo"].samples


def test_the_doctor_counts_the_copy() -> None:
    model = load_model("builtin:tiny").model
    needed = [
        estimate_model_memory(TrainingConfig(optimization={"async_rollout": on}), model, frozenset(), 512)
        for on in (False, True)
    ]
    weights = sum(each.nbytes for each in model.parameters())
    assert "the sampler's weights" not in needed[0] and needed[1]["the sampler's weights"] == weights


def test_versions_of_tokens_stand_in_the_file_where_there_are_several() -> None:
    for versions in (None, [3, 4]):
        completion = Completion([1, 2], [-0.5, -0.25], "stop", 3, versions)
        trajectory = Trajectory(
            Task("a", "?"), "3/a", turns=[Turn([7], completion, Message("assistant", "x"))]
        )
        row = json.loads(json.dumps(trajectory_to_dict(trajectory)))
        assert ("versions" in row["turns"][0]["completion"]) == (versions is not None)
        assert trajectory_from_dict(row) == trajectory
