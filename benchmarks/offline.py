"""SFT and DPO beside TRL's trainers: `python -m benchmarks.offline`.

The built-in model, a copy for each side, on the same rows, 16 a step:

  dpo        pairs with a prompt of 512 tokens and two answers of 64; both sides have computed the log-probs of the
             reference before the clock starts
  sft        dialogues of 1 to 6 turns of the assistant with replies in between, loss on the assistant's turns; they
             have nothing in common
  sft_tools  the same under one system prompt with tools, of 150 tokens

TRL is its DPOTrainer and its SFTTrainer over the same token ids, with AdamW, a constant learning rate, no logging and
no checkpoints; for sft both with padding and `padding_free`, of which the faster one counts. A step is everything from
rows to new weights, collating and packing included. The sides take turns, step by step: ours runs between two steps of
TRL's own loop. The first steps warm up and are not counted.

`ratio` is TRL's median step over ours; tokens are those of whole rows without padding. Peak memory is that of three
steps from a fresh model, in a process for each side.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.memory import peak_mib
from TrainingFactory.algorithms.dpo import DPO
from TrainingFactory.algorithms.preferences import pick_best_and_worst
from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.samples import to_samples
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.step import StepOptions, score_rows, train_step
from TrainingFactory.models import load_model
from TrainingFactory.types import Completion, Message, Reward, Task, Trajectory, Turn

RATE, BATCH, WARM = 1e-4, 16, 2
PROMPT, ANSWER, SYSTEM, VOCABULARY = 512, 64, 150, 900
CASES = {"dpo": ("trl",), "sft": ("padded", "padding_free"), "sft_tools": ("padded", "padding_free")}
GOALS = {"dpo": 2.0, "sft": 1.2}
Groups = list[list[Trajectory]]


def words(rng: random.Random, low: int, high: int | None = None) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high or low))]


def dialogue(prompt: list[int], turns: list[tuple[list[int], list[int]]], reward: float = 0.0) -> Trajectory:
    """Turns are what was sampled and what was replied."""
    record = []
    for sampled, reply in turns:
        completion = Completion(sampled, [0.0] * len(sampled), "stop")
        record.append(Turn(prompt, completion, Message("assistant")))
        prompt = prompt + sampled + reply
    return Trajectory(Task("t", "p"), "g", turns=record, reward=Reward(reward))


def make_groups(case: str, count: int) -> Groups:
    rng, groups = random.Random(0), []
    system = words(rng, SYSTEM) if case == "sft_tools" else []
    for _ in range(count):
        if case == "dpo":
            prompt = words(rng, PROMPT)
            groups.append([dialogue(prompt, [(words(rng, ANSWER), [])], reward) for reward in (1.0, 0.0)])
        else:
            turns = [(words(rng, 10, 60), words(rng, 10, 80)) for _ in range(rng.randint(1, 6))]
            groups.append([dialogue(system + words(rng, 10, 80), turns)])
    return groups


def row_tokens(groups: Groups) -> int:
    return sum(len(row.token_ids) for group in groups for each in group for row in to_samples(each))


def our_side(case: str, groups: Groups) -> Callable[[int], None]:
    """Step n takes the n-th batch of the groups."""
    model = load_model("builtin:tiny", device="cpu").model
    algorithm = DPO(reference="precomputed") if case == "dpo" else SFT()
    learner, options = Learner(model, OptimizerOptions(learning_rate=RATE)), StepOptions(16_384)
    references: list[list[list[float]]] = []
    if case == "dpo":
        references = [score_rows(learner, algorithm.samples(group), options) for group in groups]

    def step(number: int) -> None:
        chosen = groups[number * BATCH : (number + 1) * BATCH]
        rows = [algorithm.samples(group) for group in chosen]
        for group, known in zip(rows, references[number * BATCH :], strict=False):
            for row, logprobs in zip(group, known, strict=True):
                row.reference = logprobs
        train_step(learner, algorithm, [row for group in rows for row in group], number, options)

    return step


def trl_rows(case: str, groups: Groups) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        if case == "dpo":
            pair = pick_best_and_worst(group)
            assert pair is not None
            chosen, rejected = (side.turns[0] for side in pair)
            rows.append({
                "prompt_ids": chosen.prompt_ids, "chosen_ids": chosen.completion.token_ids,
                "rejected_ids": rejected.completion.token_ids,
            })  # fmt: skip
        else:
            (row,) = to_samples(group[0])
            labels = [
                token if used else -100 for token, used in zip(row.token_ids, row.loss_mask, strict=True)
            ]
            rows.append({"input_ids": row.token_ids, "labels": labels})
    return rows


def trl_trainer(case: str, how: str, groups: Groups, folder: str, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from transformers.utils import logging

    logging.set_verbosity_error()
    trl: Any = importlib.import_module("trl")
    loaded = load_model("builtin:tiny", device="cpu")
    common: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": BATCH, "max_steps": len(groups) // BATCH, "use_cpu": True,
        "bf16": False, "report_to": [], "learning_rate": RATE, "lr_scheduler_type": "constant", "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, "weight_decay": 0.0,
        "max_length": None, "train_sampling_strategy": "sequential", "optim": "adamw_torch",
        "dataloader_pin_memory": False,
    }  # fmt: skip

    class InTokens(trl.DPOTrainer):  # it would write texts in tokens itself
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    if case == "dpo":
        kind, args = InTokens, trl.DPOConfig(**common, beta=0.1, precompute_ref_log_probs=True)
    else:
        kind, args = trl.SFTTrainer, trl.SFTConfig(**common, padding_free=how == "padding_free")
    return kind(
        loaded.model, args=args, train_dataset=Dataset.from_list(trl_rows(case, groups)),
        processing_class=loaded.tokenizer, callbacks=callbacks,
    )  # fmt: skip


def side_by_side(case: str, how: str, steps: int) -> dict[str, list[float]]:
    """Seconds of the steps of both."""
    from transformers import TrainerCallback

    groups = make_groups(case, BATCH * (steps + WARM))
    ours = our_side(case, groups)
    found: dict[str, list[float]] = {"ours": [], "trl": []}

    class Clock(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = self.started or time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended = time.perf_counter()
            found["trl"].append(round(ended - self.started, 4))
            ours(len(found["ours"]))
            self.started = time.perf_counter()  # collating the next batch is part of the next step
            found["ours"].append(round(self.started - ended, 4))

    with tempfile.TemporaryDirectory() as folder:
        trl_trainer(case, how, groups, folder, [Clock()]).train()
    return {side: seconds[WARM:] for side, seconds in found.items()}


def worker(name: str) -> float:
    """Peak memory of a side, in this process."""
    case, how = name.split(":")
    groups = make_groups(case, BATCH * 3)
    if how == "ours":
        step = our_side(case, groups)
        return peak_mib(lambda: [step(number) for number in range(3)], torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_trainer(case, how, groups, folder, [])
        return peak_mib(trainer.train, torch.device("cpu"))


def memory(name: str) -> float:
    # glibc keeps freed blocks of some MiB for later, which would count; mapped ones go back at once.
    settings = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks.offline", "--worker", name]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    if done.returncode:
        raise RuntimeError(f"measuring {name} failed: {done.stderr[-800:]}")
    return round(float(done.stdout.splitlines()[-1]), 1)


def measure(case: str, steps: int, with_memory: bool) -> dict[str, Any]:
    tokens = row_tokens(make_groups(case, BATCH * (steps + WARM))[BATCH * WARM :]) / steps
    result: dict[str, Any] = {"tokens_per_step": tokens, "goal": GOALS.get(case), "runs": {}}
    for how in CASES[case]:
        seconds = side_by_side(case, how, steps)
        middle = {side: statistics.median(values) for side, values in seconds.items()}
        result["runs"][how] = {
            "seconds": seconds, "median": middle, "ratio": middle["trl"] / middle["ours"],
            "tokens_per_second": {side: tokens / value for side, value in middle.items()},
        }  # fmt: skip
    fastest = min(result["runs"].values(), key=lambda run: run["ratio"])
    result |= {name: fastest[name] for name in ("ratio", "tokens_per_second")}
    if with_memory:
        result["peak_mib"] = {how: memory(f"{case}:{how}") for how in ("ours", *CASES[case])}
    for how, run in result["runs"].items():
        ours, theirs = run["tokens_per_second"]["ours"], run["tokens_per_second"]["trl"]
        print(
            f"{case:9} ours {ours:7.0f} tokens/s, TRL ({how}) {theirs:7.0f}: {run['ratio']:.2f} times",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="steps that count, of each side")
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(worker(args.worker))
        return
    cases = [args.case] if args.case else list(CASES)
    result: dict[str, Any] = {case: measure(case, args.steps, not args.no_memory) for case in cases}
    print("RESULT " + json.dumps({"threads": torch.get_num_threads(), "batch": BATCH} | result))


if __name__ == "__main__":
    main()
