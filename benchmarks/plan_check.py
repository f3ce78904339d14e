"""What the simulation behind `tfactory plan` forecasts beside what happens: `python -m benchmarks.plan_check` (minutes,
on a CPU).

The demo's GRPO config from its warm start, with a tool that takes its time (`benchmarks.slow_tools`), a learning rate
so small that lengths stay what they are, and sampler and learner in one process. Rates are measured in runs without
latency, synchronous, with groups of 4 and of 16: tokens per second at 32 and 128 rows, update rate, time between steps.
From these rates and the episodes of those runs the seconds of a step are forecast for runs with other group sizes,
latencies and bounds, and the runs are made. While sampler and learner both work each is assumed to be half as fast.
What else the machine does changes rates from minute to minute: all of it is repeated, and the median of a run's errors
counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.slow_tools import SKIPPED, run, warm_start
from TrainingFactory.services.plan.simulate import Costs, Simulation
from TrainingFactory.services.plan.workload import Draw, Played, Workload, distribution, recorded
from TrainingFactory.services.runs.folder import RunFolder

GROUPS, SLOTS, STEPS = 8, 512, 10
OLD = 4 / 3  # log-probs of the learner's own weights first: a forward more than a forward and a backward
# group size, latency, mean seconds, bound
CHECKS = [
    (8, "constant", 0.3, 0), (8, "constant", 0.3, 1), (8, "constant", 0.0, 1),
    (12, "exponential", 0.3, 0), (12, "exponential", 0.3, 1), (6, "exponential", 0.5, 2),
]  # fmt: skip


class Rates:
    """Measures rates in runs without latency, and forecasts from them."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.workload: Workload = lambda *_: Played([], [])
        small, large = self._parts(4), self._parts(16)
        points = np.array([[each["steps"], each["tokens"]] for each in (small, large)])
        self.step, self.token = np.linalg.solve(points, [small["generate"], large["generate"]])
        trees = np.array([[1.0, each["tree"]] for each in (small, large)])
        self.update = np.linalg.solve(trees, [small["update"], large["update"]])
        self.record = small["record"]

    def _parts(self, size: int) -> dict[str, float]:
        """Return the seconds of a step's parts, and what they were spent on."""
        name = f"groups-of-{size}"
        run(self.model, self.folder, name, "constant", options(size, 0), 0.0)
        found = RunFolder(self.folder / name)
        self.workload = recorded(found)
        groups = [self.workload(np.random.default_rng(n), size) for n in range(64)]
        rows = found.metrics()[SKIPPED - 1 :]
        seconds = (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)
        generate, update = (
            statistics.mean(row[f"seconds/{key}"] for row in rows[1:]) for key in ("generate", "update")
        )
        parts = {"generate": generate, "update": update, "record": seconds - generate - update}
        # decode steps of a step, as the simulation counts them: a second each
        costs = Costs(lambda *_: 1.0, free, free)
        count = Simulation(self.workload, costs, GROUPS, size, SLOTS, steps=9).run()
        tree = GROUPS * statistics.mean(group.tree_tokens * group.taught for group in groups)
        return parts | {"steps": count[0], "tokens": count[1], "tree": tree}

    def forecast(self, size: int, latency: str, bound: int, steps: int) -> float:
        def update(groups: Sequence[Played]) -> float:
            tree = sum(group.tree_tokens for group in groups)
            return float(self.update @ [1.0, tree]) * (OLD if bound else 1.0)

        def decode(rows: int, _: float) -> float:
            return max(1e-6, self.step + self.token * rows)

        costs = Costs(decode, free, update, record=self.record, overlap=0.5)
        workload = with_latency(self.workload, distribution(latency))
        simulations = [
            Simulation(workload, costs, GROUPS, size, SLOTS, bound=bound, shared=True, steps=steps, seed=seed)
            for seed in range(6)
        ]
        return statistics.mean(each.run(SKIPPED)[0] for each in simulations)


def free(*_: Any) -> float:
    return 0.0


def with_latency(workload: Workload, slow: Draw) -> Workload:
    def draw(rng: np.random.Generator, size: int) -> Played:
        played = workload(rng, size)
        slowed = [
            [turn._replace(tool=slow(rng) if turn.tool else 0.0) for turn in each] for each in played.episodes
        ]
        return played._replace(episodes=slowed)

    return draw


def options(size: int, bound: int, steps: int = STEPS) -> dict[str, Any]:
    found: dict[str, Any] = {
        "training.group_size": size, "training.max_steps": steps, "training.learning_rate": 1e-9,
        "sampling.slots": SLOTS, "logging.checkpoint_every": 1000, "logging.record_tools": False,
    }  # fmt: skip
    return found | (
        {"optimization.async_rollout": True, "optimization.max_staleness": bound} if bound else {}
    )


def check(model: Path, folder: Path, steps: int) -> list[dict[str, Any]]:
    """Measure the rates, forecast every run, and make it."""
    rates, found = Rates(model, folder), list[dict[str, Any]]()
    print(f"a decode step {1e3 * rates.step:.1f} ms, {1e3 * rates.token:.2f} ms a row", flush=True)
    for number, (size, kind, mean, bound) in enumerate(CHECKS):
        latency = f"exponential:{mean}" if kind == "exponential" else str(mean)
        forecast = rates.forecast(size, latency, bound, steps)
        measured = run(model, folder, f"check-{number}", kind, options(size, bound, steps), mean)
        row = {"group_size": size, "latency": latency, "bound": bound, "load": round(os.getloadavg()[0], 1)}
        row |= {"forecast_s": round(forecast, 3), "measured_s": round(measured, 3)}
        found.append(row | {"error": round(forecast / measured - 1, 3)})
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a warm start of the demo; by default one is made, in minutes"
    )
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or warm_start(Path(folder))
        repeats = [check(model, Path(folder, str(n)), given.steps) for n in range(given.repeats)]
    errors = [statistics.median(row["error"] for row in rows) for rows in zip(*repeats, strict=True)]
    result = {"worst_error": max(map(abs, errors)), "errors": errors, "runs": repeats}
    print("RESULT " + json.dumps(result | {"simulated": ["tool latency"]}))


if __name__ == "__main__":
    main()
