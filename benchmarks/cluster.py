"""What engines on Ray and asynchronous training give and cost: `python -m benchmarks.cluster` (needs Ray; minutes;
`--steps 0`: without slow tools, with the untrained built-in model unless `--model` names one).

    async_speedup    steps per second with max_staleness 1 over those of the synchronous run, the least of three kinds
                     of slow tools: see `benchmarks.slow_tools`
    fleet_overhead   time of 64 episodes of the demo's task by one native engine in a Ray actor over that by the same
                     engine in this process, less 1; medians of runs that take turns
    two_samplers     rate of turns by two Ray actors over that by one, where sampling is the bottleneck. Two cores
                     cannot show that with a model: an engine here answers after a sleep, so many turns at a time

All are ratios within one run of this program; `simulated` names what is not real.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.slow_tools import arguments, slow_tools, warm_start
from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.cluster.ray_places import RayEngineLauncher
from TrainingFactory.cluster.ray_session import RaySession
from TrainingFactory.envs import SearchEnvironment
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.models.names import TINY_ID
from TrainingFactory.protocols import Sampler
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Completion, EngineSpec, SamplingParams, Weights

GROUPS, MEMBERS, TURN = 8, 8, 0.1
AT_ONCE = 8  # turns that the sleeping engine samples side by side


class SleepingEngine:
    """Answers every turn after `TURN` seconds with one token, `AT_ONCE` of them at a time."""

    def __init__(self, spec: EngineSpec) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)

    async def start(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "node": platform.node(), "vocabulary": 2}

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: int = -1
    ) -> Completion:
        async with self._room:
            await asyncio.sleep(TURN)
        return Completion([1], [0.0], "stop")

    async def load(self, weights: Weights) -> None: ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)

    async def close(self) -> None: ...


async def overhead(session: RaySession, model: Path, times: int) -> dict[str, Any]:
    """Play the same episodes by an engine here and by one in an actor, in turn."""
    loaded = load_model(str(model), device="cpu")
    spec = EngineSpec("native", str(model), 512, slots=GROUPS * MEMBERS, device="cpu", pushed=False)
    samplers: dict[str, Sampler] = {
        "here": NativeEngine(loaded.model, slots=GROUPS * MEMBERS, max_length=512),
        "fleet": Fleet(RayEngineLauncher(session, spec, 1), 1, 512),
    }
    params = SamplingParams(temperature=1.2, max_tokens=40)
    rollouts = RolloutEngine(
        SearchEnvironment, chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids), params, max_turns=4
    )
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    turns = 1.0
    for step in range(times + 1):
        tasks = list(SearchEnvironment.tasks("train", step, GROUPS))
        for name, sampler in samplers.items():
            started = time.perf_counter()
            groups = await rollouts.rollout_batch(tasks, sampler, MEMBERS, step=step)
            if step:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
            turns = max(len(episode.turns) for group in groups for episode in group)
    for sampler in samplers.values():
        await sampler.close()
    ratio = statistics.median(b / a for a, b in zip(seconds["here"], seconds["fleet"], strict=True))
    here = statistics.median(seconds["here"])
    return {
        "overhead": round(ratio - 1, 3),
        "seconds_here": round(here, 3),
        "seconds_a_turn": round(here / turns, 3),
    }


async def scaling(session: RaySession, turns: int) -> dict[str, Any]:
    """Ask one and two sleeping engines the same number of turns."""
    rates: dict[int, float] = {}
    spec = EngineSpec("benchmarks.cluster:SleepingEngine", "", 512, pushed=False)
    for count in (1, 2):
        fleet = Fleet(RayEngineLauncher(session, spec, count, cpus=0.5), count, 512)
        await fleet.sample([0], SamplingParams())  # starts it
        started = time.perf_counter()
        await asyncio.gather(*(fleet.sample([0], SamplingParams(seed=n)) for n in range(turns)))
        rates[count] = turns / (time.perf_counter() - started)
        await fleet.close()
    return {
        "speedup": round(rates[2] / rates[1], 2),
        "turns_per_second": {n: round(r, 1) for n, r in rates.items()},
    }


async def on_ray(model: Path, times: int) -> dict[str, Any]:
    session = RaySession()
    try:
        await session.open()
        return {"fleet": await overhead(session, model, times), "samplers": await scaling(session, 400)}
    finally:
        await session.close()


def main() -> None:
    given = arguments(__doc__, 12).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or (warm_start(Path(folder)) if given.steps else Path(TINY_ID))
        found = asyncio.run(on_ray(model, 9))
        print(json.dumps(found), flush=True)
        slow = (
            slow_tools(model, Path(folder), given.steps, [1], 1.0, **{"model.device": "cpu"})
            if given.steps
            else {}
        )
    result = {
        "async_speedup": min((each["speedup"]["1"] for each in slow.values()), default=None),
        "fleet_overhead": found["fleet"]["overhead"],
        "two_samplers": found["samplers"]["speedup"],
        "simulated": ["latency of tools (async_speedup)", "compute of samplers (two_samplers)"],
    }
    print("RESULT " + json.dumps(result | found | {"slow_tools": slow}))


if __name__ == "__main__":
    main()
