"""Small training runs: an environment whose reward differs from episode to episode on an untrained model, and whose
tools take a different time every time."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import CalculatorEnvironment
from TrainingFactory.runs.folder import RunFolder, TrainingReport
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Message, Task, Trajectory

# `sampling` of runs that are compared to the bit: it takes three times as long.
EXACT = {"deterministic": True}
TIMES = ("time", "seconds", "steps_per_second", "tokens_per_second", "tools_share", "tail_share", "system/")


class Parity(CalculatorEnvironment):
    """Shows no tool: a prompt that describes one is five times as long."""

    def __init__(self, task: Task, *given: Any, **options: Any) -> None:
        super().__init__(task, *given, **options)
        self.tools = []

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        yield from super().tasks(split, seed, min(count, 7))

    async def reset(self) -> list[Message]:
        await asyncio.sleep(random.random() * 0.01)
        return await super().reset()

    def reward(self, episode: Any) -> float:
        return float(sum(episode.trajectory.turns[0].completion.token_ids) % 3)


class Offering(Parity):
    """Shows the model its tool, which an untrained one does not call."""

    def __init__(self, task: Task, *given: Any, **options: Any) -> None:
        super().__init__(task, *given, **options)
        self.tools = self.executor.tools


class Quiet:
    """Watches in silence, and breaks off the run at a step if asked to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.said: list[str] = []

    def phase(self, name: str) -> None: ...
    def episode(self, trajectory: Trajectory) -> None: ...

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        if step == self.fail_at:
            raise RuntimeError("broken off")

    def say(self, text: str) -> None:
        self.said.append(text)


def small(folder: Path, **sections: dict[str, Any]) -> TrainingConfig:
    """7 tasks in batches of 3, so that epochs end in the middle; 6 steps, a checkpoint every 2."""
    given: dict[str, dict[str, Any]] = {
        "training": {"max_steps": 6, "batch_size": 3, "group_size": 4, "learning_rate": 1e-3},
        "sampling": {"max_tokens": 4, "slots": 8},
        "logging": {"output_dir": str(folder), "checkpoint_every": 2},
    }
    for name, keys in sections.items():
        given[name] = given.get(name, {}) | keys
    return TrainingConfig(**given)


def brief(folder: Path, **sections: dict[str, Any]) -> TrainingConfig:
    """A run of 4 steps, the same every time: the first epoch ends after 3, checkpoints are at 2 and 4."""
    for name, keys in {"training": {"max_steps": 4}, "sampling": EXACT}.items():
        sections[name] = keys | sections.get(name, {})
    return small(folder, **sections)


def train(config: TrainingConfig, name: str, watcher: Quiet | None = None, **objects: Any) -> TrainingReport:
    given = UserObjects(environment=Parity) if not objects else UserObjects(**objects)
    return Training(config, name=name, objects=given, watcher=watcher or Quiet()).train()


def go_on(folder: Path, environment: Any = Parity, watcher: Quiet | None = None) -> TrainingReport:
    run, objects = RunFolder(folder), UserObjects(environment=environment)
    return Training(run.config, run=run, objects=objects, watcher=watcher or Quiet()).train()


def rows(path: Path) -> list[dict[str, Any]]:
    """Of a JSONL file, without what depends on the clock."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if not _by_the_clock(key)} for row in found]


def _by_the_clock(key: str) -> bool:
    ends = ("p50", "p95", "waited", "wall_share", "cache_failures", "circuits_open")
    return key.startswith(TIMES) or "/seconds" in key or ("tools/" in key and key.endswith(ends))


def assert_same_run(left: Path, right: Path) -> None:
    for name in ("metrics.jsonl", "consumed.jsonl", "trajectories.jsonl"):
        assert (left / name).exists() == (right / name).exists()
        if (left / name).exists():
            ours, theirs = rows(left / name), rows(right / name)
            assert len(ours) == len(theirs), name
            for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
                differing = {
                    key: (one.get(key), other.get(key))
                    for key in one | other
                    if one.get(key) != other.get(key)
                }
                assert not differing, f"{name}, line {number}: {differing}"
    [*_, mine], [*_, yours] = RunFolder(left).checkpoints(), RunFolder(right).checkpoints()
    assert mine.name == yours.name
    compared = 0
    for path in sorted(mine.rglob("*.safetensors")):
        assert path.read_bytes() == (yours / path.relative_to(mine)).read_bytes(), path.name
        compared += 1
    assert compared >= 2
