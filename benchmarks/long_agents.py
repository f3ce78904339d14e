"""Long agent episodes on one GPU, with the native engine or with vLLM: `python -m benchmarks.long_agents`.

A Qwen3 with random weights samples episodes of 6 turns. All episodes share a system prompt of 1,500 tokens, groups of 8
share a task of 300 tokens. A turn has 80 to 250 sampled tokens and is followed by a tool reply of 100 to 1,600 tokens,
most of them short. An episode continues as soon as its turn has ended. Each engine does the same work.

  python -m benchmarks.long_agents --size 1.7b --sessions 256             # the native engine
  python -m benchmarks.long_agents --size 1.7b --sessions 256 --vllm      # vLLM, if it is installed

`distinct_gib` is the size of the keys and values if every common prefix is stored once. `peak_ratio` is the largest
memory that torch allocated, over that size plus the weights. `--cache` sets the size of the native engine's cache, as
a multiple of `distinct_gib`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from typing import Any, NamedTuple

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
SYSTEM, TASK, TURNS, GROUP = 1500, 300, 6, 8
GIB = 2**30


class Episode(NamedTuple):
    prompt: list[int]
    turns: list[tuple[int, list[int]]]  # tokens to sample, and the tool's reply

    @property
    def length(self) -> int:
        return len(self.prompt) + self.own_tokens

    @property
    def own_tokens(self) -> int:
        return sum(new + len(reply) for new, reply in self.turns)


def make_episodes(sessions: int, vocabulary: int) -> list[Episode]:
    def tokens(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(vocabulary // 100, vocabulary) for _ in range(count)]

    system = tokens(random.Random(0), SYSTEM)
    episodes = []
    for number in range(sessions):
        task, rng = tokens(random.Random(f"task {number // GROUP}"), TASK), random.Random(f"episode {number}")
        turns = [(rng.randint(80, 250), tokens(rng, int(100 * 16 ** rng.random()))) for _ in range(TURNS)]
        episodes.append(Episode(system + task, turns))
    return episodes


def make_config(size: str) -> Any:
    from transformers import Qwen3Config

    vocabulary = 1000 if size == "tiny" else 151_936
    return Qwen3Config(
        vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=40_960, pad_token_id=0,
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16", **SIZES[size],
    )  # fmt: skip


def distinct_bytes(episodes: list[Episode], config: Any) -> int:
    tokens = SYSTEM + TASK * -(-len(episodes) // GROUP) + sum(episode.own_tokens for episode in episodes)
    return tokens * 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def run_native(config: Any, episodes: list[Episode], repeats: int, cache: float) -> dict[str, Any]:
    import torch
    from transformers import Qwen3ForCausalLM

    from TrainingFactory.sampling import NativeEngine
    from TrainingFactory.types import SamplingParams, Weights

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    distinct = distinct_bytes(episodes, config)
    engine = NativeEngine(
        model, slots=len(episodes), max_length=max(episode.length for episode in episodes) + 8,
        cache_bytes=int(cache * distinct),
    )  # fmt: skip

    async def play(number: int, episode: Episode) -> int:
        session, prompt, sampled = engine.session(), episode.prompt, 0
        for turn, (new, reply) in enumerate(episode.turns):
            completion = await session.sample(
                prompt, SamplingParams(max_tokens=new, seed=100 * number + turn)
            )
            sampled += len(completion.token_ids)
            prompt = prompt + completion.token_ids + reply
        session.close()
        return sampled

    async def play_all() -> int:
        return sum(await asyncio.gather(*(play(number, episode) for number, episode in enumerate(episodes))))

    speeds = []
    for repeat in range(repeats + 1):
        asyncio.run(engine.update(Weights(repeat)))  # nothing is kept from the repeat before
        start = time.perf_counter()
        sampled = asyncio.run(play_all())
        if repeat:  # the first warms up
            speeds.append(sampled / (time.perf_counter() - start))
    result: dict[str, Any] = {
        "tokens_per_second": [round(speed) for speed in speeds],
        "distinct_gib": round(distinct / GIB, 1),
        "preemptions": engine.stats.preemptions,
        "prefilled": engine.stats.prefilled_tokens // (repeats + 1),
    }
    if device == "cuda":
        weights = sum(parameter.nbytes for parameter in model.parameters())
        peak = torch.cuda.max_memory_allocated()
        result |= {
            "peak_gib": round(peak / GIB, 1),
            "peak_ratio": round(peak / (distinct + weights), 3),
        }
    return result


def run_vllm(config: Any, episodes: list[Episode], repeats: int) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    longest = max(episode.length for episode in episodes)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=longest + 8, max_num_seqs=256,
            max_num_batched_tokens=8192, enable_prefix_caching=True, disable_log_stats=True,
            gpu_memory_utilization=0.9,
        )  # fmt: skip
    engine, speeds = llm.llm_engine, []
    pending: dict[str, tuple[int, int, list[int]]] = {}
    for repeat in range(repeats + 1):
        llm.reset_prefix_cache()

        def request(number: int, turn: int, prompt: list[int]) -> None:
            name = f"{number}:{turn}:{time.monotonic()}"  # unique over the repeats
            pending[name] = number, turn, prompt
            params = SamplingParams(
                temperature=1.0, max_tokens=episodes[number].turns[turn][0], ignore_eos=True, logprobs=0,
                detokenize=False,
            )  # fmt: skip
            engine.add_request(name, {"prompt_token_ids": prompt}, params)

        start, sampled = time.perf_counter(), 0
        for number, episode in enumerate(episodes):
            request(number, 0, episode.prompt)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                # Some versions of vLLM add a suffix to the name.
                name = next(
                    name
                    for name in (output.request_id, output.request_id.rsplit("-", 1)[0])
                    if name in pending
                )
                number, turn, prompt = pending.pop(name)
                token_ids = list(output.outputs[0].token_ids)
                sampled += len(token_ids)
                if turn + 1 < TURNS:
                    request(number, turn + 1, prompt + token_ids + episodes[number].turns[turn][1])
        if repeat:
            speeds.append(sampled / (time.perf_counter() - start))
    return {"tokens_per_second": [round(speed) for speed in speeds]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="1.7b")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cache", type=float, default=1.08, help="size of the cache over distinct_gib")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM instead")
    args = parser.parse_args()
    config = make_config(args.size)
    episodes = make_episodes(args.sessions, config.vocab_size)
    result = {"engine": "vllm" if args.vllm else "native", "size": args.size, "sessions": args.sessions}
    result |= {"longest": max(episode.length for episode in episodes)}
    if args.vllm:
        result |= run_vllm(config, episodes, args.repeats)
    else:
        result |= run_native(config, episodes, args.repeats, args.cache)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
