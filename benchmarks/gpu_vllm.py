"""vLLM beside the native engine on a GPU: `python -m benchmarks.gpu_vllm` (on a CPU: `--device cpu --small`).

A random Qwen3 of 0.6 B parameters in bfloat16. vLLM runs in a process of its own, as it does for a run with
`sampling.engine: vllm`: started with no weights, given those of a learner, then those after a change. Measured: seconds
of the start and of each push, how far its log-probs of sampled turns are from the learner's (and the native engine's
beside it), the canary's, tokens per second at 64 and 256 rows of 256 + 128 tokens, beside the native engine on the same
prompts, each twice, the better one counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu_engine import REAL, SMALL, make_prompts, row_logprobs
from TrainingFactory.cluster.local import LocalEngineLauncher
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.publishing import Publisher
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Completion, EngineSpec, SamplingParams, Weights

PROMPT, NEW, CHECKED = 256, 128, 16
Sample = Callable[[list[int], SamplingParams], Awaitable[Completion]]


async def rate(
    sample: Sample, rows: int, vocabulary: int
) -> tuple[float, list[tuple[list[int], Completion]]]:
    """Sample all rows at once, twice; return the better tokens per second and the turns."""
    prompts, best, turns = make_prompts(rows, PROMPT, vocabulary), 0.0, list[Completion]()
    for again in range(2):
        started = time.perf_counter()
        asked = (
            sample(p, SamplingParams(max_tokens=NEW, seed=1000 * again + n)) for n, p in enumerate(prompts)
        )
        turns = await asyncio.gather(*asked)
        best = max(best, sum(len(turn.token_ids) for turn in turns) / (time.perf_counter() - started))
    return best, list(zip(prompts, turns, strict=True))


def gaps(model: Any, turns: list[tuple[list[int], Completion]]) -> dict[str, float]:
    """Return how far the log-probs of some turns are from a plain forward of the learner's model."""
    found = [
        (row_logprobs(model, prompt, turn).cpu() - torch.tensor(turn.logprobs)).abs()
        for prompt, turn in turns[:CHECKED]
    ]
    every = torch.cat(found)
    return {"mean": float(every.mean()), "max": float(every.max())}


async def measure(model: Any, options: dict[str, Any], device: str) -> dict[str, Any]:
    learner = Learner(model, OptimizerOptions(learning_rate=1e-5))
    publisher, vocabulary = Publisher(learner), model.config.vocab_size
    spec = EngineSpec("vllm", publisher.model_folder, 1024, slots=256, device=device, options=options)
    places, found = LocalEngineLauncher(spec, start_timeout=600.0, notify=print), dict[str, Any]()
    started = time.perf_counter()
    place = await places.launch_engine(0)
    found["start_s"] = time.perf_counter() - started

    async def push(version: int) -> dict[str, float]:
        started = time.perf_counter()
        weights = publisher.publish(version)
        written = time.perf_counter()
        await place.call("load", weights)
        loaded = time.perf_counter()
        told = torch.tensor(await place.call("score", list(weights.canary[0])))
        gap = float((told - torch.tensor(weights.canary[1])).abs().mean())
        return {"write_s": written - started, "load_s": loaded - written, "canary_gap": gap}

    async def ask(prompt: list[int], params: SamplingParams) -> Completion:
        return await place.call("sample", prompt, params, -1)

    try:
        found["first_push"] = await push(1)
        model.eval()
        found["vllm_logprobs"] = gaps(model, (await rate(ask, 64, vocabulary))[1])
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.01)
        found["second_push"] = await push(2)
        found["vllm_logprobs_after"] = gaps(model, (await rate(ask, 64, vocabulary))[1])
        found["vllm_tokens_per_second"] = {n: (await rate(ask, n, vocabulary))[0] for n in (64, 256)}
    finally:
        await place.close()
        await places.close()
        publisher.close()
    for rows in (64, 256):
        engine = NativeEngine(model, slots=rows, max_length=1024)
        await engine.update(Weights(2))
        speed, turns = await rate(engine.sample, rows, vocabulary)
        found.setdefault("native_tokens_per_second", {})[rows] = speed
        found["native_logprobs"] = gaps(model, turns)
        await engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try it out")
    parser.add_argument("--options", type=json.loads, default={}, help="arguments of vLLM's engine, as JSON")
    given = parser.parse_args()
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**(SMALL | {"head_dim": 32} if given.small else REAL)))
    model.to(device=given.device, dtype=torch.bfloat16 if given.device != "cpu" else torch.float32)
    result = asyncio.run(measure(model, given.options, given.device))
    name = torch.cuda.get_device_name() if given.device != "cpu" else "cpu"
    print("RESULT " + json.dumps({"device": name, "torch": torch.__version__} | result))


if __name__ == "__main__":
    main()
