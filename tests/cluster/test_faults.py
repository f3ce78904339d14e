"""The campaign of kills in small: a run that samples ahead on Ray loses a sampler and a reward worker, and the ledger
of groups is as it should be. `python -m benchmarks.cluster_faults` does it with whole processes, and the driver too."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster_faults import STEPS, plan
from tests.kits.run import Quiet, rows, small, train
from tests.kits.scale import SCALE
from TrainingFactory.cluster import ray_session
from TrainingFactory.training.ledger import find_ledger_errors


def actors() -> list[dict[str, Any]]:
    return ray_session.read_cluster_status(ray_session.require_ray())["actors"]


class Killer(Quiet):
    """Kills a sampler when the first step is written, and whoever scores when the second one is."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[str] = []

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        kind = {1: "sampler", 2: "reward"}.get(step)
        if kind and (found := [each for each in actors() if each["what"].startswith(kind)]):
            self.killed.append(kind)
            os.kill(found[-1]["pid"], signal.SIGKILL)


@SCALE
@pytest.mark.slow
def test_no_group_is_lost_or_trained_twice(
    ray_head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def score(trajectory):\n    return float(sum(trajectory.turns[0].completion.token_ids) % 3)\n"
    (tmp_path / "scoring.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = small(
        tmp_path,
        training={"max_steps": 5},
        sampling={"deterministic": False},
        reward={"type": "function", "options": {"function": "scoring.py:score"}},
        optimization={
            "async_rollout": True, "max_staleness": 1, "distributed_reward": True, "reward_workers": 1,
        },
        compute={"backend": "ray", "address": ray_head, "samplers": 2, "cpus_per_sampler": 0.5},
    )  # fmt: skip
    watcher = Killer()
    run = train(config, "kills", watcher).run
    assert watcher.killed == ["sampler", "reward"] and actors() == []
    assert find_ledger_errors(rows(run / "consumed.jsonl")) == []
    metrics, episodes = rows(run / "metrics.jsonl"), rows(run / "trajectories.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5]
    assert max(row["staleness/max"] for row in metrics) == 1
    assert [row["episodes/unscored"] for row in metrics] == [0] * 5  # the only reward worker was asked again
    assert set(Counter(each["group"] for each in episodes).values()) == {4}
    assert metrics[-1]["samplers/asked_again"] + metrics[-1]["samplers/remade"] >= 1


def test_a_plan_has_every_kind_of_kill_and_is_the_same_again() -> None:
    cases = plan(50, 8, seed=0)
    assert cases == plan(50, 8, seed=0) != plan(50, 8, seed=1)
    assert [case.number for case in cases] == list(range(50)) and all(case.step < STEPS for case in cases)
    native = Counter((case.victim, case.bound) for case in cases if case.engine == "native")
    assert set(native) == {(who, bound) for who in ("sampler", "driver", "reward") for bound in (0, 1, 2)}
    others = Counter((case.victim, case.where) for case in cases if case.engine == "vllm")
    assert others.total() == 8 and {"engine", "driver"} == {who for who, _ in others}
    assert {"none", "shared"} == {where for _, where in others}
