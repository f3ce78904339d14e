"""Does it help to pay each turn for what came of it alone? `python -m benchmarks.turn_credit`

The task is a chain of four lookups, each of which names the next key, and then the answer. A turn that looks up the
right next key earns 0.5 at once, any other call costs 0.5, and the right answer earns 1 at the end. GRPO learns it
twice from the same warm start, with the same tasks, random numbers and rewards: with `credit: turn` a turn is credited
with the outcome and the step rewards from it on, with `credit: trajectory` with all that its episode earned.

Success is the share of the last 8 steps' episodes (128) with the right answer; every step has new tasks, and its
episodes are sampled before it learns from them. A run's figure is the first step with a success of 0.8 or more; a run
that never gets there counts with the number of its steps, and is named in `censored`.

`ratio` is the median over all seeds with credit `trajectory` over that with `turn`: over 1, credit by turn needs fewer
steps. `lower` and `upper` are its 90 % bootstrap interval; a seed's two runs are drawn together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import count as endlessly
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.warm import warm_run
from TrainingFactory.algorithms.advantages import Credit
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.apps.demo.lessons import Lessons
from TrainingFactory.data.packing import make_batch
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.envs.builtin.splits import in_split
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.models.words import NAMES, PLACES
from TrainingFactory.protocols import Episode
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.tools import tool
from TrainingFactory.types import Message, Reward, SamplingParams, Task, ToolCall, Trajectory, Weights

LOOKUPS, STEP_REWARD, OUTCOME = 4, 0.5, 1.0
STOP, REPEAT = 0.25, 0.25  # how often a turn of a demonstration, after the first, goes wrong in either way
# Every demonstration is a novice's: habits to break are then equally frequent at all turns.
WARM = Lessons(
    num_drills=2400, num_short_rows=1440, num_dialogues=3360, num_demonstrations=1200, novice_share=1.0
)
TASKS, MEMBERS = 2, 8  # of a step
RATE, WARMUP = 1.5e-4, 4
MAX_TOKENS, MAX_TURNS, MAX_LENGTH = 24, LOOKUPS + 4, 640
WINDOW, LEVEL = 8, 0.8
ARMS: tuple[Credit, Credit] = ("turn", "trajectory")
DRAWS = 10_000  # of the bootstrap


class Chain(ToolEnvironment):
    """Anna -> Boris -> Chen -> Dora -> Oslo: who or what comes next is known from the last reply only."""

    system_prompt = "Look up, then answer."

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        rng, made = random.Random(f"chain {seed}"), 0
        for number in endlessly():
            if made == count:
                return
            keys, place = rng.sample(NAMES, LOOKUPS), rng.choice(PLACES)
            if in_split(" ".join([*keys, place]), split):
                made += 1
                yield Task(f"chain-{seed}-{number}", f"{keys[0]}?", place, {"keys": keys})

    @property
    def keys(self) -> list[str]:
        return self.task.metadata["keys"]

    @tool
    async def lookup(self, name: str) -> str:
        """What comes next."""
        links = dict(zip(self.keys, [*self.keys[1:], str(self.task.answer)], strict=True))
        return links.get(name, "unknown")

    async def reward(self, episode: Episode) -> Reward:  # pyright: ignore[reportIncompatibleMethodOverride]
        steps, found = [], 0
        for turn in episode.trajectory.turns:
            asked = [call.arguments.get("name") for call in turn.message.tool_calls]
            right = found < LOOKUPS and asked == [self.keys[found]]
            found += right
            steps.append(STEP_REWARD * (1 if right else -1 if asked else 0))
        return Reward(OUTCOME * (episode.trajectory.answer.strip() == self.task.answer), steps)

    def expert(self) -> Iterator[Message]:
        yield from map(_lookup, self.keys)
        yield Message("assistant", str(self.task.answer))

    def novice(self, rng: random.Random) -> Iterator[Message]:
        """After any turn, now and then: a guess that ends it, or the same lookup again, after which it goes on."""
        last = None
        for message in self.expert():
            slip = rng.random() if last is not None else 1.0
            if slip < STOP:
                yield Message("assistant", rng.choice(PLACES))
                return
            if last is not None and slip < STOP + REPEAT:
                yield last
            yield message
            last = message


def _lookup(name: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall("lookup", {"name": name})])


@dataclass(slots=True)
class Run:
    """One seed of one arm: shares of right answers and mean whole rewards, step by step."""

    credit: Credit
    seed: int
    success: list[float]
    reward: list[float]
    seconds: float

    @property
    def smooth(self) -> list[float]:
        """Success over the last WINDOW steps, from the first step that has so many."""
        return np.convolve(self.success, np.ones(WINDOW) / WINDOW, "valid").round(4).tolist()

    @property
    def reached(self) -> int | None:
        return next((n for n, share in enumerate(self.smooth, WINDOW) if share >= LEVEL), None)

    @property
    def steps(self) -> int:
        return self.reached or len(self.success)


def train(folder: Path, credit: Credit, seed: int, steps: int) -> Run:
    started = time.perf_counter()
    loaded = load_model(str(folder), device="cpu")
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    engine = NativeEngine(loaded.model, slots=TASKS * MEMBERS, max_length=MAX_LENGTH, deterministic=True)
    learner = Learner(loaded.model, OptimizerOptions(learning_rate=RATE, warmup_steps=WARMUP))
    grpo = GRPO(credit=credit)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    rollouts = RolloutEngine(Chain, chat, params, max_turns=MAX_TURNS, seed=seed)
    tasks = list(Chain.tasks("train", seed, TASKS * steps))
    run = Run(credit, seed, [], [], 0.0)
    for step in range(steps):
        loaded.model.eval()
        chosen = tasks[step * TASKS : (step + 1) * TASKS]
        asyncio.run(engine.update(Weights(step)))
        groups = rollouts.rollout(chosen, engine, MEMBERS, step)
        note(run, [episode for group in groups for episode in group])
        rows = [row for group in groups for row in grpo.samples(group)]
        if rows:
            learner.update(make_batch(rows), grpo.loss)
    run.seconds = round(time.perf_counter() - started, 1)
    return run


def note(run: Run, episodes: Sequence[Trajectory]) -> None:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    assert len(rewards) == len(episodes), "an episode was not scored"
    run.success.append(sum(reward.outcome > 0 for reward in rewards) / len(rewards))
    run.reward.append(round(sum(r.outcome + sum(r.steps) for r in rewards) / len(rewards), 4))


def all_runs(folder: Path, seeds: int, steps: int, workers: int) -> list[Run]:
    """Every seed of both arms, each in a process with one thread."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        jobs = [pool.submit(train, folder, arm, seed, steps) for seed in range(seeds) for arm in ARMS]
        for job in as_completed(jobs):
            run = job.result()
            end = f"reached at step {run.reached}" if run.reached else "not reached"
            print(f"seed {run.seed} {run.credit:10} {run.seconds:5.0f} s  {LEVEL} {end}", flush=True)
        return [job.result() for job in jobs]


def bootstrap(turn: np.ndarray, trajectory: np.ndarray) -> tuple[float, float]:
    """90 % interval of the ratio of medians."""
    chosen = np.random.default_rng(0).integers(len(turn), size=(DRAWS, len(turn)))
    ratios = np.median(trajectory[chosen], 1) / np.median(turn[chosen], 1)
    low, high = np.quantile(ratios, (0.05, 0.95))
    return float(low), float(high)


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    arms = {arm: sorted((run for run in runs if run.credit == arm), key=lambda run: run.seed) for arm in ARMS}
    reached = {arm: np.array([run.steps for run in found]) for arm, found in arms.items()}
    lower, upper = bootstrap(reached["turn"], reached["trajectory"])
    medians = {arm: float(np.median(found)) for arm, found in reached.items()}
    return {
        "ratio": round(medians["trajectory"] / medians["turn"], 4),
        "lower": round(lower, 4),
        "upper": round(upper, 4),
        "goal": 1,
        "helps": lower > 1,
        "level": LEVEL,
        "window": WINDOW,
        "median_steps": medians,
        "steps": {arm: found.tolist() for arm, found in reached.items()},
        "censored": {arm: [run.seed for run in found if run.reached is None] for arm, found in arms.items()},
        "mean_curve": {arm: _mean([run.smooth for run in found]) for arm, found in arms.items()},
        "success": {arm: [run.success for run in found] for arm, found in arms.items()},
        "reward": {arm: [run.reward for run in found] for arm, found in arms.items()},
        "seconds": {arm: [run.seconds for run in found] for arm, found in arms.items()},
    }


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return np.mean(curves, 0).round(4).tolist()


def show(result: dict[str, Any]) -> None:
    curves = result["mean_curve"]
    print(f"\nmean success over {WINDOW} steps\nstep        turn  trajectory")
    for number in range(0, len(curves["turn"]), WINDOW):
        turn, trajectory = (curves[arm][number] for arm in ARMS)
        bars = "".join("t" if n == round(40 * turn) else "." if n == round(40 * trajectory) else " "
                       for n in range(41))  # fmt: skip
        print(f"{number + WINDOW:4}  {turn:10.3f}  {trajectory:10.3f}  |{bars}|")
    print(f"\nsteps to {LEVEL}, seed by seed (censored: {result['censored']})")
    for arm in ARMS:
        print(f"{arm:10}  median {result['median_steps'][arm]:5.1f}  {result['steps'][arm]}")
    verdict = "credit by turn helps" if result["helps"] else "NO gain of credit by turn is shown"
    print(f"ratio {result['ratio']}, 90 % interval {result['lower']} to {result['upper']}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=16, help="with 8 the interval is too wide to tell")
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args()
    for name, least in (("seeds", 1), ("steps", WINDOW), ("workers", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}; it must be {least} or more")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    torch.set_num_threads(1)  # matrices this small are not worth a second one
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        # The model that all runs start from can do all of it, and does it wrong as often as it was shown.
        shown = list(
            Chain.tasks("heldout", 0, WARM.num_demonstrations)
        )  # training has those of the other split
        model = warm_run(Chain, shown, WARM, name)
        warm = time.perf_counter() - started
        print(f"warm start: {warm:.0f} s", flush=True)
        runs = all_runs(model, args.seeds, args.steps, args.workers)
    result = summary(runs)
    show(result)
    result |= {"seeds": args.seeds, "max_steps": args.steps, "workers": args.workers}
    result |= {"warm_seconds": round(warm, 1), "all_seconds": round(time.perf_counter() - started, 1)}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
