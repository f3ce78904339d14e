"""Deterministic mode, cancellation, failures, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from tests.kits.engine import (
    VOCABULARY,
    Turns,
    grouped_prompts,
    play,
    sample_each,
    tiny,
    words,
    worst,
)
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.cache.store import LayerCache
from TrainingFactory.sampling.cache.view import FusedRMSNorm, can_fuse_norm, join_weights, make_view
from TrainingFactory.sampling.native import NativeSession
from TrainingFactory.sampling.runner import Runner
from TrainingFactory.types import Completion, SamplingParams, Weights


def bits(runs: list[Turns]) -> list:
    return [[(c.token_ids, c.logprobs) for _, c in turns] for turns in runs]


@pytest.mark.parametrize("slots", [5, pytest.param(16, marks=pytest.mark.slow)])
def test_deterministic_mode_ignores_timing(slots: int) -> None:
    model = tiny("mha")
    prompts = grouped_prompts(3, 3, system=40, question=9)
    pauses = (0, 0.001, 0.02)
    engines = [NativeEngine(model, slots=slots, max_length=700, deterministic=True) for _ in pauses]
    runs = [play(engine, prompts, pause) for engine, pause in zip(engines, pauses, strict=True)]
    assert bits(runs[0]) == bits(runs[1]) == bits(runs[2])
    for turns in runs[0]:
        assert worst(model, turns) < 1e-4
    assert engines[0].stats.shared_tokens > 0 and engines[0].stats.evictions == 0


def test_deterministic_mode_with_threads_and_a_long_neighbour() -> None:
    """A neighbour over 512 tokens widens what every row looks at; nobody's bits change."""
    model = tiny()

    def run(neighbour: int) -> list:
        engine = NativeEngine(model, slots=4, max_length=1100, deterministic=True)
        prompts = [words(random.Random(1), 30), words(random.Random(2), neighbour)]
        return bits(play(engine, prompts))[0]

    assert run(10) == run(600) == run(1040)


def slot_keys(engine: NativeEngine, layer: LayerCache, slot: int) -> torch.Tensor:
    """Return the keys [256, heads, size] of a slot."""
    cache = engine._runner.cache
    assert cache is not None
    return cache.gather(layer, layer.keys, slice(slot, slot + 1), 0, 256)[0]


def test_deterministic_prefixes_are_pure() -> None:
    """A prompt whose prefix is copied gives the same bits as one that is computed."""
    model = tiny()
    prompts = grouped_prompts(3, 1, system=50, question=7)
    alone = NativeEngine(model, slots=1, max_length=256, deterministic=True)
    engine = NativeEngine(model, slots=8, max_length=256, deterministic=True)

    async def everything() -> tuple[list[Completion], list[Completion]]:
        params = SamplingParams(max_tokens=1, temperature=1)
        sessions = [engine.session() for _ in prompts]  # side by side, each has a slot of its own
        shared = [await each.sample(prompt, params) for each, prompt in zip(sessions, prompts, strict=True)]
        return shared, [await alone.sample(prompt, params) for prompt in prompts]

    asyncio.run(everything())
    assert alone.stats.shared_tokens > 0, "the freed slot's own prompt is found again"
    assert engine.stats.shared_tokens > 0
    cache = engine._runner.cache
    assert cache is not None
    with torch.inference_mode():
        for layer in cache.layers:
            for slot in (1, 2):
                assert torch.equal(slot_keys(engine, layer, slot)[:50], slot_keys(engine, layer, 0)[:50])
    fresh = NativeEngine(model, slots=8, max_length=256, deterministic=True)
    asyncio.run(fresh.sample(prompts[2], SamplingParams(max_tokens=1)))
    assert fresh.stats.shared_tokens == 0 and fresh._runner.cache is not None
    for ours, computed in zip(cache.layers, fresh._runner.cache.layers, strict=True):
        ours_keys, computed_keys = slot_keys(engine, ours, 2), slot_keys(fresh, computed, 0)
        assert torch.equal(ours_keys[:56], computed_keys[:56]), "a copied prefix leads to the same tail"


async def test_a_forgotten_session_frees_its_turn() -> None:
    engine = NativeEngine(tiny(), slots=1, max_length=64, deterministic=True)
    forgotten = engine.session()
    await forgotten.sample([5, 6], SamplingParams(max_tokens=2))
    waiting = asyncio.create_task(engine.sample([5, 6], SamplingParams(max_tokens=2)))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    del forgotten
    await asyncio.wait_for(waiting, 10)


async def test_cancelling_one_leaves_the_others() -> None:
    model = tiny()
    engine = NativeEngine(model, slots=3, max_length=256)
    prompts = [words(random.Random(i), 20) for i in range(6)]
    params = SamplingParams(max_tokens=100)
    sessions = [engine.session() for _ in prompts]
    tasks = [asyncio.create_task(s.sample(p, params)) for s, p in zip(sessions, prompts, strict=True)]
    await asyncio.sleep(0.02)
    for i in (0, 2, 5):  # two that run, one that waits for a slot
        tasks[i].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    gone = [i for i, result in enumerate(results) if isinstance(result, asyncio.CancelledError)]
    assert gone == [0, 2, 5]
    again = await sessions[0].sample(prompts[0], SamplingParams(max_tokens=5))
    done = [(p, c) for p, c in zip(prompts, results, strict=True) if isinstance(c, Completion)]
    assert all(len(c.token_ids) == 100 for _, c in done)
    assert worst(model, [*done, (prompts[0], again)]) < 1e-4
    assert not engine._table.running.any()


def test_a_failing_step_reaches_all_who_wait() -> None:
    model = tiny()
    engine = NativeEngine(model, slots=2, max_length=128)
    layer, calls = model.model.layers[1], [0]  # pyright: ignore

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise torch.OutOfMemoryError("pretend")

    handle = layer.register_forward_pre_hook(fail)  # pyright: ignore

    async def everything() -> list:
        runs = [engine.sample(words(random.Random(i), 9), SamplingParams(max_tokens=30)) for i in range(5)]
        return await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 20)

    assert all(isinstance(result, torch.OutOfMemoryError) for result in asyncio.run(everything()))
    handle.remove()
    for turns in play(engine, grouped_prompts(2, 2)):
        assert worst(model, turns) < 1e-4, "the engine starts afresh"


def test_nan_logits_are_an_error() -> None:
    model = tiny()
    engine = NativeEngine(model, slots=2, max_length=128)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)  # pyright: ignore
    with pytest.raises(FloatingPointError, match="NaN"):
        sample_each(engine, [[5, 6]])


def test_a_failed_update_keeps_the_version_and_goes_on() -> None:
    engine = NativeEngine(tiny(), slots=2, max_length=128)
    with pytest.raises(ValueError, match=r"cannot load elsewhere\.safetensors"):
        asyncio.run(engine.update(Weights(3, "elsewhere.safetensors")))
    assert sample_each(engine, [[5, 6]], max_tokens=3)[0][1].policy_version == 0


def test_bad_prompts() -> None:
    engine = NativeEngine(tiny(), slots=2, max_length=32)
    told = {
        "prompt is empty": [],
        "32 tokens, .*max_length=32 .*31": [5] * 32,
        f"token id {VOCABULARY} is not in the model's vocabulary": [5, VOCABULARY],
        "token id -1": [-1, 5],
    }
    for text, prompt in told.items():
        with pytest.raises(ValueError, match=text):
            sample_each(engine, [prompt])


def test_sessions_are_used_one_turn_at_a_time() -> None:
    engine = NativeEngine(tiny(), slots=2, max_length=64)

    async def both(session: NativeSession) -> None:
        params = SamplingParams(max_tokens=30)
        first = asyncio.create_task(session.sample([5, 6], params))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="one turn at a time"):
            await session.sample([5, 6], params)
        await first
        session.close()
        with pytest.raises(ValueError, match="closed"):
            await session.sample([5, 6], params)

    asyncio.run(both(engine.session()))


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("llama4_text", {"layer_types": ["chunked_attention", "full_attention"]}, "it has chunked_attention layers"),
        ("nemotron", {}, "'nemotron' .* keyword arguments"),
        ("t5", {}, "encoder-decoder"),
    ],
)  # fmt: skip
def test_what_it_cannot_sample_is_refused(kind: str, options: dict[str, Any], reason: str) -> None:
    if kind == "t5":
        model = T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1))
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **options))
    with pytest.raises(ValueError, match=reason) as refusal:
        NativeEngine(model, slots=2, max_length=32)
    assert "tfactory models --compat" in str(refusal.value) and "sampling.engine: vllm" in str(refusal.value)


def test_a_model_with_other_attention_is_refused_by_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else a model does to its scores shows in the logits before anything is sampled."""
    model = tiny()
    attention = type(model.model.layers[0].self_attn)  # pyright: ignore
    forward = attention.forward

    def odd(self: Any, *args: Any, **kwargs: Any) -> Any:
        scale = self.scaling
        self.scaling = scale * (2 if self.config._attn_implementation == "eager" else 1)
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.scaling = scale

    monkeypatch.setattr(attention, "forward", odd)
    with pytest.raises(ValueError, match="logits through the slot cache are off"):
        NativeEngine(model, slots=2, max_length=32)


@pytest.mark.parametrize(("wild", "refused"), [([2, 11], False), (range(8), True), (range(8, 15), True)])
def test_tokens_that_are_far_off_by_themselves_do_not_refuse_a_model(
    monkeypatch: pytest.MonkeyPatch, wild: Sequence[int], refused: bool
) -> None:
    """In 16 bits some tokens of a trained model are far from float32, whatever adds them up; a chunk or rows that are
    wrong are wrong at most tokens."""
    plain = Runner._compute_logits

    def odd(
        self: Runner, ids: torch.Tensor, positions: torch.Tensor, step: Any, keep: torch.Tensor | int
    ) -> torch.Tensor:
        logits = plain(self, ids, positions, step, keep)
        return logits + torch.isin(positions, torch.tensor(wild))[:, None] * logits.flip(1)

    monkeypatch.setattr(Runner, "_compute_logits", odd)
    with pytest.raises(ValueError, match="off by") if refused else contextlib.nullcontext():
        NativeEngine(tiny(), slots=2, max_length=32)


@pytest.mark.parametrize("wrong", [False, True])
def test_16_bit_logits_may_be_as_far_from_float32_as_the_model_s_own(
    monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """The output layer adds one large number to all logits of a token, so that rounding moves them by a third of their
    spread: with the model's own attention as well as with the engine's."""
    model = tiny("gqa_bias").bfloat16()
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        head.weight += 10
    if wrong:
        plain = Runner._make_attention_mask
        monkeypatch.setattr(Runner, "_make_attention_mask", lambda *args: torch.zeros_like(plain(*args)))
    with pytest.raises(ValueError, match="off by") if wrong else contextlib.nullcontext():
        NativeEngine(model, slots=2, max_length=32)


def test_16_bit_logits_are_judged_without_memory_for_a_float32_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gqa_bias").bfloat16()
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        head.weight += 10

    def fail(model: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.nn.Module, "float", fail)
    with pytest.raises(ValueError, match="off by"):
        NativeEngine(model, slots=2, max_length=32)


def test_experts_have_no_deterministic_mode_and_other_modules_none_at_all() -> None:
    with pytest.raises(ValueError, match="deterministic"):
        NativeEngine(tiny("mla_moe"), deterministic=True)
    with pytest.raises(ValueError, match="a Linear"):
        NativeEngine(torch.nn.Linear(2, 2))


def test_norms_are_one_call_where_that_gives_the_same() -> None:
    model = tiny("gqa_tied")
    view = make_view(model, "eager")
    ids = torch.arange(12)[None]
    kinds = {type(module).__name__ for module in view.modules()}
    assert "FusedRMSNorm" in kinds and "Qwen3RMSNorm" not in kinds
    with torch.no_grad():
        torch.testing.assert_close(view(ids).logits, model.eval()(ids).logits, rtol=1e-5, atol=1e-5)
    assert not any(isinstance(module, FusedRMSNorm) for module in model.modules())
    half = make_view(tiny("gqa_tied").bfloat16(), "eager")
    assert not any(isinstance(module, FusedRMSNorm) for module in half.modules())


class SometimesRMSNorm(nn.Module):
    """Its instances differ; one that shifts has a weight that counts from one, as Gemma's."""

    def __init__(self, epsilon: float = 1e-6, weight: float = 1.0, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), weight))
        self.variance_epsilon = 1e-6
        self.epsilon, self.shift = epsilon, shift

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.epsilon == 0:
            raise RuntimeError("not yet")
        return nn.functional.rms_norm(states, (8,), self.shift + self.weight, self.epsilon)


def test_every_norm_is_tried_for_itself() -> None:
    assert can_fuse_norm(SometimesRMSNorm()) and can_fuse_norm(SometimesRMSNorm(weight=0.0))
    for epsilon, weight, shift in ((1e-5, 1.0, 0.0), (0.0, 1.0, 0.0), (1e-5, 0.0, 0.0), (1e-6, 0.5, 1.0)):
        assert not can_fuse_norm(SometimesRMSNorm(epsilon, weight, shift))
    before, after, wrapped, replaced = (SometimesRMSNorm() for _ in range(4))
    before.register_forward_pre_hook(lambda module, args: None)
    after.register_forward_hook(lambda module, args, out: None)
    wrapped.inner = nn.Linear(8, 8)
    replaced.forward = lambda states: states
    assert not any(can_fuse_norm(each) for each in (before, after, wrapped, replaced))


def test_weights_that_lie_side_by_side_are_trained_copied_and_saved_as_before(tmp_path: Path) -> None:
    model = tiny()
    before, attention = copy.deepcopy(model.state_dict()), model.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    with torch.inference_mode():
        whole = join_weights(layers)
        again = join_weights(layers)
    assert whole is not None and again is not None
    assert whole.shape == (sum(each.out_features for each in layers), model.config.hidden_size)
    assert whole.data_ptr() == again.data_ptr() == attention.q_proj.weight.data_ptr()
    assert all((each == before[name]).all() for name, each in model.state_dict().items())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    words = torch.arange(9)[None]
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    assert (whole == torch.cat([each.weight for each in layers])).all()
    assert (whole[: len(attention.q_proj.weight)] != before["model.layers.0.self_attn.q_proj.weight"]).any()
    model.save_pretrained(tmp_path)
    for other in (type(model).from_pretrained(tmp_path), copy.deepcopy(model)):
        assert all((each == model.state_dict()[name]).all() for name, each in other.state_dict().items())
    apart = copy.deepcopy(model).model.layers[0].self_attn
    assert join_weights([apart.q_proj, apart.k_proj]) is not None  # a copy's lie apart, and are joined anew
    assert join_weights([nn.Linear(3, 3), nn.Linear(3, 3)]) is None  # a bias
