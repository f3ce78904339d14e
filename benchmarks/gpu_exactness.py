"""The engine's kernels and CUDA graphs against plain rows: `python -m benchmarks.gpu_exactness` (needs a CUDA device).

Random multi-turn episodes that join and leave, on a small float32 Qwen3. The largest difference between the
engine's log-probs and those of a plain forward of each row is printed for what graphs could get wrong: weights
changed in place, weights replaced, an adapter switched off and on; and the same episodes over and over, most
tokens of which are guessed then. Then groups of equal prompts, whose keys are read once for all; few rows, whose keys
are read in parts; a Llama with three query heads for each key head; a model that the kernels for layers do not know;
and head sizes that the attention kernel does not take. Tests cannot show this on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Completion, SamplingParams, Weights

VOCABULARY, EPISODES, TURNS = 500, 24, 3
LIMIT = 1e-4  # of what float32 may differ
Sampled = tuple[list[int], Completion, float]  # prompt, what was sampled, at which temperature


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
}  # fmt: skip


def make_model(kind: str = "qwen3") -> Any:
    three: dict[str, Any] = SIZES | {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}
    odd: dict[str, Any] = SIZES | {"head_dim": 24}
    configs: dict[str, Any] = {
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, SIZES), "llama": (LlamaForCausalLM, LlamaConfig, three),
        "odd": (Qwen3ForCausalLM, Qwen3Config, odd), "olmo2": (Olmo2ForCausalLM, Olmo2Config, SIZES),
    }  # fmt: skip
    model, config, sizes = configs[kind]
    return model(config(**sizes)).cuda().eval()


async def episode(
    engine: NativeEngine, rng: random.Random, temperature: float, ids: list[int] | None = None
) -> list[Sampled]:
    session = engine.session()
    sampled: list[Sampled] = []
    ids = ids or [rng.randrange(VOCABULARY) for _ in range(rng.randrange(5, 200))]
    for _ in range(TURNS):
        limit, seed = rng.randrange(3, 60), rng.randrange(2**32)
        params = SamplingParams(temperature=temperature, max_tokens=limit, seed=seed)
        completion = await session.sample(ids, params)
        sampled.append((ids, completion, temperature))
        ids = ids + completion.token_ids + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 30))]
        await asyncio.sleep(rng.random() * 0.02)  # a tool
    session.close()
    return sampled


def worst(engine: NativeEngine, model: Any, seed: int, episodes: int = EPISODES, group: int = 0) -> float:
    """The largest difference in log-prob over a batch of episodes, half of them at another temperature; so many of a
    `group` begin alike."""

    async def everything() -> list[list[Sampled]]:
        runs = []
        for n in range(episodes):
            alike = random.Random(f"group {seed} {n // group}") if group else None
            ids = [alike.randrange(VOCABULARY) for _ in range(150)] if alike else None
            runs.append(episode(engine, random.Random(f"{seed} {n}"), 1.0 if n % 2 else 0.7, ids))
        return await asyncio.gather(*runs)

    differences = []
    for prompt, completion, temperature in (turn for run in asyncio.run(everything()) for turn in run):
        ids = torch.tensor([prompt + completion.token_ids], device="cuda")
        with torch.no_grad():
            logprobs = (model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
        expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        differences.append((expected - torch.tensor(completion.logprobs)).abs().max().item())
    return max(differences)


def main() -> None:
    torch.manual_seed(0)
    model = make_model()
    engine = NativeEngine(model, slots=16, max_length=1024)
    result = {"first": worst(engine, model, 0)}
    for _ in range(3):
        result["the same again"] = worst(engine, model, 0)
    print(f"{engine.stats.guessed_tokens} tokens were guessed, {engine.stats.sampled_tokens} sampled")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.01)
    asyncio.run(engine.update(Weights(1)))
    result["weights changed in place"] = worst(engine, model, 1)
    for weight in model.parameters():
        weight.data = weight.data.clone() * 1.01
    asyncio.run(engine.update(Weights(2)))
    result["weights replaced"] = worst(engine, model, 2)
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: Any = get_peft_model(make_model(), options)
    engine = NativeEngine(adapted, slots=16, max_length=1024)
    result["adapter on"] = worst(engine, adapted, 3)
    with adapted.disable_adapter():
        asyncio.run(engine.update(Weights(1)))
        result["adapter off"] = worst(engine, adapted, 4)
    asyncio.run(engine.update(Weights(2)))
    result["adapter on again"] = worst(engine, adapted, 5)
    for kind, name in (
        ("qwen3", "groups"),
        ("llama", "Llama"),
        ("olmo2", "Olmo 2"),
        ("odd", "odd head size"),
    ):
        model = make_model(kind)
        engine = NativeEngine(model, slots=16, max_length=1024)
        result[name] = worst(engine, model, 6, group=8)
        result[f"{name}, few rows"] = worst(engine, model, 7, episodes=3)
    for name, difference in result.items():
        print(f"{name:26} {difference:.1e}")
    wrong = [name for name, difference in result.items() if not difference < LIMIT]
    print("RESULT " + json.dumps({"worst": max(result.values()), "limit": LIMIT, "differences": result}))
    if wrong:
        sys.exit(f"the engine's log-probs are off: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
