"""The paged KV cache: shared pages, preemption, sliding windows, and every kind of attention."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.kits.engine import VOCABULARY, Turns, episode, grouped_prompts, play, tiny, words, worst
from TrainingFactory import GRPOTrainer
from TrainingFactory.config import TrainingConfig
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.cache.pages import PAGE, CachePages
from TrainingFactory.types import Completion, SamplingParams, Weights


def with_tokens(model: Any, tokens: int, **options: Any) -> NativeEngine:
    """Return an engine whose cache holds this many tokens, fewer than its slots could fill."""
    probe = NativeEngine(model, slots=1, max_length=64)
    token_bytes = sum(shape.token_bytes for shape in probe._runner.shapes)
    engine = NativeEngine(model, cache_bytes=tokens * token_bytes, **options)
    assert not engine._table.pages.fixed
    return engine


def check_pages(engine: NativeEngine) -> None:
    """Check that every page is either free or referenced by as many slots as it counts."""
    for table in engine._table.pages.tables:
        counts = np.bincount(table.entries.ravel(), minlength=table.num_pages + 1)[: table.num_pages]
        assert (counts == table.references[: table.num_pages]).all()
        assert sorted(table.free_pages()) == np.flatnonzero(counts == 0).tolist()


def tokens_of(runs: list[Turns]) -> list[list[list[int]]]:
    return [[completion.token_ids for _, completion in turns] for turns in runs]


def test_a_small_pool_gives_the_same_tokens_as_a_large_one() -> None:
    model = tiny()
    prompts = grouped_prompts(3, 3)
    expected = play(NativeEngine(model, slots=9, max_length=256), prompts)
    for tokens in (256, 640, 1500):
        engine = with_tokens(model, tokens, slots=9, max_length=256)
        runs = play(engine, prompts)
        assert tokens_of(runs) == tokens_of(expected), tokens
        assert max(worst(model, turns) for turns in runs) < 1e-4
        assert (engine.stats.preemptions > 0) == (tokens < 1500)
        check_pages(engine)


def test_siblings_share_the_pages_of_their_prompt() -> None:
    engine = with_tokens(tiny(), 1000, slots=8, max_length=256)
    prompt = words(random.Random(0), 3 * PAGE + 5)

    async def everything() -> None:
        sessions = [engine.session() for _ in range(8)]
        await asyncio.gather(
            *(
                session.sample(prompt, SamplingParams(max_tokens=4, seed=n))
                for n, session in enumerate(sessions)
            )
        )

    asyncio.run(everything())
    table = engine._table.pages.tables[0]
    assert len(np.unique(table.entries[:8, :3])) == 3, "three pages for eight siblings"
    assert len(np.unique(table.entries[:8, 3])) == 8, "a separate page for the tokens after the prompt"
    assert engine._table.pages.used_pages == 3 + 8
    check_pages(engine)


def test_an_edited_history_does_not_change_shared_pages() -> None:
    """A session that goes back into a shared page writes to a copy."""
    model = tiny()
    engine = with_tokens(model, 1000, slots=4, max_length=256)
    prompt = words(random.Random(0), 2 * PAGE + 3)
    edited = prompt[: PAGE + 7] + words(random.Random(1), 20)

    async def everything() -> Turns:
        one, two = engine.session(), engine.session()
        params = SamplingParams(max_tokens=6)
        turns = [(prompt, await one.sample(prompt, params)), (prompt, await two.sample(prompt, params))]
        turns.append((edited, await one.sample(edited, params)))
        longer = prompt + turns[1][1].token_ids + [7, 8]
        return [*turns, (longer, await two.sample(longer, params))]

    turns = asyncio.run(everything())
    assert max(worst(model, [turn]) for turn in turns) < 1e-4
    check_pages(engine)


async def test_the_youngest_idle_session_releases_its_pages_first() -> None:
    model = tiny()
    engine = with_tokens(model, 8 * PAGE, slots=4, max_length=8 * PAGE)
    sessions = [engine.session() for _ in range(3)]
    prompts = [words(random.Random(n), PAGE + 4) for n in range(3)]
    params = SamplingParams(max_tokens=2)
    first = [await session.sample(prompt, params) for session, prompt in zip(sessions, prompts, strict=True)]
    longer = prompts[0] + first[0].token_ids + words(random.Random(9), 3 * PAGE)
    await sessions[0].sample(longer, params)
    assert engine.stats.preemptions == 1
    assert sessions[2]._session_slot.slot is None and sessions[1]._session_slot.slot is not None
    again = prompts[2] + first[2].token_ids + [7]
    assert worst(model, [(again, await sessions[2].sample(again, params))]) < 1e-4


def test_a_sequence_larger_than_the_pool_is_truncated(caplog: pytest.LogCaptureFixture) -> None:
    engine = with_tokens(tiny(), 200, slots=4, max_length=512)
    assert engine.max_length == 192
    assert "truncated at 192 tokens instead of 512" in caplog.text
    completion = asyncio.run(engine.sample(words(random.Random(0), 100), SamplingParams(max_tokens=400)))
    assert len(completion.token_ids) == 92 and completion.finish == "length"


def test_deterministic_mode_has_as_many_slots_as_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    probe = NativeEngine(model, slots=1, max_length=64)
    token_bytes = sum(shape.token_bytes for shape in probe._runner.shapes)
    prompts = grouped_prompts(2, 3)
    limited = NativeEngine(model, slots=6, max_length=256, deterministic=True, cache_bytes=600 * token_bytes)
    assert limited._table.num_slots == 2 and "2 slots instead of 6" in caplog.text
    runs = play(limited, prompts)
    assert max(worst(model, turns) for turns in runs) < 1e-4 and limited.stats.preemptions == 0
    whole = NativeEngine(model, slots=2, max_length=256, deterministic=True)
    assert [[c.logprobs for _, c in turns] for turns in runs] == [
        [c.logprobs for _, c in turns] for turns in play(whole, prompts)
    ]
    with pytest.raises(ValueError, match=r"Lower model\.max_length"):
        NativeEngine(model, slots=6, max_length=256, deterministic=True, cache_bytes=100 * token_bytes)


def test_page_tables_keep_their_books() -> None:
    rng = random.Random(0)
    pages = CachePages(6, 8 * PAGE, [None, PAGE], [40, 40], fixed=False)
    lengths = [0] * 6
    for _ in range(3000):
        slot, action = rng.randrange(6), rng.random()
        if action < 0.4:
            lengths[slot] = min(8 * PAGE, lengths[slot] + rng.randrange(1, 50))
            if pages.count_missing(slot, lengths[slot]) <= pages.num_free:
                pages.reserve(slot, lengths[slot])
            else:
                pages.release(slot)
                lengths[slot] = 0
        elif action < 0.6:
            source = rng.randrange(6)
            usable = int(pages.get_usable(np.array(lengths))[source])
            length = rng.randint(0, usable) if usable == lengths[source] else 0
            if (
                source != slot
                and length
                and pages.get_usable(np.full(6, length))[source]
                and pages.num_free > 1
            ):
                pages.release(slot)
                pages.share(source, slot, length, length)
                lengths[slot] = length
        elif action < 0.8 and pages.num_free > 1:
            length = rng.randint(0, lengths[slot])
            if pages.get_usable(np.full(6, length))[slot]:
                pages.truncate(slot, length)
                lengths[slot] = length
        else:
            pages.release_outside_window(np.array([slot]), np.array([lengths[slot]]))
        for table in pages.tables:
            counts = np.bincount(table.entries.ravel(), minlength=41)[:40]
            assert (counts == table.references[:40]).all()
            assert table.num_free == (counts == 0).sum()
    assert pages.take_copies()[0].targets


MLA: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "ministral": {"sliding_window": 24},
    "qwen3": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 8, "layer_types": MIXED},
    "gemma4_text": {"sliding_window": 24, "num_kv_shared_layers": 2, "global_head_dim": 32, "layer_types": MIXED,
                    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {"sliding_window": 24},
    "cohere2": {"sliding_window": 24},
    "exaone4": {"sliding_window": 24},
    "deepseek_v3": MLA,
}  # fmt: skip


def family(kind: str) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(shape | FAMILIES[kind]))
    # transformers' other attention functions ignore soft caps
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


# Each has what no other has: windows in all layers, soft caps, windows in some layers, shared caches, sinks, latents.
QUICK = ("mistral", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3")
LATER = [pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES if kind not in QUICK]


@pytest.mark.parametrize("kind", [*QUICK, *LATER])
def test_families_sample_what_their_own_forward_computes(kind: str) -> None:
    """Several turns, longer than the window, with fixed pages and with pages that are shared and released."""
    model = family(kind)
    prompts = grouped_prompts(2, 2, system=40, question=9)
    engine = NativeEngine(model, slots=4, max_length=256)
    assert engine._table.pages.fixed
    runs = play(engine, prompts)
    assert max(worst(model, turns) for turns in runs) < 2e-4
    paged = with_tokens(model, 700, slots=4, max_length=256)
    paged_runs = play(paged, prompts)
    assert max(worst(model, turns) for turns in paged_runs) < 2e-4
    assert paged.stats.shared_tokens > 0
    check_pages(paged)


async def test_pages_that_have_left_the_window_are_released() -> None:
    engine = with_tokens(family("gemma3_text"), 2000, slots=4, max_length=512)
    full, windowed = engine._table.pages.tables
    assert (full.window, windowed.window) == (None, 24)
    session = engine.session()
    await session.sample(words(random.Random(0), 300), SamplingParams(max_tokens=60))
    held = [table.ends[0] - table.begins[0] for table in (full, windowed)]
    assert held[0] * PAGE >= 359 and held[1] * PAGE <= 24 + 64 + 3 * PAGE
    assert windowed.num_free + held[1] == windowed.num_pages


def test_latent_attention_caches_the_compressed_vectors() -> None:
    engine = NativeEngine(family("deepseek_v3"), slots=2, max_length=64)
    assert {(shape.num_key_heads, shape.key_size, shape.is_latent) for shape in engine._runner.shapes} == {
        (1, 24, True)
    }
    assert engine._runner.shapes[0].token_bytes == 24 * 4


def test_layers_that_share_keys_and_values_have_one_cache() -> None:
    engine = NativeEngine(family("gemma4_text"), slots=2, max_length=64)
    shared = [shape.source_layer for shape in engine._runner.shapes]
    assert shared[:2] == [None, None] and None not in shared[2:]


async def test_a_prefix_that_has_left_a_window_is_not_waited_for() -> None:
    model = family("gemma3_text")
    engine = with_tokens(model, 3000, slots=8, max_length=512)
    head = words(random.Random(0), 100)
    first = asyncio.create_task(
        engine.sample(head + words(random.Random(1), 200), SamplingParams(max_tokens=200))
    )
    while engine._table.lengths.max() < 310:
        await asyncio.sleep(0.001)
    prompt = head + words(random.Random(2), 10)
    second = await engine.sample(prompt, SamplingParams(max_tokens=2))
    assert not first.done(), "it does not wait for the end of the other turn"
    assert worst(model, [(prompt, second)]) < 2e-4
    await first


async def test_a_preempted_turn_ends_before_an_update() -> None:
    """Two turns that do not fit together: neither has tokens of two versions."""
    model = tiny()
    engine = with_tokens(model, 256, slots=4, max_length=256)
    prompts = [words(random.Random(n), 60) for n in range(2)]
    params = SamplingParams(max_tokens=150)
    turns = [asyncio.create_task(engine.sample(prompt, params)) for prompt in prompts]
    while engine._table.lengths.max() < 80:
        await asyncio.sleep(0.001)
    await engine.update(Weights(1))
    completions = [await turn for turn in turns]
    assert engine.stats.preemptions > 0
    assert [completion.policy_version for completion in completions] == [0, 0]
    assert worst(model, list(zip(prompts, completions, strict=True))) < 1e-4


def test_a_page_is_reserved_for_the_copy_of_a_shared_one() -> None:
    pages = CachePages(2, 4 * PAGE, [None], [8], fixed=False)
    pages.reserve(0, 2 * PAGE)
    assert pages.count_copied_pages(0, 2 * PAGE - 1) == 0
    pages.share(0, 1, 2 * PAGE, 2 * PAGE)
    assert pages.count_copied_pages(0, 2 * PAGE - 1) == 1 and pages.count_copied_pages(0, 2 * PAGE) == 0
    free = pages.num_free
    pages.truncate(0, 2 * PAGE - 1)
    assert pages.num_free == free - 1 and pages.take_copies()[0].targets


async def test_a_long_episode_of_many_turns_fits_exactly() -> None:
    """A pool of one longest sequence: every turn continues in it, alone."""
    model = tiny()
    engine = with_tokens(model, 256, slots=2, max_length=256)
    turns: Turns = await episode(engine, words(random.Random(0), 60), 3, turns=6)
    completions: list[Completion] = [completion for _, completion in turns]
    assert worst(model, turns) < 1e-4 and len(completions) > 2


def test_a_run_with_a_small_cache_counts_preemptions(tmp_path: Path) -> None:
    config = TrainingConfig.model_validate({
        "model": {"name": "builtin:tiny", "max_length": 512},
        "environment": {"name": "calculator"},
        "sampling": {"cache_gib": 0.001, "max_tokens": 48},
        "training": {"algorithm": "grpo", "max_steps": 1, "batch_size": 2, "group_size": 8},
        "logging": {"output_dir": str(tmp_path)},
    })  # fmt: skip
    GRPOTrainer(config=config, name="small").train()
    (row,) = RunFolder(tmp_path / "small").metrics()
    assert row["cache/preemptions"] > 0 and 0.5 < row["cache/peak_share"] <= 1
