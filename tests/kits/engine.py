"""What the engine's tests share: small random models, a per-row oracle, random multi-turn episodes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.drafts import CONTEXT_TOKENS, DraftTable
from TrainingFactory.types import Completion, SamplingParams

VOCABULARY = 97
STOPS = (1, 2, 3)
KINDS = ("gqa_tied", "gqa_bias", "mha", "mla_moe")
Turns = list[tuple[list[int], Completion]]


def tiny(kind: str = "gqa_tied", seed: int = 0, vocab_size: int = VOCABULARY) -> PreTrainedModel:
    """Random weights, large enough that the distributions have peaks. In train mode, as a learner's is."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "initializer_range": 0.3, "max_position_embeddings": 512,
    }  # fmt: skip
    if kind == "gqa_tied":
        config = Qwen3Config(**common, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
        return Qwen3ForCausalLM(config).train()
    if kind == "gqa_bias":
        return Qwen2ForCausalLM(Qwen2Config(**common, num_key_value_heads=1)).train()
    if kind == "mha":
        return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=4, attention_dropout=0.5)).train()
    if kind == "moe":
        experts: dict[str, Any] = {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
        }  # fmt: skip
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, num_key_value_heads=2)).train()
    config = DeepseekV3Config(
        **common, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).train()


@torch.no_grad()
def plain_logprobs(
    model: torch.nn.Module, prompt: list[int], tokens: list[int], temperature: float = 1
) -> list[float]:
    """One row, no cache, the model's own attention: what the engine must agree with."""
    was_training = model.training
    model.eval()
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
    model.train(was_training)
    every = torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1), -1)
    return every.gather(1, torch.tensor(tokens, dtype=torch.long)[:, None])[:, 0].tolist()


def worst(model: torch.nn.Module, turns: Turns, temperature: float = 1) -> float:
    """The largest difference from the per-row log-probs over all sampled tokens. Turns that go on from each other are
    one row."""
    found, rows = list[float](), list[tuple[list[int], list[float]]]()
    for prompt, completion in sorted(turns, key=lambda turn: -len(turn[0])):
        whole = prompt + completion.token_ids
        row = next((each for each in rows if each[0][: len(whole)] == whole), None)
        if row is None:
            row = whole, plain_logprobs(model, whole[:1], whole[1:], temperature)
            rows.append(row)
        theirs = row[1][len(prompt) - 1 : len(whole) - 1]
        found += [abs(ours - their) for ours, their in zip(completion.logprobs, theirs, strict=True)]
    return max(found)


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(4, VOCABULARY) for _ in range(count)]


async def episode(
    engine: NativeEngine, prompt: list[int], seed: int, pause: float = 0.0, turns: int = 3, **params: Any
) -> Turns:
    """A few turns with replies in between. What is asked and answered depends on `seed` only; how long the
    tools take is random, up to `pause` seconds."""
    rng, clock = random.Random(seed), random.Random()
    session = engine.session()
    await asyncio.sleep(clock.random() * pause)
    record: Turns = []
    for turn in range(turns):
        how = SamplingParams(max_tokens=12 - turn % 2, stop_ids=STOPS, seed=1000 * seed + turn, **params)
        completion = await session.sample(prompt, how)
        record.append((list(prompt), completion))
        if completion.finish == "length" and len(prompt) + len(completion.token_ids) >= engine.max_length - 8:
            break
        await asyncio.sleep(clock.random() * pause)
        prompt = prompt + completion.token_ids + words(rng, rng.choice((1, 5, 40)))
    session.close()
    return record


def sample_each(engine: NativeEngine, prompts: list[list[int]], **params: Any) -> Turns:
    """Sample one turn for each prompt, all at once, each with its own seed."""

    async def everything() -> list[Completion]:
        how = [SamplingParams(seed=seed, **params) for seed in range(len(prompts))]
        return await asyncio.gather(*map(engine.sample, prompts, how))

    return list(zip(prompts, asyncio.run(everything()), strict=True))


def grouped_prompts(groups: int, members: int, system: int = 30, question: int = 9) -> list[list[int]]:
    """Groups of equal prompts under one system prompt."""
    rng = random.Random(5)
    head = words(rng, system)
    return [prompt for prompt in (head + words(rng, question) for _ in range(groups)) for _ in range(members)]


def play(engine: NativeEngine, prompts: list[list[int]], pause: float = 0.0, **params: Any) -> list[Turns]:
    """One episode for each prompt, all at once."""

    async def everything() -> list[Turns]:
        runs = [episode(engine, prompt, i, pause, **params) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*runs)

    return asyncio.run(everything())


class Informed(DraftTable):
    """Knows what will be sampled, and lies about it now and then: right, wrong and half-right guesses of all
    lengths, stop tokens among them, guesses that go on behind a stop. A share of `silent` forwards gets no guess."""

    def __init__(self, truth: list[Any], lies: float, silent: float = 0.0) -> None:
        super().__init__()
        self.rng = random.Random(1)
        self.lies = lies
        self.silent = silent
        self.follows = {}
        for turns in truth:
            for prompt, completion in turns:
                whole = prompt + completion.token_ids
                for at in range(len(prompt), len(whole)):
                    self.follows[tuple(whole[at - CONTEXT_TOKENS : at])] = whole[at:]

    def guess(self, context: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = np.zeros((len(context), most), np.int64), np.zeros(len(context), np.int64)
        if self.rng.random() < self.silent:
            return tokens, lengths
        for row, key in enumerate(context.tolist()):
            right = self.follows.get(tuple(key), [])[:most]
            made = [self._lie() if self.rng.random() < self.lies else token for token in right]
            made += [self._lie() for _ in range(self.rng.randrange(most - len(made) + 1))]
            tokens[row, : len(made)] = made
            lengths[row] = len(made)
        return tokens, lengths

    def _lie(self) -> int:
        return self.rng.choice((*STOPS, self.rng.randrange(VOCABULARY)))
