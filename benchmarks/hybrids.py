"""A hybrid beside a model of about the same size with full attention: `python -m benchmarks.hybrids [--size 100m]`.

Random weights shaped like Qwen3.5 (three gated delta layers to one of attention) and like Qwen3. Both sample episodes
of two turns in groups with common prompts, and train on them once with all weights: in turn, several rounds in one run.
The figures are the medians: sampled tokens per second, and seconds of one update. `ratio` is the hybrid over the other.
The counters say how many tokens of prompts were computed, shared, and computed again for want of a state. `kernels`
names the packages that compute the recurrent layers; without one, it is torch.

`--rows N ...` samples a single turn of N rows instead, in groups of 8, and trains on the first of these numbers:
`python -m benchmarks.hybrids --device cuda --size 2b --rows 64 256 --prompt 256 --tokens 128` is what
`python -m benchmarks.vllm_alone --model qwen3_5` measures of vLLM.
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
from transformers import AutoConfig, AutoModelForCausalLM

from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models.recurrent import find_kernel_packages
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Sample, SamplingParams, Weights

# hidden size, layers, MLP width of the hybrid and of the other, heads, key heads, head size, delta heads, vocabulary
SIZES = {
    "tiny": (128, 4, 256, 256, 4, 2, 32, 4, 512),
    "100m": (640, 12, 1792, 2048, 10, 2, 64, 10, 32_000),
    "2b": (2048, 24, 6144, 7168, 8, 2, 256, 16, 151_936),
}
KINDS = ("qwen3_5_text", "qwen3")
GROUP = 8  # rows of `--rows` with the same prompt
TOKEN_BUDGET = 8192  # of a forward of the update


def shape(kind: str, size: str) -> dict[str, Any]:
    """Return the options of a config of this kind and size."""
    hidden, layers, hybrid_mlp, dense_mlp, heads, key_heads, head, delta_heads, vocabulary = SIZES[size]
    options: dict[str, Any] = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": head,
        "num_key_value_heads": key_heads, "vocab_size": vocabulary, "tie_word_embeddings": True,
        "intermediate_size": dense_mlp, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "qwen3_5_text":
        delta = min(128, hidden // delta_heads)
        options |= {
            "intermediate_size": hybrid_mlp, "linear_num_key_heads": delta_heads, "linear_key_head_dim": delta,
            "linear_num_value_heads": delta_heads, "linear_value_head_dim": delta,
        }  # fmt: skip
    return options


def build(kind: str, size: str, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(kind, **shape(kind, size))
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def episodes(engine: NativeEngine, args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Sample all episodes at once; return the tokens of each."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(args.prompt)] for _ in range(args.groups)]

    async def episode(number: int) -> list[int]:
        session, row = engine.session(), list(prompts[number // args.members])
        reply = random.Random(number)
        for turn in range(2):
            completion = await session.sample(
                row, SamplingParams(max_tokens=args.tokens, seed=2 * number + turn)
            )
            row = row + completion.token_ids
            row += [reply.randrange(3, vocabulary) for _ in range(16 * (1 - turn))]
        session.close()
        return row

    async def play() -> list[list[int]]:
        return await asyncio.gather(*(episode(number) for number in range(args.groups * args.members)))

    return asyncio.run(play())


def turns(engine: NativeEngine, args: argparse.Namespace, vocabulary: int, rows: int) -> list[list[int]]:
    """Sample one turn of each row at once; return the tokens of each."""
    rng = random.Random(engine.stats.sampled_tokens)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(args.prompt)] for _ in range(-(-rows // GROUP))]

    async def turn(number: int) -> list[int]:
        prompt = prompts[number // GROUP]
        completion = await engine.sample(
            prompt, SamplingParams(max_tokens=args.tokens, seed=rng.randrange(1 << 30))
        )
        return prompt + completion.token_ids

    async def play() -> list[list[int]]:
        return await asyncio.gather(*map(turn, range(rows)))

    return asyncio.run(play())


def training_rows(rows: list[list[int]], prompt: int) -> list[Sample]:
    samples = []
    for row in rows:
        mask = [place >= prompt for place in range(len(row))]
        values = [1.0 if trained else 0.0 for trained in mask]
        samples.append(Sample(row, mask, values, values, [0.0] * len(row), [0] * len(row)))
    return samples


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Contender:
    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.model, self.args = build(kind, args.size, args.device, dtype), args
        slots = max(args.rows) if args.rows else args.groups * args.members
        self.engine = NativeEngine(self.model, slots=slots, max_length=1024)
        self.learner = Learner(self.model, OptimizerOptions(learning_rate=1e-6))
        self.updates = list[float]()
        self.rates: dict[int, list[float]] = {}  # by rows; 0: episodes

    def sample(self, rows: int) -> list[list[int]]:
        """Sample episodes, or single turns of `rows` rows; return the tokens of each."""
        vocabulary = self.model.config.vocab_size
        self.model.eval()
        before, start = self.engine.stats.sampled_tokens, time.perf_counter()
        if rows:
            sampled = turns(self.engine, self.args, vocabulary, rows)
        else:
            sampled = episodes(self.engine, self.args, vocabulary)
        synchronize(self.args.device)
        rate = (self.engine.stats.sampled_tokens - before) / (time.perf_counter() - start)
        self.rates.setdefault(rows, []).append(rate)
        return sampled

    def round(self) -> None:
        sampled = [self.sample(rows) for rows in self.args.rows or [0]]
        self.train(sampled[0])

    def train(self, rows: list[list[int]]) -> None:
        batch = make_batch(
            training_rows(rows, self.args.prompt),
            TOKEN_BUDGET,
            sharing=self.learner.sharing,
            split_above=self.learner.split_above,
        )
        start = time.perf_counter()
        self.learner.update(batch, lambda trained: (-trained.logprobs.mean(), {}))
        synchronize(self.args.device)
        self.updates.append(time.perf_counter() - start)
        asyncio.run(self.engine.update(Weights(len(self.updates))))

    def result(self) -> dict[str, Any]:
        stats, runner = self.engine.stats, self.engine._runner
        rates = {rows: round(statistics.median(rates), 1) for rows, rates in self.rates.items()}
        graphs = runner._graphs
        return {
            "parameters_m": round(sum(weight.numel() for weight in self.model.parameters()) / 1e6, 1),
            "tokens_per_second": rates if self.args.rows else rates[0],
            "update_seconds": round(statistics.median(self.updates), 3),
            "shares_prefixes": self.learner.sharing,
            "prefilled": stats.prefilled_tokens, "shared": stats.shared_tokens, "recomputed": stats.recomputed_tokens,
            "state_kib_per_row": round(sum(shape.row_bytes for shape in runner.states.shapes) / 1024, 1),
            "kernels": find_kernel_packages(self.model), "attention_kernel": runner.tiled, "forwards": stats.forwards,
            "graph_steps": graphs.replayed if graphs else 0, "graph_failure": graphs.failure_reason if graphs else "",
        }  # fmt: skip


def ratios(hybrid: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    rates = hybrid["tokens_per_second"], other["tokens_per_second"]
    if isinstance(rates[0], dict):
        ratio: Any = {rows: round(rate / rates[1][rows], 3) for rows, rate in rates[0].items()}
    else:
        ratio = round(rates[0] / rates[1], 3)
    updates = round(hybrid["update_seconds"] / other["update_seconds"], 3)
    return {"tokens_per_second": ratio, "update_seconds": updates}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a hybrid beside full attention.")
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[], help="sample single turns of N rows, for each N"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    contenders = {kind: Contender(kind, args) for kind in args.kinds}
    for number in range(args.rounds + 1):
        for contender in contenders.values():
            contender.round()
            if not number:  # the first round warms up
                contender.rates.clear()
                contender.updates.clear()
    results: dict[str, Any] = {kind: contender.result() for kind, contender in contenders.items()}
    if len(results) == 2:
        results["ratio"] = ratios(*results.values())
    print(json.dumps(results | {"threads": torch.get_num_threads(), "size": args.size}, indent=1))


if __name__ == "__main__":
    main()
