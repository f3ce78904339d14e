"""What a run requests from a cluster, and what the cluster's benchmark prepares; nothing is started."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cluster
from TrainingFactory.assembly import fleet
from TrainingFactory.cluster import ray_session
from TrainingFactory.config import TrainingConfig


@pytest.mark.parametrize(
    ("cluster_has", "engine", "learners", "gpus"),
    [
        ({"CPU": 8.0, "GPU": 4.0}, "vllm", 3, [1, 1, 1, 1]),
        ({"CPU": 8.0, "GPU": 4.0}, "native", 3, [0, 0, 1, 1]),
        ({"CPU": 8.0}, "vllm", 2, [0, 0, 0]),
    ],
)
async def test_the_early_check_counts_the_gpus_that_will_be_requested(
    cluster_has: dict[str, float],
    engine: str,
    learners: int,
    gpus: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[dict[str, float]] = []

    class Session(ray_session.RaySession):
        async def open(self) -> None: ...

        async def close(self) -> None: ...

        async def check_capacity(self, bundles: Sequence[Any], what: str) -> None:
            checked.extend(bundles)

    monkeypatch.setattr(fleet, "RaySession", Session)
    ray = SimpleNamespace(cluster_resources=lambda: cluster_has)
    monkeypatch.setattr(ray_session, "require_ray", lambda: ray)
    compute = {"backend": "ray", "samplers": 2, "learners": learners}
    config = TrainingConfig(compute=compute, sampling={"engine": engine})
    async with AsyncExitStack() as held:
        await fleet.join_cluster(config, held)
    assert [bundle["GPU"] for bundle in checked] == gpus


def test_the_benchmark_without_steps_trains_no_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def on_ray(model: Path, times: int) -> dict[str, Any]:
        return {"fleet": {"overhead": 0, "model": str(model)}, "samplers": {"speedup": 2}}

    monkeypatch.setattr(cluster, "on_ray", on_ray)
    monkeypatch.setattr(cluster, "warm_start", lambda folder: pytest.fail("it trains a warm start"))
    monkeypatch.setattr(cluster.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr("sys.argv", ["cluster", "--steps", "0"])
    cluster.main()
    assert '"model": "builtin:tiny"' in capsys.readouterr().out
