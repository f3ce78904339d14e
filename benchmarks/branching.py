"""Do forks find what a turn was worth with fewer sampled tokens? `python -m benchmarks.branching --jobs 16`

GRPO from the same warm start in three arms, on the environments of `benchmarks/branching_worlds.py`, whose only reward
is that of the end:

    plain    8 episodes of each task, compared with each other
    trees    4 episodes of each task, which fork after tool results into at most 10 leaves (`training.branching`)
    states   as plain, and turns in the same state compared with each other (`grpo.state_groups`)

A run's figure is the number of sampled tokens, and of tool calls, until the success in 64 episodes, in the mean of two
evaluations in a row, is 0.8. Tokens that leaves of a tree share count once. Runs that do not get there within
`--tokens` count with that number, and are named as censored.

The learning rate of each arm in each environment is the best of RATES, by the tokens of one run with TUNING_SEED, which
is not among the seeds of the comparison.

Every run is one line of the file `--out`; a run that is there is not made again. `--summary FILE ...` merges files,
prints the table, and writes docs/results/branching.json and the table of docs/algorithms/branching.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.branching_worlds import WORLDS, BenchmarkWorld, WordChat, vocabulary
from benchmarks.warm import warm_start
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.rollout import RolloutEngine, play
from TrainingFactory.rollout.branching import Branching
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Sample, SamplingParams, Trajectory, Weights

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "branching.json", ROOT / "docs" / "algorithms" / "branching.md"
ARMS = ("plain", "trees", "states")
TASKS, MEMBERS, ROOTS, LEAVES = 2, 8, 4, 10
RATES, TUNING_SEED, WARMUP = (3e-4, 7e-4, 1.5e-3), 1000, 4
MAX_TOKENS, MAX_TURNS, MAX_LENGTH, SLOTS = 8, 9, 256, 64
HELDOUT, EVAL_EVERY, LEVEL = 64, 4, 0.8
WARM_ROWS, WARM_STEPS, WARM_RATE = 400, 200, 6e-3
TOKENS = 40_000
DRAWS = 10_000  # of the bootstrap


RunName = tuple[str, str, int, float]  # environment, arm, seed, learning rate


@dataclass(slots=True)
class BranchingRun:
    """One run. Curves have one entry per evaluation."""

    world: str
    arm: str
    seed: int
    rate: float  # learning rate
    success: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # sampled so far
    calls: list[int] = field(default_factory=list)  # of tools so far
    steps: int = 0
    seconds: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.world}/{self.arm}/{self.seed}/{self.rate:g}"

    @property
    def reached(self) -> int | None:
        """The evaluation at which the level is reached."""
        pairs = zip(self.success, self.success[1:], strict=False)
        return next((n for n, pair in enumerate(pairs, 1) if sum(pair) / 2 >= LEVEL), None)

    def cost(self, measure: str) -> int:
        """Tokens or calls until the level; of all steps if it was not reached."""
        return getattr(self, measure)[-1 if self.reached is None else self.reached]


def small_model(words: int, end: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=words, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=24, max_position_embeddings=MAX_LENGTH, tie_word_embeddings=True,
        eos_token_id=end, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def warm_up(world: str, folder: Path, steps: int = WARM_STEPS) -> None:
    """Write the weights that all runs of an environment start from: they imitate its novice."""
    if (folder / f"{world}.pt").exists():
        return
    torch.set_num_threads(1)
    chat, environment = WordChat(vocabulary()), WORLDS[world]
    model = small_model(len(chat.words), chat.stop_ids[0])

    async def demonstrated() -> list[Sample]:
        rows, rng = [], random.Random(0)
        for task in environment.tasks("warm", 0, WARM_ROWS):
            instance: BenchmarkWorld = environment(task)
            rows += to_samples(await play(instance, chat, instance.novice(rng), max_turns=MAX_TURNS))
        return rows

    warm_start(model, asyncio.run(demonstrated()), steps, 16, WARM_RATE)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / f"{world}.pt")


def train(world: str, arm: str, seed: int, rate: float, max_tokens: int, folder: Path) -> BranchingRun:
    started = time.perf_counter()
    torch.set_num_threads(1)
    chat, environment = WordChat(vocabulary()), WORLDS[world]
    model = small_model(len(chat.words), chat.stop_ids[0])
    model.load_state_dict(torch.load(folder / f"{world}.pt", weights_only=True))
    engine = NativeEngine(model, slots=SLOTS, max_length=MAX_LENGTH)
    learner = Learner(model, OptimizerOptions(learning_rate=rate, warmup_steps=WARMUP))
    grpo = GRPO(advantage="rloo", state_groups=1.0 if arm == "states" else 0.0)
    forks = Branching(at="tool_result", continuations=2, max_forks=2, every=2, max_episodes=LEAVES)
    rollouts, heldout = (
        RolloutEngine(
            environment,
            chat,
            SamplingParams(max_tokens=MAX_TOKENS),
            max_turns=MAX_TURNS,
            seed=seed,
            branching=branching,
        )
        for branching in (forks if arm == "trees" else None, None)
    )
    tasks = iter(environment.tasks("train", seed, 10**6))
    exam = list(environment.tasks("heldout", 0, HELDOUT))
    run = BranchingRun(world, arm, seed, rate)
    tokens = calls = 0
    while True:
        model.eval()
        asyncio.run(engine.update(Weights(run.steps)))
        if run.steps % EVAL_EVERY == 0:
            run.success.append(success_of(heldout.rollout(exam, engine, 1, run.steps)))
            run.tokens.append(tokens)
            run.calls.append(calls)
            if run.reached is not None or tokens >= max_tokens:
                break
        chosen = [next(tasks) for _ in range(TASKS)]
        groups = rollouts.rollout(chosen, engine, ROOTS if arm == "trees" else MEMBERS, run.steps)
        turns = [turn for group in groups for episode in group for turn in episode.own_turns]
        tokens += sum(len(turn.completion.token_ids) for turn in turns)
        calls += sum(len(turn.tool_results) for turn in turns)
        if rows := [row for group in groups for row in grpo.samples(group)]:
            learner.update(make_batch(rows), grpo.loss)
        run.steps += 1
    run.seconds = round(time.perf_counter() - started, 1)
    return run


def success_of(groups: Sequence[Sequence[Trajectory]]) -> float:
    rewards = [episode.reward for group in groups for episode in group]
    assert all(reward is not None for reward in rewards), "an episode was not scored"
    return round(sum(reward.outcome for reward in rewards if reward is not None) / len(rewards), 4)


def read_runs(paths: Sequence[Path]) -> list[BranchingRun]:
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    runs = [BranchingRun(**json.loads(line)) for line in lines if line.strip()]
    return list({run.key: run for run in runs}.values())


def all_runs(names: Sequence[RunName], jobs: int, max_tokens: int, out: Path) -> None:
    """Make the runs that the file does not have, each in a process with one thread, and append them."""
    done = {run.key for run in read_runs([out])}
    missing = [name for name in names if BranchingRun(*name).key not in done]
    context = multiprocessing.get_context("spawn")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_suffix(".warm")
    with ProcessPoolExecutor(jobs, context) as pool, out.open("a", encoding="utf-8") as file:
        list(pool.map(warm_up, sorted({name[0] for name in missing}), repeat(folder)))
        submitted = [pool.submit(train, *name, max_tokens, folder) for name in missing]
        for job in as_completed(submitted):
            run = job.result()
            file.write(json.dumps(asdict(run)) + "\n")
            file.flush()
            end = "not reached" if run.reached is None else f"reached with {run.cost('tokens')} tokens"
            print(f"{run.key}: {run.seconds:.0f} s, {run.steps} steps, {LEVEL} {end}", flush=True)


def tuned_rates(runs: Sequence[BranchingRun]) -> dict[tuple[str, str], float]:
    """Return the rate of each environment and arm: fewest tokens with TUNING_SEED, then the highest last success."""
    tuning = [run for run in runs if run.seed == TUNING_SEED]
    tuning.sort(key=lambda run: (run.reached is None, run.cost("tokens"), -run.success[-1]), reverse=True)
    return {(run.world, run.arm): run.rate for run in tuning}


def interval(values: np.ndarray, compared: np.ndarray | None = None) -> list[float]:
    """The median, or the ratio of medians of `compared` to `values`, with its 95 % bootstrap interval by seeds."""
    drawn = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    figures = [np.median(values[index], -1) for index in (np.arange(len(values)), drawn)]
    if compared is not None:
        others = [np.median(compared[index], -1) for index in (np.arange(len(values)), drawn)]
        figures = [other / figure for other, figure in zip(others, figures, strict=True)]
    low, high = np.quantile(figures[1], (0.025, 0.975))
    return [round(float(figure), 3) for figure in (figures[0], low, high)]


def summary(runs: Sequence[BranchingRun]) -> dict[str, Any]:
    """For each environment and arm: median tokens and calls, and the ratios of the plain arm's, with intervals."""
    result: dict[str, Any] = {"level": LEVEL, "arms": {}}
    rates = tuned_rates(runs)
    runs = [run for run in runs if run.seed != TUNING_SEED and run.rate == rates[run.world, run.arm]]
    for world in WORLDS:
        by_arm = {arm: {r.seed: r for r in runs if (r.world, r.arm) == (world, arm)} for arm in ARMS}
        seeds = sorted(set.intersection(*(set(found) for found in by_arm.values())))
        if not seeds:
            continue
        for arm in ARMS:
            row: dict[str, Any] = {"seeds": len(seeds), "rate": rates[world, arm]}
            row["censored"] = [seed for seed in seeds if by_arm[arm][seed].reached is None]
            for measure in ("tokens", "calls"):
                costs, plain = (np.array([by_arm[a][s].cost(measure) for s in seeds]) for a in (arm, "plain"))
                row[measure] = interval(costs)
                row[f"{measure}_ratio"] = interval(costs, plain)
            row["start"] = round(float(np.mean([by_arm[arm][seed].success[0] for seed in seeds])), 3)
            row["seconds"] = round(float(np.median([by_arm[arm][seed].seconds for seed in seeds])), 1)
            result["arms"][f"{world}/{arm}"] = row
    return result


def table(result: dict[str, Any]) -> str:
    lines = [
        f"| environment | arm | learning rate | tokens to {result['level']:.0%} | plain / arm | calls | plain / arm "
        "| not reached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["arms"].items():
        cells = [
            f"{row['rate']:g}",
            f"{row['tokens'][0]:,.0f} ({row['tokens'][1]:,.0f} to {row['tokens'][2]:,.0f})",
            "{:.2f} ({:.2f} to {:.2f})".format(*row["tokens_ratio"]),
            f"{row['calls'][0]:,.0f} ({row['calls'][1]:,.0f} to {row['calls'][2]:,.0f})",
            "{:.2f} ({:.2f} to {:.2f})".format(*row["calls_ratio"]),
            f"{len(row['censored'])} of {row['seeds']}",
        ]
        lines.append(f"| {' | '.join([*name.split('/'), *cells])} |")
    return "\n".join(lines)


def write_page(result: dict[str, Any], page: Path = PAGE) -> None:
    """Replace the table between the page's marks."""
    text = page.read_text(encoding="utf-8")
    begin, end = "<!-- branching results -->", "<!-- end of branching results -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert pattern.search(text), f"{page} has no mark {begin}"
    page.write_text(pattern.sub(f"{begin}\n\n{table(result)}\n\n{end}", text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of one thread")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="sampled tokens after which a run ends")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="begin of the runs' names, such as chain/trees"
    )
    parser.add_argument("--out", type=Path, default=Path("branching.jsonl"), help="one line per run")
    parser.add_argument(
        "--summary", type=Path, nargs="+", metavar="FILE", help="merge files instead of running"
    )
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    if args.summary is None:
        arms = [(world, arm) for world in WORLDS for arm in ARMS]
        arms = [pair for pair in arms if "/".join(pair).startswith(tuple(args.only))]
        all_runs(
            [(*pair, TUNING_SEED, rate) for rate in RATES for pair in arms], args.jobs, args.tokens, args.out
        )
        rates = tuned_rates(read_runs([args.out]))
        chosen = [(*pair, seed, rates[pair]) for seed in range(args.seeds) for pair in arms]
        all_runs(chosen, args.jobs, args.tokens, args.out)
    result = summary(read_runs(args.summary or [args.out]))
    print(table(result))
    if args.summary is not None:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_page(result)


if __name__ == "__main__":
    main()
