"""The native engine on a GPU: `python -m benchmarks.gpu_engine` (on a CPU: `--device cpu --small`).

A random Qwen3 of 0.6 B parameters in bfloat16, 32 groups of equal 256-token prompts, 128 new tokens for each
of 64 and of 256 rows, beside transformers `generate` on the same prompts. Then, for some of the rows, how far
the engine's log-probs are from a plain forward of the row in bfloat16, and beside it how far that forward is
from one in float32: what rounding alone makes of it. Last, a Llama of 135 M parameters: 1,024 sessions of 4 turns
of 30 to 60 tokens in groups of 16 that begin with the same 220 tokens, with 14 tokens of reply after each turn.

Imports nothing but torch, transformers and the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Completion, SamplingParams, Weights

REAL: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
SMALL: dict[str, Any] = REAL | {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocab_size": 49156, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}  # fmt: skip
GROUPS, CHECKED = 32, 16
TURNS, SIBLINGS, START, REPLY = 4, 16, 220, 14


def make_prompts(rows: int, length: int, vocabulary: int) -> list[list[int]]:
    rng = random.Random(rows)
    groups = [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(min(GROUPS, rows))]
    return [groups[row * len(groups) // rows] for row in range(rows)]


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def engine_run(engine: NativeEngine, prompts: list[list[int]], new: int, repeat: int = 0) -> list[Completion]:
    async def everything() -> list[Completion]:
        runs = [
            engine.sample(prompt, SamplingParams(max_tokens=new, seed=row + repeat * len(prompts)))
            for row, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*runs)

    return asyncio.run(everything())


def generate_run(model: Any, prompts: list[list[int]], new: int) -> None:
    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        rows = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new,
            min_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
    assert rows.shape[1] == ids.shape[1] + new


@torch.inference_mode()
def row_logprobs(model: Any, prompt: list[int], completion: Completion) -> torch.Tensor:
    """One row, no cache, logits in float32 as the learner has them: [new]."""
    ids = torch.tensor([prompt + completion.token_ids], device=model.device)
    new = len(completion.token_ids)
    states = model.base_model(ids, use_cache=False).last_hidden_state[0, -new - 1 : -1]
    logits = states.float() @ model.get_output_embeddings().weight.float().T
    return torch.log_softmax(logits, -1).gather(1, ids[0, -new:, None])[:, 0].cpu()


def differences(model: Any, prompts: list[list[int]], completions: list[Completion]) -> dict[str, Any]:
    """Mean and largest absolute difference of log-probs, over some of the rows."""
    exact = copy.deepcopy(model).float()
    pairs = list(zip(prompts, completions, strict=True))[:: max(1, len(prompts) // CHECKED)]
    ours = torch.cat([torch.tensor(completion.logprobs) for _, completion in pairs])
    plain = torch.cat([row_logprobs(model, *pair) for pair in pairs])
    float32 = torch.cat([row_logprobs(exact, *pair) for pair in pairs])

    def off(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
        return {"mean": (a - b).abs().mean().item(), "max": (a - b).abs().max().item()}

    return {
        "tokens": len(ours),
        "engine_to_row": off(ours, plain),
        "engine_to_float32_row": off(ours, float32),
        "row_to_float32_row": off(plain, float32),
    }


def measure(model: Any, rows: int, length: int, new: int, repeats: int, alone: bool) -> dict[str, Any]:
    device = model.device
    prompts = make_prompts(rows, length, model.config.vocab_size)
    engine = NativeEngine(model, slots=rows, max_length=length + new)
    result: dict[str, Any] = {"rows": rows, "prompt": length, "new": new, "engine_s": [], "generate_s": []}
    completions: list[Completion] = []
    for repeat in range(repeats + 1):
        asyncio.run(engine.update(Weights(repeat)))  # nothing is kept from the repeat before
        before = copy.copy(engine.stats)
        seconds, completions = timed(partial(engine_run, engine, prompts, new, repeat), device)
        slow = 0.0 if alone else timed(lambda: generate_run(model, prompts, new), device)[0]
        if repeat:  # the first warms up
            result["engine_s"].append(seconds)
            result["generate_s"].append(slow)
            result["prefilled"] = engine.stats.prefilled_tokens - before.prefilled_tokens
            result["forwards"] = engine.stats.forwards - before.forwards
    for name in ("engine",) if alone else ("engine", "generate"):
        result[f"{name}_tokens_per_second"] = rows * new / min(result[f"{name}_s"])
        print(f"{rows} rows: {name} {result[f'{name}_tokens_per_second']:.0f} tokens/s")
    result["logprob_difference"] = differences(model, prompts, completions)
    print(f"{rows} rows: {json.dumps(result['logprob_difference'])}")
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


async def episode(engine: NativeEngine, prompt: list[int], rng: random.Random) -> int:
    session, sampled = engine.session(), 0
    for _ in range(TURNS):
        params = SamplingParams(max_tokens=rng.randint(30, 60), seed=rng.randrange(1 << 30))
        completion = await session.sample(prompt, params)
        sampled += len(completion.token_ids)
        prompt = prompt + completion.token_ids + [rng.randrange(400) for _ in range(REPLY)]
    session.close()
    return sampled


def measure_turns(model: Any, sessions: int, repeats: int) -> dict[str, Any]:
    """Many sessions of several turns."""

    async def everything(engine: NativeEngine) -> int:
        groups = [random.Random(group) for group in range(-(-sessions // SIBLINGS))]
        prompts = [[rng.randrange(400) for _ in range(START)] for rng in groups]
        runs = [
            episode(engine, list(prompts[n // SIBLINGS]), random.Random(f"{sessions} {n}"))
            for n in range(sessions)
        ]
        return sum(await asyncio.gather(*runs))

    engine = NativeEngine(model, slots=sessions, max_length=1024)
    result: dict[str, Any] = {"sessions": sessions, "turns": TURNS, "tokens_per_second": [], "recorded": []}
    for repeat in range(repeats + 1):
        asyncio.run(engine.update(Weights(repeat)))
        graphs: Any = engine._runner._graphs
        before = (graphs.recorded, graphs.seconds) if graphs else (0, 0.0)
        seconds, sampled = timed(lambda: asyncio.run(everything(engine)), model.device)
        recorded = [graphs.recorded - before[0], graphs.seconds - before[1]] if graphs else before
        result["recorded"].append(recorded)
        if repeat:  # the first warms up
            result["tokens_per_second"].append(sampled / seconds)
    speeds = ", ".join(f"{speed:.0f}" for speed in result["tokens_per_second"])
    graphs = ", ".join(f"{count} in {seconds:.2f} s" for count, seconds in result["recorded"])
    print(
        f"{sessions} sessions of {TURNS} turns: {speeds} tokens/s; graphs recorded, warm-up first: {graphs}"
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try it out")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--alone", action="store_true", help="without transformers' generate")
    parser.add_argument("--sessions", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3Config(**(SMALL if arguments.small else REAL), eos_token_id=None, pad_token_id=0)
    model: Any = Qwen3ForCausalLM(config)
    model.to(device=arguments.device, dtype=torch.bfloat16).eval()
    result: dict[str, Any] = {"torch": torch.__version__, "parameters": model.num_parameters(), "runs": []}
    result["device"] = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    for rows in arguments.rows:
        result["runs"].append(
            measure(model, rows, arguments.prompt, arguments.new, arguments.repeats, arguments.alone)
        )
    del model
    sizes = LLAMA | (SMALL if arguments.small else {})
    talker: Any = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0))
    talker.to(device=arguments.device, dtype=torch.bfloat16).eval()
    result["sessions"] = [measure_turns(talker, count, arguments.repeats) for count in arguments.sessions]
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
