"""Steps that a GPU replays as CUDA graphs, run on a CPU by the same function on the same buffers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from tests.kits.engine import Turns, grouped_prompts, play, tiny, words, worst
from tests.kits.families import BY_KEY
from tests.kits.replays import ReplayedSteps, with_plain_kernels, with_replays
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.cache.snapshots import EMPTY_STATE, Snapshots
from TrainingFactory.sampling.cache.states import batch_independent_copies
from TrainingFactory.types import SamplingParams

CLOSE = 5e-4  # log-probs in float32, against the model's own forward; delta rules amplify rounding
HYBRIDS = [
    "lfm2",
    "qwen3_5",
    *(
        pytest.param(key, marks=pytest.mark.slow)
        for key in ("qwen3_next", "qwen3_5_moe", "falcon_h1", "nemotron_h", "granitemoehybrid", "minimax")
    ),
]


def tokens(runs: list[Turns]) -> list[list[list[int]]]:
    return [[completion.token_ids for _, completion in turns] for turns in runs]


def check(model: Any, engine: NativeEngine, replays: ReplayedSteps, expected: list[Turns]) -> None:
    played = play(engine, grouped_prompts(2, 3), turns=3)
    assert tokens(played) == tokens(expected)
    assert max(worst(model, turns) for turns in played) < CLOSE
    assert replays.replayed > 10 and replays.recorded < replays.replayed
    assert replays.changed == []


@pytest.mark.parametrize("key", HYBRIDS)
@pytest.mark.parametrize("kernels", [True, False])
def test_a_hybrid_samples_the_same_from_replayed_steps(key: str, kernels: bool) -> None:
    model = BY_KEY[key].build()
    expected = play(NativeEngine(model, slots=7, max_length=256), grouped_prompts(2, 3), turns=3)
    engine = with_plain_kernels(model, 7) if kernels else NativeEngine(model, slots=7, max_length=256)
    check(model, engine, with_replays(engine), expected)


def test_a_stop_that_the_host_does_not_know_yet_leaves_the_state_as_it_was() -> None:
    """A turn that stops while its next tokens are sampled continues from the state before its last token."""
    model = BY_KEY["lfm2"].build()
    engine, stops = with_plain_kernels(model, 4), tuple(range(4, 34))
    with_replays(engine)

    async def one(seed: int) -> Turns:
        rng, session = random.Random(seed), engine.session()
        turns, prompt = list[tuple[list[int], Any]](), words(rng, 12)
        for turn in range(4):
            how = SamplingParams(max_tokens=12, stop_ids=stops, seed=10 * seed + turn)
            turns.append((prompt, await session.sample(prompt, how)))
            prompt = prompt + turns[-1][1].token_ids + words(rng, 5)
        session.close()
        return turns

    async def everything() -> list[Turns]:
        return await asyncio.gather(*map(one, range(4)))

    played = asyncio.run(everything())
    assert max(worst(model, turns) for turns in played) < CLOSE
    assert sum(turn.finish == "stop" for turns in played for _, turn in turns) > 8


def test_turns_are_cancelled_while_tokens_are_in_flight() -> None:
    model, rng = BY_KEY["lfm2"].build(), random.Random(3)
    engine = with_plain_kernels(model, 3)
    with_replays(engine)

    async def cut_short(seed: int) -> Turns:
        session, prompt = engine.session(), words(rng, 20)
        turn = asyncio.ensure_future(session.sample(prompt, SamplingParams(max_tokens=200, seed=seed)))
        while not engine._table.in_flight.any():
            await asyncio.sleep(0.001)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        turns = [(prompt, await session.sample(prompt, SamplingParams(max_tokens=6, seed=seed)))]
        session.close()
        return turns

    for seed in range(4):
        assert worst(model, asyncio.run(cut_short(seed))) < CLOSE


def test_padding_rows_change_no_state() -> None:
    """Slots that wait for their tools keep their states while other rows decode beside them."""
    model = BY_KEY["qwen3_5"].build()
    engine, rng = with_plain_kernels(model, 6), random.Random(5)
    with_replays(engine)
    how = SamplingParams(max_tokens=9, seed=4)

    async def waits() -> Turns:
        sessions = [engine.session() for _ in range(4)]
        prompts = [words(rng, 15 + number) for number in range(4)]
        first = await asyncio.gather(*(s.sample(p, how) for s, p in zip(sessions, prompts, strict=True)))
        await sessions[3].sample(
            prompts[3] + first[3].token_ids + words(rng, 6), how
        )  # rows 0 to 2 are padding
        cache = engine._runner.states.cache
        assert cache is not None and engine._table.running.sum() == 0
        turns: Turns = []
        for number in range(3):
            prompt = prompts[number] + first[number].token_ids + words(rng, 5)
            turns.append((prompt, await sessions[number].sample(prompt, how)))
        return turns

    for turn in asyncio.run(waits()):
        assert worst(model, [turn]) < CLOSE


def test_compaction_moves_states() -> None:
    model = BY_KEY["lfm2"].build()
    engine, rng = with_plain_kernels(model, 12), random.Random(8)
    with_replays(engine)

    async def uneven() -> list[Turns]:
        async def one(number: int) -> Turns:
            session, prompt = engine.session(), prompts[number]
            turns: Turns = []
            for _ in range(2):
                long = SamplingParams(max_tokens=40 if number > 9 else 3, seed=number)
                turns.append((prompt, await session.sample(prompt, long)))
                prompt = prompt + turns[-1][1].token_ids + words(rng, 4)
            session.close()
            return turns

        prompts = [words(rng, 12) for _ in range(12)]
        return await asyncio.gather(*map(one, range(12)))

    moved, real = list[tuple[int, int]](), Snapshots.exchange

    def counted(self: Snapshots, first: int, second: int) -> None:
        moved.append((first, second))
        real(self, first, second)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshots, "exchange", counted)
        played = asyncio.run(uneven())
    assert moved
    assert max(worst(model, turns) for turns in played) < CLOSE


def test_copies_are_batched_in_their_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        copies = [(int(rng.integers(-1, 6)), int(rng.integers(0, 6))) for _ in range(12)]
        rows = list(range(6))
        for source, target in copies:
            rows[target] = -1 if source == EMPTY_STATE else rows[source]
        batched = list(range(6))
        for batch in batch_independent_copies(copies):
            read = [-1 if source == EMPTY_STATE else batched[source] for source, _ in batch]
            for value, (_, target) in zip(read, batch, strict=True):
                batched[target] = value
        assert batched == rows


def test_models_without_states_replay_too() -> None:
    model = tiny()
    expected = play(NativeEngine(model, slots=7, max_length=256), grouped_prompts(2, 3), turns=3)
    engine = with_plain_kernels(model, 7)
    check(model, engine, with_replays(engine), expected)
