"""Long rows on one GPU: `python -m benchmarks.long_rows` (to try it: `--device cpu --sizes builtin:tiny --tokens 512`).

Qwen3's shapes with random weights in bfloat16 and a LoRA adapter of rank 16 on all linear layers. An update trains the
second half of one row, with the head in chunks: without gradient checkpointing (`plain`), with it (`checkpointed`), and
with the layers' inputs in CPU memory as well (`offloaded`). Each is measured in a process of its own: seconds of an
update, and the peak of allocated memory beside the estimate of `tfactory doctor`. One that does not fit is named so.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.gpu_shapes import random_model
from TrainingFactory.apps.plan.shapes import find_shape
from TrainingFactory.assembly.learner import make_algorithm, make_learner, make_trainable
from TrainingFactory.assembly.memory import estimate_learner_bytes
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.models import LoadedModel
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.types import Sample

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "offloaded": {"gradient_checkpointing": True, "activation_offload": True},
}


def config_of(kind: str, device: str, tokens: int) -> TrainingConfig:
    return TrainingConfig(
        model={"max_length": tokens, "device": device},
        training={"algorithm": "sft", "token_budget": tokens, **KINDS[kind]},
        lora={"enabled": True},
    )


def estimated_gib(size: str, config: TrainingConfig) -> float:
    """Return the doctor's estimate of the learner's memory for one row of `model.max_length` tokens."""
    shape, tokens = find_shape("", size), config.model.max_length
    parts = estimate_learner_bytes(
        config, shape, shape.count_held(config), make_algorithm(config).needs, 1, tokens
    )
    return sum(parts.values()) / 2**30


def measure(size: str, kind: str, device: str, tokens: int, steps: int) -> dict[str, Any]:
    config, shape = config_of(kind, device, tokens), find_shape("", size)
    algorithm = make_algorithm(config)
    result: dict[str, Any] = {"estimated_gib": estimated_gib(size, config)}
    loaded = LoadedModel(size, random_model(size, device, tokens), make_tiny_tokenizer())
    make_trainable(config, loaded)
    learner = make_learner(config, loaded, algorithm, steps)
    rng, zeros = random.Random(0), [0.0] * tokens
    ids = [rng.randrange(shape.vocab_size) for _ in range(tokens)]
    row = Sample(ids, [place >= tokens // 2 for place in range(tokens)], zeros, zeros, zeros, [0] * tokens)
    batch = make_batch([row], tokens, learner.sharing)
    seconds = []
    for _ in range(steps + 1):  # the first compiles
        started = time.perf_counter()
        metrics = learner.update(batch, algorithm.loss, algorithm.needs)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        assert not metrics["skipped"]
    result["update_s"] = min(seconds[1:])
    if device != "cpu":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="+", default=["1.7B", "4B"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--one", action="store_true", help="measure the first of them in this process")
    options = parser.parse_args()
    if options.one:
        size, kind = options.sizes[0], options.kinds[0]
        print("RESULT " + json.dumps(measure(size, kind, options.device, options.tokens, options.steps)))
        return
    print(f"{'size':>14} {'kind':>13} {'tokens':>7} {'estimated GiB':>14} {'peak GiB':>9} {'update s':>9}")
    for size in options.sizes:
        for kind in options.kinds:
            arguments = ["--one", "--sizes", size, "--kinds", kind, "--device", options.device]
            arguments += ["--tokens", str(options.tokens), "--steps", str(options.steps)]
            command = [sys.executable, "-m", "benchmarks.long_rows", *arguments]
            finished = subprocess.run(command, capture_output=True, text=True)
            line = f"{size:>14} {kind:>13} {options.tokens:>7}"
            if "RESULT " not in finished.stdout:
                reason = (
                    "does not fit" if "out of memory" in finished.stderr else finished.stderr.strip()[-300:]
                )
                print(f"{line} {reason}", flush=True)
                continue
            result = json.loads(finished.stdout.rpartition("RESULT ")[2])
            cells = (result.get(name) for name in ("estimated_gib", "peak_gib", "update_s"))
            texts = ["-" if cell is None else f"{cell:.2f}" for cell in cells]
            print(f"{line} {texts[0]:>14} {texts[1]:>9} {texts[2]:>9}", flush=True)


if __name__ == "__main__":
    main()
