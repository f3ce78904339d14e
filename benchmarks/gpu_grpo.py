"""GRPO steps of a real size on a GPU: `python -m benchmarks.gpu_grpo` (on a CPU: `--device cpu --small`).

A Qwen3 of 0.6 B parameters with random weights in bfloat16 (full vocabulary, the built-in tokenizer). It learns
to write calculator calls from demonstrations, some of them wrong, for some steps of SFT. Then come GRPO steps,
8 groups of 8 and 32 groups of 8 episodes, temperature 1, by the code that `tfactory demo` and `train` run: seconds
of generation and update, and the peak of allocated memory (weights, master weights and AdamW's state included).
Every batch is generated twice from the same weights, with guesses and without, in turn. `update` leaves out
groups that all earned the same, `update_all_rows` has all rows, those with an advantage of zero.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu_engine import REAL, SMALL
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.envs import CalculatorEnvironment
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import chat_format
from TrainingFactory.models.tiny import tiny_tokenizer
from TrainingFactory.protocols import ChatFormat
from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.services.demo.lessons import demonstrate
from TrainingFactory.types import SamplingParams, Trajectory, Weights

MEMBERS = 8


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def warm_up(model: Any, chat: ChatFormat, steps: int) -> float:
    """SFT on demonstrations; the last loss per token."""
    rng = random.Random(0)
    tasks = list(CalculatorEnvironment.tasks("train", 0, 32 * steps))
    shown = demonstrate(CalculatorEnvironment, chat, tasks, 0.4, rng)
    options = OptimizerOptions(learning_rate=3e-4, schedule="linear", warmup_steps=10, total_steps=steps)
    learner, algorithm, figures = Learner(model, options), SFT(), {}
    for step in range(steps):
        rows = [row for episode in shown[32 * step : 32 * step + 32] for row in to_samples(episode)]
        figures = learner.update(make_batch(rows, sharing=learner.sharing), algorithm.loss)
    return figures["loss"]


def sampled_tokens(groups: list[list[Trajectory]]) -> int:
    return sum(len(turn.completion.token_ids) for group in groups for e in group for turn in e.turns)


def grpo_steps(model: Any, chat: ChatFormat, groups: int, steps: int) -> dict[str, Any]:
    device = model.device
    tasks = list(CalculatorEnvironment.tasks("train", 1, groups * (steps + 1)))
    engines = {
        name: NativeEngine(model, slots=groups * MEMBERS, max_length=1024, guesses=guesses)
        for name, guesses in (("plain", 0), ("guessing", 7))
    }
    learner = Learner(model, OptimizerOptions(learning_rate=1e-5))
    algorithm = GRPO()
    rollouts = AsyncRolloutEngine(CalculatorEnvironment, chat, SamplingParams(max_tokens=64), max_turns=4)
    raw: list[dict[str, float]] = []
    for number in range(steps + 1):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        chosen = tasks[number * groups : (number + 1) * groups]
        row: dict[str, float] = {}
        played: list[list[Trajectory]] = []
        model.eval()
        for name, engine in engines.items():
            asyncio.run(engine.update(Weights(number)))
            forwards, started = engine.stats.forwards, now(device)
            played = rollouts.rollout(chosen, engine, MEMBERS, step=number)
            row[f"{name}_s"] = now(device) - started
            row[f"{name}_forwards"] = engine.stats.forwards - forwards
            row[f"{name}_tokens_per_second"] = sampled_tokens(played) / row[f"{name}_s"]
        started = now(device)
        rows = [sample for group in played for sample in algorithm.samples(group)]
        learner.update(make_batch(rows, sharing=learner.sharing), algorithm.loss)
        row |= {"update_s": now(device) - started, "rows": len(rows), "sampled": sampled_tokens(played)}
        every = [sample for group in played for episode in group for sample in to_samples(episode)]
        started = now(device)
        learner.update(make_batch(every, sharing=learner.sharing), algorithm.loss)
        row |= {"update_all_rows_s": now(device) - started, "all_rows": len(every)}
        row["reward"] = statistics.fmean(e.reward.outcome for group in played for e in group if e.reward)
        if device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if number:  # the first warms up
            raw.append(row)
    median = {key: statistics.median(row[key] for row in raw) for key in raw[0]}
    print(
        f"{groups * MEMBERS} episodes: {json.dumps({key: round(value, 3) for key, value in median.items()})}"
    )
    return {"episodes": groups * MEMBERS, "median": median, "steps": raw}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try it out")
    parser.add_argument("--warm", type=int, default=400, help="steps of SFT before")
    parser.add_argument("--steps", type=int, default=4, help="steps that count")
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 32])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    shape = SMALL | {"vocab_size": 1200} if arguments.small else REAL
    stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=stops, pad_token_id=stops[1]))
    model.to(device=arguments.device, dtype=torch.bfloat16 if arguments.device != "cpu" else torch.float32)
    chat = chat_format(tokenizer, stop_ids=stops)
    started = now(model.device)
    loss = warm_up(model, chat, arguments.warm)
    seconds = now(model.device) - started
    print(f"warm start: {arguments.warm} steps of SFT in {seconds:.0f} s, loss {loss:.2f}")
    result: dict[str, Any] = {"torch": torch.__version__, "parameters": model.num_parameters()}
    result["device"] = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    result["runs"] = [grpo_steps(model, chat, groups, arguments.steps) for groups in arguments.groups]
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
