"""Time and peak memory of one update: `python -m benchmarks.update` (GPU: `--device cuda --real`).

The built-in model on the shape of a GRPO step: 8 groups of 8 rows, 155 tokens that all rows begin with, about
20 that a group has in common, tails of about 60, of which two thirds were sampled. Contenders, in turn and
several times over:

  padded        rows padded to one length, plain transformers, logits of all tokens, AdamW
  rows          our learner, every row for itself (no padding in the layers, head on trained tokens)
  tree          our learner, common prefixes computed once
  tree_chunked  the same with the head in chunks of 512 tokens

`promised` is how many fewer tokens the tree has than its rows, `reached` how much of that factor is found in
the times of `tree` against `rows`. Memory is measured in a process for each contender, and for the head alone
against the number of trained tokens, in chunks and whole.

`--real` is a random Qwen3 of 0.6 B parameters in bfloat16 with 16 groups of 8, prompts of 768 and answers of
256 tokens; `padded` goes in micro-batches of 8 rows, because the logits of all would not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.memory import peak_mib
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning import logprobs as head
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.types import Sample

SIDES = ("padded", "rows", "tree", "tree_chunked")
HEAD_TOKENS, HEAD_VOCABULARY, HEAD_WIDTH = (1024, 2048, 4096, 8192), 8192, 128
Update = Callable[[], object]


def make_rows(real: bool, vocabulary: int) -> list[Sample]:
    rng = random.Random(0)
    groups, trunk, prompt = (16, 0, 768) if real else (8, 155, 20)
    head_ids = [rng.randrange(vocabulary) for _ in range(trunk)]
    rows = []
    for _ in range(groups):
        start = head_ids + [rng.randrange(vocabulary) for _ in range(prompt)]
        for _ in range(8):
            size = 256 if real else rng.randrange(45, 76)
            ids = start + [rng.randrange(vocabulary) for _ in range(size)]
            # a reply of a tool in the middle third
            sampled = [real or not size // 3 <= place < 2 * size // 3 for place in range(size)]
            mask = [False] * len(start) + sampled
            advantage = rng.choice((-1.0, 1.0))
            logprobs = [-7.0 if trained else 0.0 for trained in mask]
            zeros = [0.0] * len(ids)
            rows.append(Sample(ids, mask, logprobs, [advantage] * len(ids), zeros, [0] * len(ids)))
    return rows


def make_model(real: bool, device: str) -> Any:
    if not real:
        from TrainingFactory.models import load_model

        return load_model("builtin:tiny", device=device).model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from benchmarks.gpu_engine import REAL

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**REAL, eos_token_id=None, pad_token_id=0))
    return model.to(device=device, dtype=torch.bfloat16)


def padded_update(model: Any, rows: list[Sample], real: bool, checkpointing: bool) -> Update:
    """As one would write it without us; the clipped policy loss is GRPO's."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    device, size = model.device, max(len(row.token_ids) for row in rows)

    def table(values: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (size - len(row))] for row in values], dtype=dtype, device=device)

    ids = table([row.token_ids for row in rows], torch.long)
    seen = table([[1] * len(row.token_ids) for row in rows], torch.long)
    mask = table([row.loss_mask for row in rows], torch.float32)[:, 1:]
    sampled = table([row.logprobs for row in rows], torch.float32)[:, 1:]
    advantage = table([row.advantages for row in rows], torch.float32)[:, 1:]
    tokens, micro = mask.sum(), 8 if real else len(rows)
    even = bool(seen.all())  # then no mask is needed, and attention is faster

    def update() -> None:
        model.train()
        for first in range(0, len(rows), micro):
            part = slice(first, first + micro)
            logits = model(ids[part], attention_mask=None if even else seen[part], use_cache=False).logits
            logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[part, 1:, None])[..., 0]
            ratio = (logprobs - sampled[part]).exp()
            gain = torch.minimum(ratio * advantage[part], ratio.clamp(0.8, 1.28) * advantage[part])
            (-(gain * mask[part]).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def our_update(model: Any, rows: list[Sample], sharing: bool, chunk: int, budget: int, again: bool) -> Update:
    learner = Learner(model, OptimizerOptions(learning_rate=1e-6), gradient_checkpointing=again)
    assert learner.sharing

    def update() -> None:
        head.CHUNK_ELEMENTS = chunk
        learner.update(make_batch(rows, budget, sharing), GRPO().loss)  # packing is part of the update

    return update


def make_side(name: str, args: argparse.Namespace, rows: list[Sample], limit: int | None = None) -> Update:
    """A model of its own for each contender; `limit` takes the first rows only."""
    model, rows = make_model(args.real, args.device), rows[:limit]
    if name == "padded":
        return padded_update(model, rows, args.real, args.checkpointing)
    chunk = 512 * model.config.vocab_size if name == "tree_chunked" else WHOLE
    chunk = 2**24 if args.real else chunk
    return our_update(model, rows, name != "rows", chunk, args.token_budget, args.checkpointing)


WHOLE = head.CHUNK_ELEMENTS


def timed(update: Update, device: str) -> tuple[float, float]:
    """Seconds by the clock, and of the processor: what else the machine does counts in the first only."""
    started, used = time.perf_counter(), time.process_time()
    update()
    if device == "cuda":
        torch.cuda.synchronize()
    return round(time.perf_counter() - started, 4), round(time.process_time() - used, 4)


def worker(name: str, args: argparse.Namespace) -> float:
    """One measurement of memory, in this process. `head:chunked:N` is the head alone over N tokens."""
    if not name.startswith("head"):
        rows = make_rows(args.real, 900)
        side = make_side(name, args, rows)
        side()  # the optimiser's state and torch's own buffers are there before and after
        return peak_mib(side, torch.device(args.device))
    _, how, count = name.split(":")
    head.CHUNK_ELEMENTS = 2**22 if how == "chunked" else 2**62
    layer = torch.nn.Linear(HEAD_WIDTH, HEAD_VOCABULARY, bias=False, device=args.device)

    def work(tokens: int = int(count)) -> None:
        states = torch.randn(tokens, HEAD_WIDTH, device=args.device, requires_grad=True)
        every = torch.arange(tokens, device=args.device)
        head.compute_token_logprobs(states, layer, every, every % 997, HEAD_VOCABULARY)[0].sum().backward()

    work(64)
    return peak_mib(work, torch.device(args.device))


def in_a_process(name: str, args: argparse.Namespace) -> float:
    command = [sys.executable, "-m", "benchmarks.update", "--worker", name, "--device", args.device]
    # glibc keeps freed blocks of some MiB for later, which would count; mapped ones go back at once.
    settings = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    if done.returncode:
        raise RuntimeError(f"measuring {name} failed: {done.stderr[-800:]}")
    return round(float(done.stdout.splitlines()[-1]), 1)


def measure_times(
    args: argparse.Namespace, rows: list[Sample], sides: tuple[str, ...]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and processor seconds of each contender."""
    updates = {name: make_side(name, args, rows) for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    used: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.repeats + 1):
        for name, update in updates.items():
            found = timed(update, args.device)
            if number:  # the first warms up
                seconds[name].append(found[0])
                used[name].append(found[1])
    return seconds, used


def measure_memory(args: argparse.Namespace, rows: list[Sample], sides: tuple[str, ...]) -> dict[str, Any]:
    heads = {
        how: {str(count): in_a_process(f"head:{how}:{count}", args) for count in HEAD_TOKENS}
        for how in ("chunked", "whole")
    }
    if args.device == "cpu":
        return {"update_mib": {name: in_a_process(name, args) for name in sides}, "head_mib": heads}
    found = {}
    for name in sides:
        update = make_side(name, args, rows)
        update()
        found[name] = round(peak_mib(update, torch.device(args.device)), 1)
        del update
        torch.cuda.empty_cache()
    return {"update_mib": found, "head_mib": heads}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--real", action="store_true", help="a 0.6 B model and long rows, for a GPU")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing for all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--token-budget", type=int, default=65_536)
    parser.add_argument("--threads", type=int, help="threads of torch; its own default if not given")
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.worker:
        print(worker(args.worker, args))
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = make_rows(args.real, 900)
    batch = make_batch(rows, args.token_budget)
    row_tokens, tree_tokens = (
        sum(pack.row_tokens for pack in batch.packs), sum(len(pack.token_ids) for pack in batch.packs)
    )  # fmt: skip
    sides = ("padded", "rows", "tree") if args.real else SIDES
    raw, used = measure_times(args, rows, sides)
    middle = {name: statistics.median(seconds) for name, seconds in raw.items()}
    promised, gained = row_tokens / tree_tokens, middle["rows"] / middle["tree"]
    memory = {} if args.no_memory else measure_memory(args, rows, sides)
    for name in sides:
        mib = f", {memory['update_mib'][name]:.0f} MiB" if memory else ""
        print(f"{name:13} {middle[name]:.3f} s, {row_tokens / middle[name]:9.0f} row tokens/s{mib}")
    print(f"the tree promises {promised:.2f}, gives {gained:.2f}: {gained / promised:.0%} of it")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(), "checkpointing": args.checkpointing, "rows": len(rows),
        "row_tokens": row_tokens, "tree_tokens": tree_tokens, "trained_tokens": batch.num_tokens,
        "seconds": raw, "median": middle,
        "tokens_per_second": {name: row_tokens / seconds for name, seconds in middle.items()},
        "promised": promised, "gained": gained, "reached": gained / promised,
        "processor_seconds": used,
        "reached_by_processor_time": min(used["rows"]) / min(used["tree"]) / promised,
        "reached_by_fastest": min(raw["rows"]) / min(raw["tree"]) / promised, "goal": 0.75,
        "speedup_over_padded": middle["padded"] / middle["tree"], **memory,
    }  # fmt: skip
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
