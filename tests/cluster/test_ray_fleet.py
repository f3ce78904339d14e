"""Engines in Ray actors, on a real Ray: a run that loses one is as if nothing had happened, and mistakes are told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.run import EXACT, Quiet, rows, small, train
from tests.kits.scale import SCALE
from TrainingFactory.cluster import ray_session
from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.cluster.ray_places import RayEngineLauncher
from TrainingFactory.cluster.ray_session import RaySession
from TrainingFactory.config.problems import ConfigError
from TrainingFactory.types import EngineSpec, SamplingParams

pytestmark = SCALE
RAY = {"backend": "ray", "address": "auto", "samplers": 2, "cpus_per_sampler": 0.5}


def status() -> list[dict[str, Any]]:
    return ray_session.read_cluster_status(ray_session.require_ray())["actors"]


class Killer(Quiet):
    """Kills a sampler at the end of the first step, and looks at what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[str]()

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 1:
            actors = status()
            self.seen = [actor["what"] for actor in actors]
            os.kill(actors[0]["pid"], signal.SIGKILL)


def figures(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith("samplers/")}
        for row in rows(run / "metrics.jsonl")
    ]


@pytest.mark.slow  # without Ray: test_fleet.py; a worker on Ray that is killed: test_ray_workers.py
def test_a_run_that_loses_a_sampler_is_the_undisturbed_one(ray_head: str, tmp_path: Path) -> None:
    def run(name: str, watcher: Quiet, **compute: Any) -> Path:
        config = small(tmp_path, training={"max_steps": 3}, sampling={"max_tokens": 8}, compute=compute)
        return train(config, name, watcher).run

    killer = Killer()
    one, two = run("here", Quiet()), run("there", killer, **RAY)  # who samples makes no difference
    assert killer.seen == ["sampler 0", "sampler 1"] and status() == []
    for left, right in zip(figures(one), figures(two), strict=True):
        more = right.keys() - left.keys()  # what is measured where somebody else samples
        assert right["mismatch"] < 1e-5 and all(key.startswith(("mismatch", "importance_")) for key in more)
        both = right.keys() - more
        assert {key: left[key] for key in both} == pytest.approx({key: right[key] for key in both}, abs=1e-5)
    last = rows(two / "metrics.jsonl")[-1]
    log = two / "engines" / "sampler-0.log"
    assert last["samplers/asked_again"] >= 1 and log.is_file()
    assert any("has exited" in text and str(log.resolve()) in text for text in killer.said)
    tokens = [(run / "trajectories.jsonl").read_bytes().count(b'"completion"') for run in (one, two)]
    assert tokens[0] == tokens[1] > 0


def test_what_cannot_be_is_told_in_seconds(ray_head: str, tmp_path: Path, tfactory: Run) -> None:
    for compute, message in (
        ({"gpus_per_sampler": 64}, "requested .* GPU, but the whole cluster has"),
        ({"samplers": 2, "cpus_per_sampler": 10_000}, "Cannot place compute.samplers=2"),
    ):
        with pytest.raises(ValueError, match=message):
            train(small(tmp_path, sampling={"deterministic": False}, compute=RAY | compute), "wrong")
    for address, message in (
        ("127.0.0.1:6", "Cannot join .*compute.address=127.0.0.1:6.*Connection refused"),
        ("ray://there:10001", "auto, or HOST:PORT"),
    ):
        with pytest.raises(ValueError, match=message):  # this process is connected already
            ray_session._join_cluster(ray_session.require_ray(), address, {})
    with pytest.raises(ConfigError, match=r"sampling\.deterministic: needs the native engine"):
        train(small(tmp_path, sampling=EXACT, compute=RAY), "wrong")
    with pytest.raises(ConfigError, match=r"compute\.samplers: is 2, .*compute.backend=ray"):
        train(small(tmp_path, compute={"samplers": 2}), "wrong")
    assert not list(tmp_path.glob("wrong*")) and status() == []
    code, out, err = tfactory("cluster", "status")
    assert code == 0 and "CPU" in out and "TrainingFactory" in err
    code, out, err = tfactory("cluster", "status", "--json")
    assert code == 0 and json.loads(out)["actors"] == []


def test_a_placement_that_is_taken_is_told_when_the_time_is_over(ray_head: str) -> None:
    async def test() -> None:
        session = RaySession(ray_head)
        await session.open()
        cores = ray_session.read_cluster_status(ray_session.require_ray())["nodes"][0]["resources"]["CPU"]
        group = await session.allocate_group([{"CPU": cores}], "everything", 10)
        with pytest.raises(ValueError, match=r"place more within 0.5 s: requested 1 CPU"):
            await session.allocate_group([{"CPU": 1}], "more", 0.5)
        session.remove_group(group)
        await session.close()

    asyncio.run(test())


def test_a_machine_of_another_version_is_named(ray_head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "__version__", "9.9")
    with pytest.raises(ValueError, match=r"has TrainingFactory \S+ \(here 9.9\)"):
        asyncio.run(RaySession(ray_head).open())


@pytest.mark.slow  # in a process of this machine: test_local.py
def test_a_model_that_cannot_be_loaded(ray_head: str, tmp_path: Path) -> None:
    async def test() -> None:
        spec = EngineSpec("native", str(tmp_path), 64)
        fleet = Fleet(RayEngineLauncher(RaySession(ray_head), spec, 1, cpus=0.5), 1, 64)
        with pytest.raises(ValueError, match=r"Could not start sampler 0: Cannot load the model"):
            await fleet.sample([1], SamplingParams())
        await fleet.close()

    asyncio.run(test())
    for _ in range(100):  # an actor's name stays a moment after its end
        if not status():
            return
        time.sleep(0.1)
    raise AssertionError(status())


def test_all_that_need_ray_or_vllm_are_in_one_process(request: pytest.FixtureRequest) -> None:
    """Each process of the suite would start its own: pytest-xdist tells groups by the names that it gives to tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("the suite runs in one process")
    assert request.node.nodeid.endswith("@scale")
