"""What the simulation behind `tfactory plan` forecasts beside what happens: `python -m benchmarks.plan_check` (minutes,
on a CPU).

The demo's GRPO config from its warm start, with a tool that takes its time (`benchmarks.slow_tools`), a learning rate
so small that lengths stay what they are, and sampler and learner in one process. Rates are measured in runs without
latency: synchronous with groups of 4 and of 16 (tokens per second at 32 and 128 rows, update rate, time between
steps), and with groups of 4 and a bound of 1 (how sampler and learner hinder each other). From these rates and the
episodes of those runs the seconds of a step are forecast for runs with other group sizes, latencies and bounds. Since
whatever else the machine does changes the rates, they are measured before and after every run, and the forecast takes
their mean; `drift` is how much they changed in between.
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
OLD = (
    4 / 3
)  # an update with the log-probs of its own weights first: a forward more than a forward and a backward
# group size, latency, mean seconds, bound
CHECKS = [
    (8, "constant", 0.3, 0), (8, "constant", 0.3, 1), (12, "exponential", 0.3, 0), (12, "exponential", 0.3, 1),
    (6, "exponential", 0.5, 2), (8, "constant", 0.1, 0),
]  # fmt: skip
Measured = dict[str, float]


class Rates:
    """Measures rates in runs without latency, and forecasts from those of two times."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.workload: Workload = lambda *_: Played([], [])

    def measure(self, name: str) -> list[Measured]:
        """Return seconds of a step for groups of 4 ahead of it, and of its parts for groups of 4 and of 16."""
        both = run(self.model, self.folder, f"{name}-ahead", "constant", options(4, 1), 0.0)
        return [{"both": both}, *(self._parts(f"{name}-{size}", size) for size in (4, 16))]

    def _parts(self, name: str, size: int) -> Measured:
        run(self.model, self.folder, name, "constant", options(size, 0), 0.0)
        found = RunFolder(self.folder / name)
        self.workload = recorded(found)
        groups = [self.workload(np.random.default_rng(n), size) for n in range(64)]
        rows = found.metrics()[SKIPPED - 1 :]
        seconds = (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)
        generate, update = (
            statistics.mean(row[f"seconds/{key}"] for row in rows[1:]) for key in ("generate", "update")
        )
        # decode steps of a step, as the simulation counts them: a second each
        count = Simulation(
            self.workload, Costs(lambda *_: 1.0, free, free), GROUPS, size, SLOTS, steps=9
        ).run()
        tree = GROUPS * statistics.mean(group.tree_tokens * group.taught for group in groups)
        return {
            "steps": count[0], "tokens": count[1], "tree": tree,
            "generate": generate, "update": update, "record": seconds - generate - update,
        }  # fmt: skip

    def use(self, before: list[Measured], after: list[Measured]) -> dict[str, float]:
        """Take the mean of two measurements: what a decode step takes and a row adds to it, and so for the update."""
        both, small, large = (
            {key: (one[key] + other[key]) / 2 for key in one}
            for one, other in zip(before, after, strict=True)
        )
        points = np.array([[each["steps"], each["tokens"]] for each in (small, large)])
        self.step, self.token = np.linalg.solve(points, [small["generate"], large["generate"]])
        trees = np.array([[1.0, each["tree"]] for each in (small, large)])
        self.update = np.linalg.solve(trees, [small["update"], large["update"]])
        self.record = small["record"]
        tried = {share: self.forecast(4, "0", 1, STEPS, share) for share in np.linspace(0.35, 1.0, 14)}
        self.overlap = min(tried, key=lambda share: abs(tried[share] - both["both"]))
        return {"decode_ms": 1e3 * self.step, "row_ms": 1e3 * self.token, "overlap": self.overlap}

    def forecast(
        self, size: int, latency: str, bound: int, steps: int, overlap: float | None = None
    ) -> float:
        def update(groups: Sequence[Played]) -> float:
            tree = sum(group.tree_tokens for group in groups)
            return float(self.update @ [1.0, tree]) * (OLD if bound else 1.0)

        def decode(rows: int, _: float) -> float:
            return max(1e-6, self.step + self.token * rows)

        costs = Costs(decode, free, update, record=self.record, overlap=overlap or self.overlap)
        workload = with_latency(self.workload, distribution(latency))
        simulations = [
            Simulation(workload, costs, GROUPS, size, SLOTS, bound=bound, shared=True, steps=steps, seed=seed)
            for seed in range(1 if overlap else 6)
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


def check(rates: Rates, steps: int) -> list[dict[str, Any]]:
    """Make every run between two measurements of the rates, and forecast it from these."""
    found, before = list[dict[str, Any]](), rates.measure("0")
    for number, (size, kind, mean, bound) in enumerate(CHECKS, 1):
        name, latency = f"check-{number}", f"exponential:{mean}" if kind == "exponential" else str(mean)
        measured = run(rates.model, rates.folder, name, kind, options(size, bound, steps), mean)
        after = rates.measure(str(number))
        used = rates.use(before, after)
        drift = round(after[2]["generate"] / before[2]["generate"], 2)
        forecast, before = rates.forecast(size, latency, bound, steps), after
        row = {"group_size": size, "latency": latency, "bound": bound, "forecast_s": round(forecast, 3)}
        row |= {"measured_s": round(measured, 3), "error": round(forecast / measured - 1, 3), "drift": drift}
        found.append(row | {key: round(float(value), 3) for key, value in used.items()})
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
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or warm_start(Path(folder))
        rows = check(Rates(model, Path(folder)), given.steps)
    worst, load = max(abs(row["error"]) for row in rows), round(os.getloadavg()[0], 1)
    result = {"worst_error": worst, "load": load, "runs": rows, "simulated": ["tool latency"]}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
