"""What `tfactory plan`'s step time forecasts beside what happens: `python -m benchmarks.plan_check` (minutes, on a
CPU).

The demo's GRPO config from its warm start, with a tool that takes its time (`benchmarks.slow_tools`), a learning rate
so small that lengths stay what they are, and sampler and learner in one process. Before and after every check the rates
of the machine are measured (`benchmarks.machine_rates`): sampling of 8, 32 and 128 episodes without latency, updates,
and how fast each of the two is while the other works. Episodes and the time between two steps are those of one
synchronous run without latency. From these the seconds of a step are forecast for other group sizes, latencies
and bounds. What else the machine does changes its rates: `drift` is how far the forecasts before and after a check are
apart. Their mean is the forecast, and a check with a drift over `DRIFT` does not count. Repeat until every check has.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine_rates import Machine, Rates
from benchmarks.slow_tools import SKIPPED, arguments, run, warm_start
from TrainingFactory.apps.plan.step_time import Costs, StepModel
from TrainingFactory.apps.plan.workload import parse_distribution, workload_from_run
from TrainingFactory.runs.folder import RunFolder

GROUPS, SLOTS, STEPS = 8, 512, 10
RECORDED = 16  # members of the groups of the run that gives lengths
OLD = 4 / 3  # log-probs of the learner's own weights first: a forward more than a forward and a backward
DRIFT = 0.1
# group size, latency, mean seconds, bound
CHECKS = [
    (8, "constant", 0.3, 0), (8, "constant", 0.3, 1), (8, "constant", 0.0, 1),
    (12, "exponential", 0.3, 0), (12, "exponential", 0.3, 1), (6, "exponential", 0.5, 2),
]  # fmt: skip


class Forecaster:
    """Knows the episodes of a synchronous run without latency, and the seconds between its steps by the episode."""

    def __init__(self, model: Path, folder: Path) -> None:
        run(model, folder, "recorded", "constant", options(RECORDED, 0), 0.0)
        self.recorded = RunFolder(folder / "recorded")
        rows = self.recorded.metrics()[SKIPPED - 1 :]
        worked = [row["seconds/generate"] + row["seconds/update"] for row in rows[1:]]
        passed = (rows[-1]["time"] - rows[0]["time"]) / len(worked) - statistics.fmean(worked)
        self.record = passed / GROUPS / RECORDED

    def forecast(self, rates: Rates, size: int, latency: str, bound: int) -> float:
        episodes = workload_from_run(self.recorded, parse_distribution(latency))
        tree = episodes.num_tokens * size - episodes.prompt_tokens * (size - 1)
        costs = Costs(
            launch=rates.step,
            row=rates.row,
            update=(rates.update + rates.token * GROUPS * episodes.taught_share * tree)
            / (1.0 if bound else OLD),
            record=self.record * GROUPS * size,
            sampler_overlap=rates.sampler_overlap,
            learner_overlap=rates.learner_overlap,
        )
        return StepModel(episodes, costs, GROUPS, size, SLOTS, max_staleness=bound).estimate_seconds()


def options(size: int, bound: int, steps: int = STEPS) -> dict[str, Any]:
    found: dict[str, Any] = {
        "training.group_size": size, "training.max_steps": steps, "training.learning_rate": 1e-9,
        "sampling.slots": SLOTS, "logging.checkpoint_every": 1000, "logging.record_tools": False,
    }  # fmt: skip
    return found | (
        {"optimization.async_rollout": True, "optimization.max_staleness": bound} if bound else {}
    )


def check(model: Path, folder: Path, steps: int, repeats: int, times: int) -> list[dict[str, Any]]:
    """Measure the rates around every run, make it, and forecast it."""
    found, known = list[dict[str, Any]](), Forecaster(model, folder)
    machine = Machine(model, GROUPS, options(RECORDED, 1))
    with asyncio.Runner() as runner:
        before = runner.run(machine.measure(times))
        for number, (size, kind, mean, bound) in enumerate(CHECKS * repeats):
            latency = f"exponential:{mean}" if kind == "exponential" else str(mean)
            measured = run(model, folder, f"check-{number}", kind, options(size, bound, steps), mean)
            after = runner.run(machine.measure(times))
            first, last = (known.forecast(rates, size, latency, bound) for rates in (before, after))
            row = {
                "group_size": size,
                "latency": latency,
                "bound": bound,
                "load": round(os.getloadavg()[0], 1),
            }
            row |= {"forecast_s": round((first + last) / 2, 3), "measured_s": round(measured, 3)}
            row |= {"error": round((first + last) / 2 / measured - 1, 3), "drift": round(last / first - 1, 3)}
            found.append(row | {"rates": [round(each, 5) for each in after]})
            print(json.dumps(found[-1]), flush=True)
            before = after
        runner.run(machine.close())
    return found


def main() -> None:
    parser = arguments(__doc__, 24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--times", type=int, default=3, help="that rates are measured around a run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or warm_start(Path(folder))
        rows = check(model, Path(folder), given.steps, given.repeats, given.times)
    errors, spread = list[float | None](), list[float]()
    for number in range(len(CHECKS)):
        counted = [row["error"] for row in rows[number :: len(CHECKS)] if abs(row["drift"]) <= DRIFT]
        errors.append(round(statistics.median(counted), 3) if counted else None)
        spread.append(round(max(counted) - min(counted), 3) if counted else 0.0)
    worst = max((abs(each) for each in errors if each is not None), default=None)
    result = {"worst_error": worst, "errors": errors, "spread": spread, "not_counted": errors.count(None)}
    print("RESULT " + json.dumps(result | {"runs": rows, "simulated": ["tool latency"]}))


if __name__ == "__main__":
    main()
