"""vLLM by itself on the shapes of `benchmarks.gpu_engine`: `python -m benchmarks.vllm_alone` (CPU: `--small`).

Its offline engine with random weights, prefix caching and CUDA graphs for the numbers of rows: the fastest that it has.
A Qwen3 of 0.6 B parameters: 64 and 256 rows of 256 + 128 tokens in 32 groups. `--model llama`, of 135 M: 256 and 1,024
sessions of 4 turns of 30 to 60 tokens, each turn one call of `generate`, with 14 tokens of reply after it. Log-probs
are returned, as training needs them. `--model qwen3_5`, the hybrid of 2 B parameters of `benchmarks.hybrids`: its text
part alone, without prefix caching, because vLLM caches states after blocks that are longer than these prompts. Each
several times; the best counts. Takes nothing of TrainingFactory but shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig, Qwen3_5Config, Qwen3Config

from benchmarks.gpu_engine import LLAMA, REAL, REPLY, SIBLINGS, SMALL, START, TURNS, make_prompts
from benchmarks.hybrids import shape

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]


def start(config: Any, rows: list[int], folder: str, options: dict[str, Any]) -> Generate:
    """Start vLLM with a model of this shape; return what samples so many tokens after each prompt."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    config.save_pretrained(folder)
    defaults: dict[str, Any] = {"enable_prefix_caching": True}
    engine = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=max(rows),
        max_num_batched_tokens=16384, disable_log_stats=True, **(defaults | options),
    )  # fmt: skip

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        asked: list[Any] = [
            SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
            for new in lengths
        ]
        done = engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    return generate


def one_turn(generate: Generate, rows: int, vocabulary: int, prompt: int, new: int, seed: int) -> int:
    prompts = [
        [(token + seed) % vocabulary for token in ids] for ids in make_prompts(rows, prompt, vocabulary)
    ]
    return sum(map(len, generate(prompts, [new] * rows)))


def several_turns(generate: Generate, sessions: int, seed: int) -> int:
    rng, sampled = random.Random(seed), 0
    starts = [[rng.randrange(400) for _ in range(START)] for _ in range(-(-sessions // SIBLINGS))]
    prompts = [list(starts[number // SIBLINGS]) for number in range(sessions)]
    for _ in range(TURNS):
        turns = generate(prompts, [rng.randint(30, 60) for _ in prompts])
        sampled += sum(map(len, turns))
        replies = [[rng.randrange(400) for _ in range(REPLY)] for _ in prompts]
        prompts = [ids + turn + reply for ids, turn, reply in zip(prompts, turns, replies, strict=True)]
    return sampled


def plain_config(model: str, small: bool) -> Any:
    sizes = SMALL | {"head_dim": 32} if small else REAL if model == "qwen3" else LLAMA
    kind, name = (Qwen3Config, "Qwen3ForCausalLM") if model == "qwen3" else (LlamaConfig, "LlamaForCausalLM")
    options: dict[str, Any] = {"max_position_embeddings": 2048, "architectures": [name], "dtype": "bfloat16"}
    return kind(**sizes | options)


def hybrid_config(small: bool) -> Any:
    """Return the config of a Qwen3.5. vLLM knows the text model only as a part of the model with images."""
    text = shape("qwen3_5_text", "tiny" if small else "2b")
    text |= {"max_position_embeddings": 2048, "dtype": "bfloat16", "mamba_ssm_dtype": "float32"}
    tower = {"depth": 1, "out_hidden_size": text["hidden_size"]}
    return Qwen3_5Config(
        text_config=text, vision_config=tower, tie_word_embeddings=True, dtype="bfloat16",
        architectures=["Qwen3_5ForConditionalGeneration"],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=("qwen3", "qwen3_5", "llama"), default="qwen3", help="one in each process"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model and few rows, to try it out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of vLLM, as JSON")
    asked = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    qwen = asked.model != "llama"
    rows = [4, 8] if asked.small else [64, 256] if qwen else [256, 1024]
    config = (
        hybrid_config(asked.small) if asked.model == "qwen3_5" else plain_config(asked.model, asked.small)
    )
    vocabulary = config.get_text_config().vocab_size
    if asked.model == "qwen3_5":
        asked.options = {"language_model_only": True, "enable_prefix_caching": False} | asked.options
    graphs = {"compilation_config": {"cudagraph_capture_sizes": [1, *rows]}, "gpu_memory_utilization": 0.6}
    result: dict[str, Any] = {"model": asked.model}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        generate = start(config, rows, folder, ({} if asked.small else graphs) | asked.options)
        result["start_s"] = time.perf_counter() - began
        for count in rows:
            for repeat in range(asked.repeats):
                began = time.perf_counter()
                if qwen:
                    sampled = one_turn(generate, count, vocabulary, 256, 128, repeat)
                else:
                    sampled = several_turns(generate, count, repeat)
                result.setdefault(str(count), []).append(sampled / (time.perf_counter() - began))
            print(f"{asked.model}, {count} rows: {max(result[str(count)]):.0f} tokens/s", flush=True)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
