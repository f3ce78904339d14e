"""What a GPU holds: `python -m benchmarks.gpu_shapes` (to try it: `--device cpu --sizes builtin:tiny --kinds lora`).

Qwen3's shapes with random weights in bfloat16, the smallest first, with all weights trained (`full`), the same with
gradient checkpointing (`checkpointed`), that with AdamW in 8 bits (`checkpointed_8bit`), with LoRA of rank 16 (`lora`),
and that with checkpointing (`lora_checkpointed`). A step is one of GRPO: 16 groups of 8 rows, prompts of 768 tokens and
answers of 256, sampled by the native engine, then trained in packs of 16,384 tokens, prefixes shared (`sharing`). Each
is measured in a process of its own: seconds of sampling and update, the peak of allocated memory, and beside it what
`tfactory doctor --model-size` estimates. One that does not fit is named as such.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.update import make_rows
from TrainingFactory.apps.plan.shapes import find_shape
from TrainingFactory.assembly.learner import make_algorithm, make_learner, make_trainable
from TrainingFactory.assembly.memory import estimate_device_bytes
from TrainingFactory.assembly.sampler import make_engine
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.models import LoadedModel
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.types import SamplingParams, Weights

KINDS = {
    "full": {},
    "checkpointed": {"gradient_checkpointing": True},
    "checkpointed_8bit": {"gradient_checkpointing": True, "optimizer": "adamw_8bit"},
    "lora": {},
    "lora_checkpointed": {"gradient_checkpointing": True},
}
DIMENSIONS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
COLUMNS = ("size", "kind", "estimated_gib", "peak_gib", "sample_s", "update_s")


def config_of(kind: str, device: str) -> TrainingConfig:
    return TrainingConfig(
        model={"max_length": 1024, "device": device},
        training={"batch_size": 16, "group_size": 8, "token_budget": 16_384, **KINDS[kind]},
        sampling={"slots": 128, "max_tokens": 256},
        lora={"enabled": kind.startswith("lora")},
    )


def random_model(size: str, device: str, positions: int = 4096) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device != "cpu" else torch.float32)
    shape = find_shape("", size)
    fields: dict[str, Any] = {name: getattr(shape, name) for name in DIMENSIONS}
    fields |= {"max_position_embeddings": positions, "pad_token_id": 0}
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**fields, eos_token_id=None))
    torch.set_default_dtype(torch.float32)
    return model


def estimated(size: str, kind: str, device: str) -> dict[str, Any]:
    config, shape = config_of(kind, device), find_shape("", size)
    parts = estimate_device_bytes(config, shape, shape.count_held(config), make_algorithm(config).needs, 1024)
    gib = sum(parts.values()) / 2**30
    return {"size": size, "kind": kind, "parameters": shape.params, "estimated_gib": gib}


def measure(size: str, kind: str, device: str, steps: int) -> dict[str, Any]:
    config, found = config_of(kind, device), estimated(size, kind, device)
    algorithm = make_algorithm(config)
    loaded = LoadedModel(size, random_model(size, device), make_tiny_tokenizer())
    make_trainable(config, loaded)
    learner, engine = make_learner(config, loaded, algorithm, steps), make_engine(config, loaded, 128)
    found["sharing"] = learner.sharing
    rows = make_rows(True, find_shape("", size).vocab_size)
    asked = [row.token_ids[:768] for row in rows]

    async def sample(step: int) -> int:
        await engine.update(Weights(step))
        done = await asyncio.gather(
            *(engine.sample(ids, SamplingParams(max_tokens=256, seed=n)) for n, ids in enumerate(asked))
        )
        return sum(len(each.token_ids) for each in done)

    graphs: Any = engine._runner._graphs
    for step in range(steps + 1):  # the first compiles
        before = graphs.recorded if graphs else 0
        started = time.perf_counter()
        loaded.model.eval()
        sampled = asyncio.run(sample(step))
        between = time.perf_counter()
        learner.update(make_batch(rows, config.training.token_budget, learner.sharing), algorithm.loss)
        if device != "cpu":
            torch.cuda.synchronize()
        found |= {"sample_s": between - started, "update_s": time.perf_counter() - between}
        found["graphs_recorded"] = graphs.recorded - before if graphs else 0  # again, after an update
        found["tokens_per_second"] = sampled / found["sample_s"]
    if device != "cpu":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return the estimate beside what was measured, a line for each row; of one that failed, the last line of why."""
    found = [[row.get(name, "-") for name in COLUMNS] for row in rows]
    cells = [COLUMNS, *([f"{one:.2f}" if isinstance(one, float) else one for one in row] for row in found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in cells]
    why = ["", *(row.get("failed", "").rpartition("\n")[2] for row in rows)]
    return "\n".join(f"{line}  {text}".rstrip() for line, text in zip(lines, why, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="+", default=["0.6B", "1.7B", "4B", "8B"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--one", action="store_true", help="measure the first of them in this process")
    asked = parser.parse_args()
    if asked.one:
        print("RESULT " + json.dumps(measure(asked.sizes[0], asked.kinds[0], asked.device, asked.steps)))
        return
    rows = []
    for size in asked.sizes:
        for kind in asked.kinds:
            given = f"--one --sizes {size} --kinds {kind} --device {asked.device} --steps {asked.steps}"
            command = [sys.executable, "-m", "benchmarks.gpu_shapes", *given.split()]
            done = subprocess.run(command, capture_output=True, text=True)
            print(done.stderr, end="", file=sys.stderr)
            last = done.stdout.rpartition("RESULT ")[2]
            why = "does not fit" if "out of memory" in done.stderr else done.stderr.strip()[-300:]
            failed = estimated(size, kind, asked.device) | {"failed": why}
            rows.append(failed if done.returncode else json.loads(last))
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    print("RESULT " + json.dumps(rows))


if __name__ == "__main__":
    main()
