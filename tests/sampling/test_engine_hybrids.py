"""Hybrid models: recurrent layers keep their states in the engine, with snapshots where other rows may begin."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kits.engine import Turns, episode, grouped_prompts, play, sample_each, words, worst
from tests.kits.families import BY_KEY
from TrainingFactory.assembly.memory import get_cache_bytes, get_state_bytes
from TrainingFactory.assembly.states import count_kv_layers, get_row_bytes
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.cache.snapshots import EMPTY_STATE, Snapshots
from TrainingFactory.types import SamplingParams, Weights

CLOSE = 1e-4  # log-probs in float32, against the model's own forward over the whole row


def hybrid(key: str = "lfm2") -> Any:
    return BY_KEY[key].build()


@contextlib.contextmanager
def token_by_token(model: Any) -> Iterator[None]:
    """Let the model's own forward use its recurrent form of the gated delta rule, where it has one. Its chunked form in
    float32 is up to 3.7e-4 off the same form in float64; the engine and the recurrent form are 2e-5 off."""
    module = sys.modules[type(model).__module__]
    chunked = getattr(module, "torch_chunk_gated_delta_rule", None)
    if chunked is None:
        yield
        return
    recurrent = inspect.unwrap(module.torch_recurrent_gated_delta_rule)
    module.torch_chunk_gated_delta_rule = lambda *args, chunk_size=64, **options: recurrent(*args, **options)
    try:
        yield
    finally:
        module.torch_chunk_gated_delta_rule = chunked


def check(model: Any, runs: list[Turns]) -> None:
    with token_by_token(model):
        assert max(worst(model, turns) for turns in runs) < CLOSE


@pytest.mark.parametrize("key", ["lfm2", "qwen3_5"])
def test_a_group_computes_its_prompt_once(key: str) -> None:
    """The members of a group begin with the state at the end of their prompt, groups with that of the system prompt."""
    model = hybrid(key)
    engine = NativeEngine(model, slots=9, max_length=256)
    system, question, groups, members = 30, 9, 3, 3
    runs = play(engine, grouped_prompts(groups, members, system, question), turns=1)
    check(model, runs)
    siblings = groups * (members - 1) * (system + question - 1)
    # A group that is admitted before the state after the system prompt is stored computes those tokens again.
    assert siblings <= engine.stats.shared_tokens <= siblings + (groups - 1) * system
    assert engine.stats.shared_tokens + engine.stats.recomputed_tokens == siblings + (groups - 1) * system
    # The last token of a prompt is fed by a decoding row.
    assert engine.stats.prefilled_tokens == system + groups * (question - 1) + engine.stats.recomputed_tokens
    assert engine.metrics() == {"cache/recomputed_tokens": float(engine.stats.recomputed_tokens)}


def test_a_prefix_without_a_state_is_computed_once_more() -> None:
    model, rng = hybrid(), random.Random(0)
    head = words(rng, 50)
    engine = NativeEngine(model, slots=8, max_length=128)

    async def one_after_another() -> Turns:
        prompts = [head + words(rng, 10) for _ in range(3)]
        how = SamplingParams(max_tokens=4)
        return [(prompt, await engine.sample(prompt, how)) for prompt in prompts]

    check(model, [asyncio.run(one_after_another())])
    # When the first prompt ran, nobody knew where others would branch off; the second one left a state there.
    assert (engine.stats.recomputed_tokens, engine.stats.shared_tokens) == (50, 50)


def test_a_session_continues_from_its_state() -> None:
    model = hybrid()
    engine = NativeEngine(model, slots=2, max_length=256)
    turns = asyncio.run(episode(engine, words(random.Random(1), 20), seed=3))
    check(model, [turns])
    fed = len(turns[-1][0]) + len(turns[-1][1].token_ids) - 1
    stats = engine.stats
    assert stats.prefilled_tokens + stats.decoded_rows == fed and stats.recomputed_tokens == 0


def test_forks_begin_at_the_ends_of_turns() -> None:
    model, rng = hybrid(), random.Random(2)
    engine = NativeEngine(model, slots=6, max_length=256)
    how = SamplingParams(max_tokens=8, seed=1)

    async def branch() -> tuple[Turns, Turns, list[int]]:
        trunk, fed = engine.session(), list[int]()
        turns: Turns = []
        prompt = words(rng, 40)
        for _ in range(3):
            turns.append((prompt, await trunk.sample(prompt, how)))
            prompt = prompt + turns[-1][1].token_ids + words(rng, 12)
        forked: Turns = []
        for at, completion in turns[:2]:  # while the trunk is far beyond them
            fork = trunk.fork()
            before = engine.stats.prefilled_tokens
            branched = at + completion.token_ids + words(rng, 5)
            forked.append((branched, await fork.sample(branched, how)))
            fed.append(engine.stats.prefilled_tokens - before)
            fork.close()
        trunk.close()
        return turns, forked, fed

    turns, forked, fed = asyncio.run(branch())
    check(model, [turns, *([turn] for turn in forked)])
    # The last token of the turn, which the trunk fed only later, and the new ones but the last.
    assert fed == [5, 5] and engine.stats.recomputed_tokens == 2


def test_a_session_may_go_back() -> None:
    """To the end of a turn, where a snapshot is, and into the middle of the prompt, where none is."""
    model, rng = hybrid(), random.Random(3)
    engine = NativeEngine(model, slots=2, max_length=256)
    how = SamplingParams(max_tokens=6, seed=5)
    first = words(rng, 30)

    async def folded() -> Turns:
        session = engine.session()
        turns = [(first, await session.sample(first, how))]
        second = first + turns[0][1].token_ids + words(rng, 9)
        turns.append((second, await session.sample(second, how)))
        for kept in (len(first) + 6, 17):
            prompt = second[:kept] + words(rng, 8)
            turns.append((prompt, await session.sample(prompt, how)))
        session.close()
        return turns

    turns = asyncio.run(folded())
    check(model, [[turn] for turn in turns])
    assert (
        engine.stats.recomputed_tokens == 1 + 17
    )  # the sampled token that was not fed; all up to the middle


@pytest.mark.parametrize("snapshots", [1, 4])
def test_few_snapshots_cost_time_and_nothing_else(snapshots: int) -> None:
    model = hybrid()
    engine = NativeEngine(model, slots=6, max_length=256)
    engine._table.snapshots = Snapshots(engine._table.num_slots, snapshots)
    check(model, play(engine, grouped_prompts(2, 3), pause=0.02, turns=2))


def test_a_small_cache_preempts_sessions() -> None:
    model = hybrid()
    probe = NativeEngine(model, slots=1, max_length=64)._runner
    state = sum(shape.row_bytes for shape in probe.states.shapes)
    pages = 400 * sum(shape.token_bytes for shape in probe.shapes)
    engine = NativeEngine(model, slots=9, max_length=256, cache_bytes=28 * state + pages)
    assert not engine._table.pages.fixed and engine._table.num_slots == 9
    check(model, play(engine, grouped_prompts(3, 3), turns=2))
    assert engine.stats.preemptions > 0


def test_states_take_part_of_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    model = hybrid()
    state = sum(
        shape.row_bytes for shape in NativeEngine(model, slots=1, max_length=64)._runner.states.shapes
    )
    engine = NativeEngine(model, slots=60, max_length=64, cache_bytes=40 * state)
    assert (
        engine._table.num_slots == 12
        and engine._table.snapshots
        and engine._table.snapshots.num_snapshots == 7
    )
    assert "12 slots instead of 60" in caplog.text
    check(model, play(engine, grouped_prompts(1, 14, 20, 5), turns=1))
    with pytest.raises(ValueError, match=r"states of one sequence need .* sampling\.cache_gib"):
        NativeEngine(model, slots=2, max_length=64, cache_bytes=3 * state)


def test_deterministic_whatever_the_latencies_and_snapshots() -> None:
    model = hybrid()
    prompts = grouped_prompts(2, 2, 40, 9)
    runs = []
    for pause, snapshots in ((0.0, 12), (0.03, 1)):
        engine = NativeEngine(model, slots=4, max_length=256, deterministic=True)
        engine._table.snapshots = Snapshots(engine._table.num_slots, snapshots)
        runs.append([[turn[1] for turn in turns] for turns in play(engine, prompts, pause, turns=2)])
        if not pause:
            assert engine.stats.shared_tokens == 3 * 32  # the state after a whole chunk of the prompt
    assert runs[0] == runs[1]


def test_new_weights_forget_the_states() -> None:
    model = hybrid()
    engine = NativeEngine(model, slots=2, max_length=128)
    prompt = words(random.Random(4), 20)
    check(model, [sample_each(engine, [prompt], max_tokens=5)])
    with torch.no_grad():
        model.model.layers[0].conv.conv.weight.mul_(-1)
    asyncio.run(engine.update(Weights(1, "shared")))
    check(model, [sample_each(engine, [prompt], max_tokens=5)])


def test_an_abandoned_turn_leaves_an_exact_state() -> None:
    model, rng = hybrid(), random.Random(6)
    engine = NativeEngine(model, slots=2, max_length=256)
    prompt = words(rng, 30)

    async def abandon() -> Turns:
        session = engine.session()
        task = asyncio.create_task(session.sample(prompt, SamplingParams(max_tokens=200, seed=1)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        how = SamplingParams(max_tokens=6, seed=2)
        turns = [(prompt, await session.sample(prompt, how))]
        longer = prompt + turns[0][1].token_ids + words(rng, 4)
        turns.append((longer, await session.sample(longer, how)))
        session.close()
        return turns

    check(model, [asyncio.run(abandon())])


def test_snapshots_are_what_was_taken() -> None:
    """Random operations on rows that hold texts instead of states."""
    rng = random.Random(0)
    for count in (1, 3, 8):
        slots = 4
        snapshots = Snapshots(slots, count)
        rows, texts = [""] * snapshots.num_rows, [""] * slots  # what a row holds; what a slot has been fed

        def copy(rows: list[str] = rows, snapshots: Snapshots = snapshots) -> None:
            for source, target in snapshots.row_copies:
                rows[target] = "" if source == EMPTY_STATE else rows[source]
            snapshots.row_copies = []

        for _ in range(600):
            slot, other, what = rng.randrange(slots), rng.randrange(slots), rng.randrange(4)
            if what == 0:
                copy()
                texts[slot] += rng.choice("abc") * rng.randrange(1, 3)
                rows[slot] = texts[slot]
            elif what == 1 and texts[slot]:
                snapshots.take_snapshot(slot, len(texts[slot]))
            else:
                stored = torch.tensor([len(text) for text in texts]).numpy()
                at = int(snapshots.get_usable(stored - rng.randrange(3), stored).clip(0)[slot])
                if what == 2 or slot == other:
                    snapshots.restore(slot, at, len(texts[slot]))
                    texts[slot] = texts[slot][:at]
                else:
                    snapshots.share(slot, len(texts[slot]), other, at)
                    texts[other] = texts[slot][:at]
            copy()
            assert rows[:slots] == texts
            for text, positions in zip(texts, snapshots.rows_at, strict=True):
                assert all(rows[row] == text[:at] for at, row in positions.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "lfm2_moe",
        "falcon_h1",
        "nemotron_h",
        "granitemoehybrid",
        "minimax",
    ],
)
def test_every_hybrid_family(key: str) -> None:
    model = hybrid(key)
    for slots in (9, 4):
        check(model, play(NativeEngine(model, slots=slots, max_length=256), grouped_prompts(3, 3)))


@pytest.mark.parametrize(
    "key",
    [
        "lfm2",
        "qwen3_5",
        "falcon_h1",
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in ("qwen3_next", "qwen3_5_moe", "nemotron_h", "granitemoehybrid", "kimi_linear", "minimax")
        ),
    ],
)
def test_the_estimate_of_states_is_their_size(key: str) -> None:
    """The doctor computes from the config what the engine allocates."""
    model = hybrid(key)
    config, slots = model.config.get_text_config(), 3
    runner = NativeEngine(model, slots=slots, max_length=64)._runner
    state = sum(shape.row_bytes for shape in runner.states.shapes)
    assert get_row_bytes(config, 4) == state
    assert count_kv_layers(config) == len(runner.shapes)
    snapshots = runner.table.snapshots
    assert snapshots is not None and snapshots.num_rows == 3 * slots + 1
    shape = runner.shapes[0]
    if key != "kimi_linear":  # latent attention has one vector for all heads
        cache = len(runner.shapes) * shape.token_bytes * 64 * (slots + 1)
        assert get_cache_bytes(config, slots, 64, 4) == cache
    assert get_state_bytes(config, slots, 4) == snapshots.num_rows * state
