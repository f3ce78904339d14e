"""Training with slow tools, synchronous and asynchronous, in one process: the part of `benchmarks.cluster` that needs
neither Ray nor vLLM. Alone: `python -m benchmarks.slow_tools` (`--device cuda` on a GPU, `--steps 4` to try it out).

The demo's GRPO config over its search environment, from a model that its warm start has made; every call of the tool
takes as long as a distribution says, 1 s on average: constant, exponential, heavy-tailed (log-normal, sigma 1.2: of 100
calls one takes over 8 s). Changed in both alike: deterministic mode is off, which the asynchronous run refuses, and
episodes go without a limit of slots over two steps' worth. A rate is that of the steps after the second one, by the
times in metrics.jsonl. A name such as 1 is max_staleness with groups in order; 1-arrival takes them as they end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from TrainingFactory.apps.demo.demo import GRPO, Demo
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.envs import SearchEnvironment
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.runs.tracking import PlainLines
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Message, Step, Task

SKIPPED = 2  # steps, while the stream fills
SIGMA = 1.2
LATENCIES: dict[str, Callable[[random.Random], float]] = {
    "constant": lambda _: 1.0,
    "exponential": lambda rng: rng.expovariate(1.0),
    "heavy_tailed": lambda rng: math.exp(rng.gauss(-(SIGMA**2) / 2, SIGMA)),
}


def delayed(kind: str, mean: float) -> type[SearchEnvironment]:
    """Return the environment with a tool that takes its time: the same for the same episode in every run."""
    draw, members = LATENCIES[kind], Counter[str]()

    class Delayed(SearchEnvironment):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            members[task.id] += 1
            self._rng = random.Random(f"{task.id} {members[task.id]}")

        async def step(self, message: Message) -> Step:
            if message.tool_calls:
                await asyncio.sleep(mean * draw(self._rng))
            return await super().step(message)

    return Delayed


def warm_start(folder: Path) -> Path:
    """Make the demo's warm start and return its model."""
    demo = Demo("search", out=folder / "demo")
    demo.warm_start(PlainLines())
    return demo.warm_folder / "model"


def given_config(model: Path, folder: Path, options: dict[str, Any]) -> TrainingConfig:
    given = {"model.name": str(model), "logging.output_dir": str(folder), "sampling.deterministic": False}
    given |= {"sampling.slots": 512} | options
    return load_config(GRPO, [key_value(key, value) for key, value in given.items()])


def run(model: Path, folder: Path, name: str, kind: str, options: dict[str, Any], mean: float) -> float:
    """Train with a slow tool and return the seconds of a step."""
    objects = UserObjects(environment=delayed(kind, mean))
    report = Training(given_config(model, folder, options), name=name, objects=objects).train()
    times = [row["time"] for row in RunFolder(report.run).metrics()]
    return (times[-1] - times[SKIPPED - 1]) / (len(times) - SKIPPED)


def slow_tools(
    model: Path, folder: Path, steps: int, bounds: list[int], mean: float, **more: Any
) -> dict[str, Any]:
    """Measure steps per second for every distribution and bound, each beside the synchronous run."""
    found: dict[str, Any] = {}
    for kind in LATENCIES:
        options = {"training.max_steps": steps} | more
        seconds = {"0": run(model, folder, f"{kind}-0", kind, options, mean)}
        for bound, order in [*((bound, "number") for bound in bounds), (1, "arrival")]:
            ahead = {"optimization.async_rollout": True, "optimization.max_staleness": bound}
            ahead["optimization.async_order"] = order
            name = f"{bound}" if order == "number" else f"{bound}-{order}"
            seconds[name] = run(model, folder, f"{kind}-{name}", kind, options | ahead, mean)
        found[kind] = {
            "seconds_per_step": {bound: round(value, 3) for bound, value in seconds.items()},
            "speedup": {bound: round(seconds["0"] / seconds[bound], 2) for bound in seconds if bound != "0"},
        }
        print(f"{kind}: {json.dumps(found[kind])}", flush=True)
    return found


def arguments(about: str | None, steps: int) -> argparse.ArgumentParser:
    """Make a parser with what all programs over the demo's task take."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "a warm start of the demo; by default one is made, in minutes"
    parser.add_argument("--model", type=Path, help=text)
    parser.add_argument("--steps", type=int, default=steps, help="of each run with slow tools")
    return parser


def main() -> None:
    parser = arguments(__doc__, 10)
    parser.add_argument("--mean", type=float, default=1.0, help="seconds of a call")
    parser.add_argument("--bounds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or warm_start(Path(folder))
        device = {"model.device": given.device}
        found = slow_tools(model, Path(folder), given.steps, given.bounds, given.mean, **device)
    worst = min(each["speedup"]["1"] for each in found.values())
    print("RESULT " + json.dumps({"async_speedup": worst, "latencies": found, "simulated": ["tool latency"]}))


if __name__ == "__main__":
    main()
