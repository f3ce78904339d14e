"""A cluster of several machines, as far as one machine can show it; and vLLM on Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.scale import SCALE

pytestmark = [SCALE, pytest.mark.slow]

# In a process of its own: this one may be part of another Ray.
TWO_NODES = """
import json, sys
from pathlib import Path
from ray.cluster_utils import Cluster
from tests.kits.run import Quiet, rows, small, train
from TrainingFactory.cluster import ray_session

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
cluster.add_node(num_cpus=2)
seen = []

class Watcher(Quiet):
    def step(self, step, total, metrics):
        seen.append(ray_session.read_cluster_status(ray_session.require_ray()))

watcher = Watcher()
compute = {"backend": "ray", "address": cluster.address, "samplers": 2, "cpus_per_sampler": 0.5}
config = small(Path(sys.argv[1]), training={"max_steps": 2}, sampling={"deterministic": False}, compute=compute)
report = train(config, "two", watcher)
import ray
assert not ray.is_initialized()
cluster.shutdown()
print(json.dumps({"seen": seen[-1], "rows": rows(report.run / "metrics.jsonl"), "said": watcher.said}))
"""


def run(code: str, *arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{os.environ['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_samplers_on_another_machine_get_config_and_weights_over_ray(scale: None, tmp_path: Path) -> None:
    found = json.loads(run(TWO_NODES, str(tmp_path)))
    head, other = sorted(found["seen"]["nodes"], key=lambda node: "CPU" in node["resources"])
    assert "CPU" not in head["resources"] and (other["resources"]["CPU"], other["free"]["CPU"]) == (2, 1)
    assert [actor["what"] for actor in found["seen"]["actors"]] == ["sampler 0", "sampler 1"]
    assert [row["samplers/alive"] for row in found["rows"]] == [2, 2]
    assert found["rows"][-1]["mismatch"] < 1e-5


def test_grpo_on_two_ray_samplers_with_vllm(scale: None, tmp_path: Path) -> None:
    code = """
import json, sys
from pathlib import Path
from tests.kits.warm import WARM, lift
before, after, report = lift(
    WARM, Path(sys.argv[1]), training={"max_steps": 12},
    sampling={"engine": "vllm", "deterministic": False}, model={"max_length": 512},
    compute={"backend": "ray", "samplers": 2, "cpus_per_sampler": 0.5},
)
rows = [json.loads(line) for line in (report.run / "metrics.jsonl").read_text().splitlines()]
print(json.dumps([before, after, [row.get("mismatch", 0.0) for row in rows]]))
"""
    before, after, mismatch = json.loads(run(code, str(tmp_path)))
    assert after > before + 0.2, (before, after)
    assert max(mismatch) < 1e-4
