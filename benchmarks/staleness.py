"""What asynchronous training learns, by how old its groups may be: `python -m benchmarks.staleness` (`--jobs 16` where
there are cores; about a minute for each run of one core).

GRPO from the warm start of the tests, which does 0.3 of the held-out tasks: 30 steps at a constant rate, at which the
synchronous runs come to a plateau, for every bound and seed; held-out success at the end. `--free` takes away what
holds a token back that updates since its sampling have moved to the clip (`Correction.anchored`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch

from tests.kits.warm import WARM, lift
from TrainingFactory.algorithms import kinds

FALLEN = 0.5  # below it a run has lost what it had learned


def without_anchor(name: str, options: dict[str, Any], make: Any = kinds.make_algorithm) -> Any:
    given = options.get("correction")
    return make(name, options | ({"correction": replace(given, anchored=False)} if given else {}))


def one(bound: int, seed: int, steps: int, rate: float, free: bool) -> float:
    """Train, and return the share of held-out tasks that are done afterwards."""
    torch.set_num_threads(1)
    patched = mock.patch.object(kinds, "make_algorithm", without_anchor if free else kinds.make_algorithm)
    with patched, tempfile.TemporaryDirectory() as folder:
        return lift(
            WARM,
            Path(folder),
            training={"max_steps": steps, "seed": seed, "learning_rate": rate},
            sampling={"max_tokens": 24, "deterministic": False, "slots": 64},
            optimization={"async_rollout": bound > 0, "max_staleness": bound},
        ).after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)  # bound and seed
    given = parser.parse_args()
    if given.one:
        print(one(*given.one, given.steps, given.rate, given.free))
        return

    def apart(asked: tuple[int, int]) -> tuple[int, float]:
        command = [sys.executable, "-m", "benchmarks.staleness", "--one", *map(str, asked)]
        command += [
            "--steps",
            str(given.steps),
            "--rate",
            str(given.rate),
            *(["--free"] if given.free else []),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"bound {asked[0]}, seed {asked[1]}: {done.stdout.strip()}", flush=True)
        return asked[0], float(done.stdout.split()[-1])

    asked = [(bound, seed) for seed in range(given.seeds) for bound in given.bounds]
    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(apart, asked))
    shares = {bound: [share for each, share in found if each == bound] for bound in given.bounds}
    means = {bound: round(fmean(each), 3) for bound, each in shares.items()}
    fallen = {bound: sum(share < FALLEN for share in each) for bound, each in shares.items()}
    print(
        "RESULT " + json.dumps({"success": means, "fallen": fallen, "seeds": given.seeds, "free": given.free})
    )


if __name__ == "__main__":
    main()
